"""Figures of a report's page: Vega-Lite specifications, the numbers that they draw, and tables of these numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import altair as alt
import numpy as np

from aurora.reports.tables import Table

Spec = dict[str, Any]
CELL_TEXTS = 600  # cells of a heat map, up to which they are labelled where there is room
SERIES_COLOURS = {"before": "#7f8a96", "after": "#2b83d0", "bound": "#d2622a"}  # legible on light and on dark ground
FURTHER = ("#2b83d0", "#e69f00", "#1ea37c", "#cc79a7")  # of other series
TIMES = "{'-2': '1/4 of the mean', '-1': '1/2', '0': 'mean', '1': 'twice', '2': '4 times'}[datum.value]"  # the mean of a layer
ON_COLOUR = "luminance(scale('color', datum.{})) > 0.18 ? '#0b1015' : '#ffffff'"  # ink that is legible on a mark's colour


@dataclass(frozen=True)
class View:
    """Numbers that a figure draws at one choice of a reader.

    Attributes:
        at: the choice: one name for each control of the figure.
        text: the view's key figures.
        panels: for each of the figure's specifications, its columns (arrays of equal length) and its parameters (others).
    """

    at: tuple[str, ...]
    text: str
    panels: tuple[Mapping[str, Any], ...]

    def as_json(self) -> Spec:
        """Returns the view for the page: rising columns are given by their differences, which take less space."""
        panels = []
        for panel in self.panels:
            columns, params = {}, {}
            for name, value in panel.items():
                if not isinstance(value, np.ndarray):
                    params[name] = value
                elif value.dtype.kind in "iu" and len(value) > 1 and (np.diff(value) >= 0).all():
                    columns[f"{name}+"] = np.diff(value, prepend=0).tolist()
                else:
                    columns[name] = value.tolist() if value.dtype.kind != "f" else [float(f"{x:.4g}") for x in value.tolist()]
            panels.append({"columns": columns, "params": params})
        return {"at": self.at, "text": self.text, "panels": panels}


@dataclass(frozen=True)
class Figure:
    """Figure of the page.

    Attributes:
        name: the figure's name, unique on the page.
        title: text above it.
        specs: Vega-Lite specifications, drawn beside each other; their data have the name "rows".
        choices: labels of the controls that choose a view, such as "model" and "layer".
        views: the views.
        table: table of the figure's numbers.
        shown: for bars over time, names of sets of tracks to choose from and the tracks of each; None: those that the view
            names in its parameter `tracks`.
    """

    name: str
    title: str
    specs: tuple[Spec, ...]
    choices: Sequence[str]
    views: Sequence[View]
    table: Table
    shown: Mapping[str, list[int] | None] = field(default_factory=dict)

    def as_json(self) -> Spec:
        """Returns the figure for the page."""
        views = [view.as_json() for view in self.views]
        return {"specs": self.specs, "choices": self.choices, "views": views, "shown": list(self.shown.items())}


def views_of(table: Table, choices: int, panels: Sequence[tuple[Mapping[str, Any], ...]]) -> list[View]:
    """Returns a view for each row of a table: its first cells are the choice, the others the text.

    Args:
        table: the table.
        choices: number of cells that choose a view.
        panels: the panels of each row's view.
    """
    heads = list(table.columns)[choices:]
    return [
        View(
            tuple(cells[:choices]),
            "; ".join(f"{head} {cell}" for head, cell in zip(heads, cells[choices:], strict=True)),
            drawn,
        )
        for cells, drawn in zip(table.cells, panels, strict=True)
    ]


def heat_map(
    title: str, axes: tuple[str, str], rows: int, columns: int, height: int = 300, *, relative: bool, told: str = "tokens"
) -> Spec:
    """Returns a heat map of `value`, a column of cells row by row, of which the parameter `across` are in a row; -1: no cell.

    Args:
        title: text above the map.
        axes: names of rows and columns; a map from GPUs to GPUs is square.
        rows, columns: numbers of rows and columns.
        height: height in pixels, of maps that are not square.
        relative: True: values are loads over the mean of a layer; False: values are counts from 0 to the parameter `most`.
        told: unit of counts.
    """
    square, small = axes[0] == axes[1], rows * columns <= CELL_TEXTS
    row, column = (f"from {axes[0]}", f"to {axes[1]}") if square else axes
    level = "clamp(log(max(datum.value, 0.01)) / LN2, -2, 2)" if relative else "datum.value"
    gaps = alt.Scale(paddingInner=0.04 if small else 0)
    bare: dict[str, Any] = {"labelOverlap": True, "labelAngle": 0, "ticks": False, "domain": False}
    form = ".3~r" if relative else ",d"
    values = alt.Tooltip("value:Q", title="times the layer's mean" if relative else told, format=form)
    size = [] if relative or told != "tokens" else [alt.Tooltip("bytes:Q", formatType="bytes")]
    cells = (
        alt.Chart(alt.NamedData("rows"))
        .transform_window(cell="row_number()")
        .transform_filter("datum.value >= 0")
        .transform_calculate(row="floor((datum.cell - 1) / across)", column="(datum.cell - 1) % across")
        .transform_calculate(bytes="datum.value * row_bytes", level=level)
        .encode(
            y=alt.Y("row:O", title=row, scale=gaps, axis=alt.Axis(**bare)),
            x=alt.X("column:O", title=column, scale=gaps, axis=alt.Axis(orient="top", **bare)),
            tooltip=[alt.Tooltip("row:O", title=row), alt.Tooltip("column:O", title=column), values, *size],
        )
    )
    key: dict[str, Any] = {"gradientLength": alt.ExprRef("min(width - 24, 420)"), "gradientThickness": 10}
    if relative:
        scale = alt.Scale(domain=[-2, 2], range="diverging", interpolate="rgb")
        key |= {"title": None, "values": [-2, -1, 0, 1, 2], "labelExpr": TIMES}
    else:
        scale = alt.Scale(domainMin=0, domainMax=alt.ExprRef("most"), range="ramp", interpolate="rgb")
        key |= {"title": told}
    chart = cells.mark_rect().encode(color=alt.Color("level:Q", scale=scale, legend=alt.Legend(**key)))
    if small:
        ink, fits = ON_COLOUR.format("level"), "bandwidth('x') >= 32 && bandwidth('y') >= 15 ? 1 : 0"
        shown: dict[str, Any] = {"color": alt.value(alt.ExprRef(ink)), "opacity": alt.value(alt.ExprRef(fits))}
        chart += cells.transform_filter("datum.value > 0").mark_text().encode(text=alt.Text("value:Q", format=form), **shown)
    most = min(700, columns * (46 if square and columns > 8 else 64) + 60)
    return _spec(chart, title, height, {"square": square, "most": most}, across=1, most=1, row_bytes=1)


def grouped_bars(title: str, axis: str, series: Sequence[str], value: str, *, lying: bool = False) -> Spec:
    """Returns bars of `value` by `at`, side by side for each `series`.

    Args:
        title: text above the bars; empty: none.
        axis: name of what `at` counts.
        series: the series, in sequence.
        value: name of the values: "seconds", or what is counted.
        lying: True: horizontal bars.
    """
    form: dict[str, Any] = {"formatType": "seconds"} if value == "seconds" else {"format": ",d"}
    colours = [SERIES_COLOURS.get(name.split()[0], FURTHER[number % len(FURTHER)]) for number, name in enumerate(series)]
    legend = alt.Legend(title=None) if len(series) > 1 else None
    at: dict[str, Any] = {"sort": None, "title": None if lying else axis, "axis": alt.Axis(labelOverlap=True, labelAngle=0)}
    amount: dict[str, Any] = {"title": None, "axis": alt.Axis(tickCount=5, **form)}
    places: dict[str, Any] = {
        "x": alt.X("at:O", **at),
        "xOffset": alt.XOffset("series:N", sort=list(series)),
        "y": alt.Y("value:Q", **amount),
    }
    if lying:
        places = {
            "y": alt.Y("at:O", **at),
            "yOffset": alt.YOffset("series:N", sort=list(series)),
            "x": alt.X("value:Q", **amount),
        }
    told = alt.Tooltip("at:O", title=axis), alt.Tooltip("series:N", title="of"), alt.Tooltip("value:Q", title=value, **form)
    colour = alt.Color("series:N", scale=alt.Scale(domain=list(series), range=colours), legend=legend)
    chart = alt.Chart(alt.NamedData("rows")).mark_bar().encode(**places, color=colour, tooltip=list(told))
    return _spec(chart, title, 8 * (10 + 12 * len(series)) if lying else 210, {})


def spans(
    track: str,
    names: Sequence[str],
    told: Mapping[str, str],
    colours: Sequence[str | int],
    name: str,
    label: str,
    **lists: Sequence[str],
) -> Spec:
    """Returns bars over time on tracks: from `start` to `end`, in seconds; from `top` to `foot`, in tracks.

    Parameters are `from` and `to`, the seconds that are shown, and `tracks`, the tracks' numbers from top to bottom.

    Args:
        track: name of the vertical axis.
        names: the tracks' names.
        told: {title: Vega expression} of values in a bar's tooltip.
        colours: names that have colours, in sequence; numbers have no legend.
        name: Vega expression of a bar's name among `colours`.
        label: Vega expression of the text in a bar that is wide enough.
        lists: further lists that expressions look names up in.
    """
    named = isinstance(colours[0], str)
    time = alt.Scale(domainMin=alt.ExprRef("from"), domainMax=alt.ExprRef("to"), nice=False, zero=False)
    lanes = alt.Scale(domainMin=0, domainMax=alt.ExprRef("length(tracks)"), reverse=True, nice=False)
    ticks = alt.Axis(formatType="seconds", orient="top", tickCount=alt.ExprRef("width / 110"))
    rows = alt.Axis(
        values=alt.ExprRef("sequence(0.5, length(tracks))"), labelExpr="names[tracks[floor(datum.value)]]", labelOverlap=False,
        grid=False, ticks=False,
    )  # fmt: skip
    times = {"start": "seconds", "takes": "seconds", "bytes": "bytes"}
    tooltip = [alt.Tooltip(f"{title}:N") for title in (track, *told)]
    tooltip += [alt.Tooltip(f"{title}:Q", formatType=form) for title, form in times.items()]
    calculated = {track: "names[datum.lane]", "takes": "datum.end - datum.start", "mid": "(datum.top + datum.foot) / 2"}
    bars = (
        alt.Chart(alt.NamedData("rows"))
        .transform_calculate(name=name, label=label, **calculated, **told)
        .encode(x=alt.X("start:Q", title=None, scale=time, axis=ticks), tooltip=tooltip)
    )
    fits = "scale('x', datum.end) - scale('x', datum.start) > 7 * length('' + datum.label) + 6"
    fits += " && scale('y', datum.foot) - scale('y', datum.top) >= 10 ? datum.label : ''"
    colour = alt.Scale(range="ordinal" if named else "category", domain=list(colours))
    drawn = bars.mark_rect(clip=True).encode(
        x2="end",
        y=alt.Y("top:Q", title=None, scale=lanes, axis=rows),
        y2="foot",
        color=alt.Color("name:N", scale=colour, legend=alt.Legend(title=None) if named else None),
    )
    words = bars.mark_text(clip=True, align="left", dx=3)
    ink = alt.value(alt.ExprRef(ON_COLOUR.format("name")))
    chart = drawn + words.encode(y=alt.Y("mid:Q", axis=rows), text=alt.value(alt.ExprRef(fits)), color=ink)
    params = {"from": 0, "to": 1, "tracks": [0], "names": names, "colours": colours, **lists}
    return _spec(chart, "", 200, {"spans": True}, **params)


def _spec(chart: alt.Chart | alt.LayerChart, title: str, height: int, about: Mapping[str, Any], **params: Any) -> Spec:
    """The specification of a chart, whose parameters the page sets; `about` is for the page's script."""
    spec = {key: value for key, value in chart.to_dict().items() if key not in ("$schema", "config")}
    spec |= {"height": height, "usermeta": dict(about)} | ({"title": title} if title else {})
    listed = {name: list(value) if isinstance(value, Sequence) else value for name, value in params.items()}
    return spec | {"params": [{"name": name, "value": value} for name, value in listed.items()]}
