"""Charts of a report's page as data: packed numbers for the scripts that draw charts, and tables of the same numbers."""

import base64
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.table import Table


@dataclass(frozen=True)
class Sheet:
    """A text table.

    Args:
        title: text above the table.
        heads: column headings.
        rows: the rows: one cell per column.
        note: text below the table.
    """

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


@dataclass(frozen=True)
class Frame:
    """One view of a chart.

    Attributes:
        text: caption of the view.
        columns: arrays of its numbers by name, integers or float32.
        scale: bytes or seconds per unit, if the numbers are integers.
    """

    text: str
    columns: Mapping[str, NDArray[Any]]
    scale: float = 1.0


@dataclass(frozen=True)
class Selector:
    """Control with which a reader selects a view of a chart.

    Args:
        name: label of the control, such as "layer".
        options: names to choose from; empty: views are chosen by number.
    """

    name: str
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Chart:
    """Chart of the page.

    Attributes:
        name: the chart's name, unique on the page.
        kind: "heat", "bars" or "spans", the script that draws it.
        title: text above the chart.
        choices: the controls that select a view, outermost first.
        frames: the views, in nested sequences: frames[i][j] for option i of the first choice and option j of the second.
        about: axis labels and other settings for the drawing script of this kind.
        sheets: tables of the chart's numbers.
    """

    name: str
    kind: str
    title: str
    choices: tuple[Selector, ...]
    frames: Frame | Sequence[Any]
    about: Mapping[str, Any]
    sheets: tuple[Sheet, ...] = field(default=())

    def packed(self) -> dict[str, Any]:
        """Returns the chart as JSON for the page."""
        choices = [[choice.name, list(choice.options)] for choice in self.choices]
        return {"kind": self.kind, "choices": choices, "about": dict(self.about), "frames": _nested(self.frames)}


@dataclass(frozen=True)
class Section:
    """Section of the page.

    Attributes:
        name: the section's anchor.
        title, text: heading and text above the charts.
        charts, sheets: the charts and tables in it.
        missing: sentence on an input with which the section would show more; empty: nothing is missing.
    """

    name: str
    title: str
    text: str
    charts: tuple[Chart, ...] = ()
    sheets: tuple[Sheet, ...] = ()
    missing: str = ""


def sheet(table: Table) -> Sheet:
    """Returns a rich Table as a Sheet for the page."""
    columns = [[str(cell) for cell in column.cells] for column in table.columns]
    heads = tuple(str(column.header) for column in table.columns)
    return Sheet(str(table.title or ""), heads, tuple(zip(*columns, strict=True)), str(table.caption or ""))


def ticks(start_s_X: NDArray[np.float64], end_s_X: NDArray[np.float64], bits: int) -> tuple[dict[str, NDArray[Any]], float]:
    """Rounds starts and ends of intervals to ticks (units of time), so that adjacent intervals stay adjacent.

    Args:
        start_s_X, end_s_X: (X,) float64, seconds at which each interval begins and ends.
        bits: the tick is chosen such that the latest end is 2**bits - 1 ticks.

    Returns:
        ({"start": (X,) int64, "length": (X,) int64}, in ticks; the seconds of a tick).
    """
    tick_s = float(end_s_X.max(initial=0.0)) / (2**bits - 1) or 1.0
    start_X, end_X = (np.rint(column / tick_s).astype(np.int64) for column in (start_s_X, end_s_X))
    return {"start": start_X, "length": end_X - start_X}, tick_s


def _nested(frames: Any) -> Any:
    if isinstance(frames, Frame):
        return _pack(frames)
    return [_nested(frame) for frame in frames]


def _pack(frame: Frame) -> dict[str, Any]:
    """Columns one after the other, byte planes apart, deflated, in base64."""
    heads, planes = [], []
    for name, column in frame.columns.items():
        kind = "f"
        if column.dtype.kind in "iu":
            rising = len(column) > 1 and bool((np.diff(column) >= 0).all())
            column = np.diff(column, prepend=0) if rising else column
            kind = next(k for k, size in (("B", 8), ("H", 16), ("I", 32)) if int(column.max(initial=0)) < 2**size)
            kind += "+" if rising else ""
        stored = np.ascontiguousarray(column, dtype={"B": "u1", "H": "<u2", "I": "<u4", "f": "<f4"}[kind[0]])
        heads.append([name, kind, len(stored)])
        planes.append(stored.view(np.uint8).reshape(-1, stored.itemsize).T.tobytes())
    packed = base64.b64encode(zlib.compress(b"".join(planes), 9)).decode()
    return {"text": frame.text, "columns": heads, "scale": frame.scale, "packed": packed}
