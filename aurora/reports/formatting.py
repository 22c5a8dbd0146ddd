"""Formats numbers and tables: units, columns, tables limited to the worst rows, and tables as plain text."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Column, Table

from aurora.types.arrays import gap

DASH = "\N{EN DASH}"  # where there is no value
MOST_COLUMNS = 10_000  # of a terminal, more than any table needs
Columns = Mapping[str, Callable[[Any], str]]  # by head, the format of the values below it


def seconds(value: float) -> str:
    """Formats seconds with three significant digits and a unit: "1.23 ms"."""
    return _with_unit(value, {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9})


def size(value: float) -> str:
    """Formats bytes with three significant digits and a unit: "1.23 MB"."""
    return _with_unit(value, {"GB": 1e9, "MB": 1e6, "kB": 1e3, "bytes": 1.0})


def percent(value: float) -> str:
    """Formats a share in percent, with one decimal below 100 % and none from there on; 0.125 gives "12.5%"."""
    return f"{round(value, 3) + 0.0:.1%}" if abs(value) < 1 else f"{value:.0%}"


def speedup(before_s: float, after_s: float) -> str:
    """Formats the speed-up before_s / after_s as a factor, such as "1.25x"."""
    return f"{gap(before_s, after_s) + 1:.2f}x"


def distinct(names: Sequence[str]) -> tuple[str, ...]:
    """Returns the model names, with numbers appended if two are equal.

    Example:
        >>> distinct(["mixtral", "mixtral"])
        ('mixtral (0)', 'mixtral (1)')
    """
    return tuple(names) if len(set(names)) == len(names) else tuple(f"{name} ({number})" for number, name in enumerate(names))


def right(*heads: str) -> list[Column]:
    """Returns right-aligned columns, for numbers, with these heads."""
    return [Column(head, justify="right") for head in heads]


def text(value: str) -> str:
    """Returns its argument. As the format of a column, it makes the column left-aligned; other columns are right-aligned."""
    return value


def table_of(
    columns: Columns,
    rows: Iterable[Sequence[Any]],
    *,
    title: str | None = None,
    caption: str | None = None,
    worst: Callable[[Any], float] = lambda row: 0.0,
    most: int | None = None,
) -> Table:
    """Returns a table of values, formatted by column, with all rows or only the worst ones.

    Args:
        columns: the columns from left to right.
        rows: the rows: one value per column; None is shown as a dash.
        title: text above the table.
        caption: text below the table; if rows are omitted, a sentence on that is added.
        worst: called with a row; returns its sort key, larger for worse rows.
        most: number of rows to show: the worst ones, in their original sequence; None: all.
    """
    shown = list(rows)
    if most is not None and most < len(shown):
        note = f"the {most} worst of {len(shown)} layers; --json has all"
        caption = f"{caption}; {note}" if caption else note
        indices = sorted(range(len(shown)), key=lambda row: -worst(shown[row]))[:most]
        shown = [shown[row] for row in sorted(indices)]
    heads = (Column(head, justify="left" if form is text else "right", overflow="fold") for head, form in columns.items())
    table = ModelsTable(*heads, title=title, caption=caption)
    for row in shown:
        table.add_row(*(DASH if value is None else form(value) for form, value in zip(columns.values(), row, strict=True)))
    return table


class ModelsTable(Table):
    """Table that never wraps model names. If it is too wide, it is split into one table per model, below each other."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wide = options.update(width=MOST_COLUMNS)
        if self.columns[0].header != "model" or Measurement.get(console, wide, self).maximum <= options.max_width:
            yield from super().__rich_console__(console, options)
            return
        names, *cells = ([*column.cells] for column in self.columns)
        for name in dict.fromkeys(names):
            heads = (Column(column.header, justify=column.justify) for column in self.columns[1:])
            title = f"{self.title}\n{name}" if name == names[0] and self.title else str(name)
            table = Table(*heads, title=title, caption=self.caption if name == names[-1] else None)
            for model, *row in zip(names, *cells, strict=True):
                if model == name:
                    table.add_row(*row)
            if Measurement.get(console, wide, table).maximum > options.max_width:
                table.padding = (0, 0)
            yield table


def _with_unit(value: float, units: Mapping[str, float]) -> str:
    """Formats a number in the largest of some units, largest first, that it reaches, or else in the smallest."""
    rounded = float(f"{value:.3g}")  # 0.9996 s are a second, not a thousand milliseconds
    unit, scale = next(((unit, scale) for unit, scale in units.items() if rounded >= scale), list(units.items())[-1])
    return f"{value / scale:.3g} {unit}" if rounded < 1000 * scale else f"{value / scale:.0f} {unit}"
