"""The figures as pictures, SVG and PNG. What is drawn has been computed elsewhere."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from aurora.report.pictures import canvas, save_picture
from aurora.reproduce.figures import FIGURES, Run
from aurora.reproduce.studies import STUDIES


def draw(runs: Sequence[Run], names: Sequence[str], folder: Path) -> list[Path]:
    """Each named figure of FIGURES for each traffic, as the paper prices it; gives the files written.

    Bars are means over seeds, whiskers the smallest and the largest.
    """
    written: list[Path] = []
    for name in names:
        figure = FIGURES[name]
        for run in runs:
            if run.study != figure.study or run.pricing != STUDIES[run.study].pricings[0]:
                continue
            shown = figure.shown(run)
            drawn = canvas(max(6.0, 0.8 * len(run.cases)), 3.6)
            axes = drawn.add_subplot()
            at_C, width = np.arange(len(run.cases)), 0.8 / len(shown)
            for number, (label, values_SC) in enumerate(shown.items()):
                mean_C = values_SC.mean(axis=0)
                whisker_2C = np.stack([mean_C - values_SC.min(axis=0), values_SC.max(axis=0) - mean_C])
                left_C = at_C - 0.4 + (number + 0.5) * width
                axes.bar(left_C, mean_C, width, label=label, yerr=whisker_2C, error_kw={"elinewidth": 0.6})
            axes.set_xticks(at_C, run.cases, rotation=45, ha="right")
            axes.set_ylabel(figure.axis)
            axes.set_title(f"Fig. {name}: {figure.title}, {run.traffic} traffic", fontsize="medium")
            drawn.legend(fontsize="small", ncols=min(len(shown), 4), loc="outside lower center")
            written += save_picture(drawn, folder, f"figure-{name}-{run.traffic}")
    return written
