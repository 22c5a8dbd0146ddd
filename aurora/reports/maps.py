"""Speed-ups over a grid of settings, as a table."""

import itertools
from collections.abc import Mapping, Sequence


def map_markdown(grid: Mapping[str, Sequence[float]], speedups: Sequence[Mapping[str, float]], pays: Sequence[str]) -> str:
    """Returns a Markdown page with a table of speed-ups over a grid of settings.

    Args:
        grid: the values of each setting, by its name; points are all combinations, the last setting fastest.
        speedups: for each point, the speed-ups by name.
        pays: for each point, what pays there, in words.
    """
    heads = [*grid, *speedups[0], "pays"]
    lines = ["# What pays", "", "| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for values, found, what in zip(itertools.product(*grid.values()), speedups, pays, strict=True):
        cells = [*(f"{value:g}" for value in values), *(f"{value:.3f}" for value in found.values()), what]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
