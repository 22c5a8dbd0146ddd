"""Headlines of a paper beside ours: one table, printed and written to a folder."""

from argparse import ArgumentParser
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np


class Headline(NamedTuple):
    """One figure of a paper, and ours.

    Args:
        figure: number of the figure or table.
        what: what is measured.
        paper: the paper's figure, in words; empty: it gives none.
        ours: our figures, of one or several draws.
    """

    figure: str
    what: str
    paper: str
    ours: Sequence[float]


def table(headlines: Iterable[Headline]) -> str:
    """Returns the headlines as a Markdown table; ours is the mean, with the lowest and the highest of several."""
    lines = ["| figure | | paper | ours |", "|---|---|---|---|"]
    for figure, what, paper, ours in headlines:
        spread = f" ({min(ours):.3g} to {max(ours):.3g})" if len(ours) > 1 else ""
        lines.append(f"| {figure} | {what} | {paper or '-'} | {np.mean(ours):.3g}{spread} |")
    return "\n".join(lines)


def write(paper: str, about: str, made: Callable[[], Iterable[Headline]]) -> None:
    """Makes the headlines, prints their table and writes it to PAPER.md in the folder of the option -o."""
    parser = ArgumentParser(f"python -m bench.papers.{paper}", description=about.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder for the table")
    folder = parser.parse_args().output
    folder.mkdir(parents=True, exist_ok=True)
    text = table(made())
    print(text)
    (folder / f"{paper}.md").write_text(f"{about}\n{text}\n")
