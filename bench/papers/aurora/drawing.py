"""Aurora's figures as pictures, SVG and PNG. What is drawn has been computed elsewhere."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bench.papers.aurora.figures import FIGURES, Run
from bench.papers.aurora.studies import STUDIES
from bench.papers.drawing import bar_chart, save_picture


def draw(runs: Sequence[Run], names: Sequence[str], folder: Path) -> list[Path]:
    """Draws the figures `names` for each traffic, with the paper's pricing. Returns the paths of the files written.

    Bars are means over seeds, whiskers the smallest and the largest value.
    """
    written: list[Path] = []
    for name in names:
        figure = FIGURES[name]
        for run in runs:
            if run.study != figure.study or run.pricing != STUDIES[run.study].pricings[0]:
                continue
            shown = {
                label: np.stack([values_SC.mean(axis=0), values_SC.min(axis=0), values_SC.max(axis=0)])
                for label, values_SC in figure.shown(run).items()
            }
            drawn = bar_chart(f"Fig. {name}: {figure.title}, {run.traffic} traffic", figure.axis, run.cases, shown)
            written += save_picture(drawn, folder, f"figure-{name}-{run.traffic}")
    return written
