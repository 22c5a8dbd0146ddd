"""Speed-ups over a grid of settings, as a table and as heat maps."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from aurora.reports.pictures import draw_maps


def map_markdown(
    grid: Mapping[str, Sequence[float]], speedups: Sequence[Mapping[str, float]], pays: Sequence[str], pictures: Sequence[str]
) -> str:
    """Returns a Markdown page of speed-ups over a grid of settings: a table, then the pictures.

    Args:
        grid: the values of each setting, by its name; points are all combinations, the last setting fastest.
        speedups: for each point, the speed-ups by name.
        pays: for each point, what pays there, in words.
        pictures: file names of the pictures.
    """
    heads = [*grid, *speedups[0], "pays"]
    lines = ["# What pays", "", "| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for values, found, what in zip(itertools.product(*grid.values()), speedups, pays, strict=True):
        cells = [*(f"{value:g}" for value in values), *(f"{value:.3f}" for value in found.values()), what]
        lines.append("| " + " | ".join(cells) + " |")
    shown = [line for name in pictures for line in ("", f"![{name}]({name})")]
    return "\n".join([*lines, *shown]) + "\n"


def draw_map(grid: Mapping[str, Sequence[float]], speedups: Sequence[Mapping[str, float]], folder: Path) -> list[Path]:
    """Draws sweep.svg and sweep.png: a heat map of each speed-up over one or two settings.

    Args:
        grid, speedups: as in `map_markdown`.
        folder: folder to write to.

    Returns:
        Paths of the files written.
    """
    (row_key, row_values), (column_key, column_values) = [("", [0.0])] * (2 - len(grid)) + list(grid.items())
    shape = len(row_values), len(column_values)
    maps = {name: np.array([found[name] for found in speedups]).reshape(shape) for name in speedups[0]}
    rows = [f"{value:g}" if row_key else "" for value in row_values]
    return draw_maps(maps, rows, [f"{value:g}" for value in column_values], (row_key, column_key), folder, "sweep")
