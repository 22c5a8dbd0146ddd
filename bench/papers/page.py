"""Markdown pages of evaluations: each paper's folder has a template, page.md, that the evaluation fills in."""

from collections.abc import Iterable, Sequence
from pathlib import Path


def template(module: str) -> str:
    """Returns the text template in the folder of a module, given the module's __file__."""
    return Path(module).with_name("page.md").read_text(encoding="utf-8")


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a Markdown table with these columns and rows."""
    lines = ("|".join(["", *(f" {cell} " if cell else " " for cell in row), ""]) for row in (columns, *rows))
    return "\n".join([next(lines), "|" + "---|" * len(columns), *lines, ""])


def show_pictures(names: Sequence[str]) -> str:
    """Returns the pictures with an empty line before them; nothing without pictures."""
    return "\n".join(["", *(f"![{name}]({name})" for name in names), ""]) if names else ""
