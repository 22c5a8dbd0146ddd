"""Markdown pages of evaluations."""

from collections.abc import Iterable, Sequence


def page(title: str, source: str, lines: Iterable[str], pictures: Sequence[str] = ()) -> str:
    """Returns a Markdown page of a title, a source, lines, and pictures given by their file names."""
    shown = (f"![{picture}]({picture})" for picture in pictures)
    return "\n".join([f"# {title}", "", source, "", *lines, *shown]).rstrip() + "\n"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Returns the lines of a Markdown table and an empty line after it; every row has a cell per column."""
    lines = ("|".join(["", *(f" {cell} " if cell else " " for cell in row), ""]) for row in (columns, *rows))
    return [next(lines), "|" + "---|" * len(columns), *lines, ""]
