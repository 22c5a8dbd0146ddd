"""Tables as plain text, as tests read them."""

from collections.abc import Sequence
from io import StringIO

from rich.console import Console, RenderableType


def as_text(parts: Sequence[RenderableType], width: int = 110) -> str:
    """Returns tables as plain text.

    Args:
        parts: tables and lines.
        width: characters of a line.
    """
    buffer = StringIO()
    console = Console(file=buffer, width=width, color_system=None, markup=False)
    for part in parts:
        console.print(part)
    return buffer.getvalue()
