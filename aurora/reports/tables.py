"""Tables of results: one type that is printed on a terminal, written as JSON, and set on a report's page."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Column
from rich.table import Table as RichTable
from rich.text import Text

from aurora.reports.formatting import DASH

MOST_COLUMNS = 10_000  # of a terminal, more than any table needs
NAME_COLUMNS = 18  # of a name in a table's first column, below which it is not wrapped
Columns = Mapping[str, Callable[[Any], str]]  # by head, the format of the values below it


def text(value: str) -> str:
    """Returns its argument. As the format of a column, it makes the column left-aligned; other columns are right-aligned."""
    return value


@dataclass(frozen=True)
class Table:
    """Table of values, with their formats.

    Args:
        columns: the columns from left to right: their heads, and the formats of their values.
        rows: the rows: one value per column; None is shown as a dash; a row without values is a line between rows.
        title: text above the table.
        caption: text below the table.
        keys: names of the columns in JSON.
    """

    columns: Columns
    rows: Sequence[Sequence[Any]]
    title: str = ""
    caption: str = ""
    keys: Sequence[str] = ()

    def worst(self, most: int | None, badness: Callable[[Sequence[Any]], float]) -> "Table":
        """Returns the table with its worst rows alone, in their sequence, and a sentence on that below.

        Args:
            most: number of rows to keep; None: all.
            badness: called with a row; returns its sort key, larger for worse rows.
        """
        if most is None or most >= len(self.rows):
            return self
        note = f"the {most} worst of {len(self.rows)} layers; --json has all"
        kept = sorted(sorted(range(len(self.rows)), key=lambda row: -badness(self.rows[row]))[:most])
        return replace(self, rows=[self.rows[row] for row in kept], caption=f"{self.caption}; {note}" if self.caption else note)

    @property
    def cells(self) -> list[list[str]]:
        """The values as text, row by row."""
        forms = self.columns.values()
        return [
            [DASH if value is None else form(value) for form, value in zip(forms, row, strict=True)] for row in self.rows if row
        ]

    def objects(self) -> list[dict[str, Any]]:
        """Returns the rows as JSON objects, by `keys`; columns whose key is empty are left out."""
        return [{key: value for key, value in zip(self.keys, row, strict=True) if key} for row in self.rows if row]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yields what a terminal shows: models' names are never wrapped; a table that is too wide has one part per model."""
        if self.title:
            yield Text(self.title, no_wrap=True, overflow="ignore")
        names = [row[0] for row in self.rows if row]
        if self._fits(console, options) or next(iter(self.columns)) != "model":
            yield self._rich(console, options)
        else:
            for name in dict.fromkeys(names):
                yield Text(str(name))
                columns = dict(list(self.columns.items())[1:])
                yield Table(columns, [row[1:] for row in self.rows if row and row[0] == name])._rich(console, options)
        if self.caption:
            yield Text(self.caption)

    def _fits(self, console: Console, options: ConsoleOptions) -> bool:
        wide = options.update(width=MOST_COLUMNS)
        return Measurement.get(console, wide, self._rich(console, wide)).maximum <= options.max_width

    def _rich(self, console: Console, options: ConsoleOptions) -> RichTable:
        heads = [
            Column(head, justify="left" if form is text else "right", overflow="fold") for head, form in self.columns.items()
        ]
        table = RichTable(*heads, padding=(0, 1 if options.max_width == MOST_COLUMNS or self._fits(console, options) else 0))
        table.columns[0].min_width = max([0, *(min(NAME_COLUMNS, len(str(row[0]))) for row in self.rows if row)])
        cells = iter(self.cells)
        for row in self.rows:
            if row:
                table.add_row(*next(cells))
            else:
                table.add_section()
        return table
