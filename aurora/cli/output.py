"""Output of subcommands: tables and sentences, or with `--json` one object (documented in docs/json.md); and progress bars."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from aurora.errors import need

if TYPE_CHECKING:
    from rich.console import RenderableType

SCHEMA = 1  # of the JSON that subcommands print: docs/json.md
WORST = 3  # layers that tables show; --json has all


def terminal() -> Console:
    """Returns the rich console for tables on standard output, with markup off; 80 columns wide where COLUMNS is 0."""
    console = Console(markup=False, highlight=False)
    console.width = console.width or 80
    return console


def show(as_json: bool, result: Mapping[str, Any], *parts: RenderableType | None) -> None:
    """Print a result.

    Args:
        as_json: True: print only `found`, as one JSON object with its schema; False: print `parts`.
        found: the result.
        parts: tables and sentences, printed in sequence; None and empty ones are skipped.
    """
    if as_json:
        print(json_text(result))
        return
    console = terminal()
    for part in filter(None, parts):
        console.print(part, soft_wrap=isinstance(part, str), crop=False)  # a table's title is one line


def json_text(result: Mapping[str, Any]) -> str:
    """Returns a result as a JSON object with its schema: arrays as lists, null for numbers that are not finite."""
    return msgspec.json.encode({"schema": SCHEMA, **result}, enc_hook=_plain).decode()


def _plain(value: Any) -> Any:
    """Returns an array as a list, any mapping as a dict, and all else, such as a path, as text."""
    if isinstance(value, Mapping):
        return dict(value)
    return value.tolist() if hasattr(value, "tolist") else str(value).encode(errors="replace").decode()


@contextmanager
def working(what: str) -> Iterator[None]:
    """Context manager that shows what a command does, and for how long, on a terminal; nothing elsewhere."""
    with progress_bars() as progress:
        progress(what, 0, None)
        yield


def need_models() -> None:
    """Check that torch and transformers can be imported, and import them, which takes seconds."""
    with working("importing torch and transformers"):
        need("torch", "transformers")


@contextmanager
def progress_bars() -> Iterator[Callable[[str, int, int | None], None]]:
    """Context manager that yields a function(what, done, total), which updates the progress bar labelled `what`.

    Without a total the bar tells only that work goes on.
    """
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    console = Console(stderr=True)
    bars = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    with bars:
        tasks = {}

        def move(what: str, amount: int, total: int | None) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=amount, total=total)

        yield move
