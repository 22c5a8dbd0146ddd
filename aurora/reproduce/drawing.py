"""The figures as pictures, SVG and PNG. What is drawn has been computed elsewhere."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from aurora.reports.pictures import canvas, save_picture
from aurora.reproduce.aurora.figures import FIGURES, Run
from aurora.reproduce.aurora.studies import STUDIES
from aurora.reproduce.lazarus.evaluation import SPOT_S, LazarusEvaluation
from aurora.reproduce.lazarus.text import KINDS
from aurora.types.arrays import FloatArray


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
            shown = {
                label: np.stack([values_SC.mean(axis=0), values_SC.min(axis=0), values_SC.max(axis=0)])
                for label, values_SC in figure.shown(run).items()
            }
            drawn = bars(f"Fig. {name}: {figure.title}, {run.traffic} traffic", figure.axis, run.cases, shown)
            written += save_picture(drawn, folder, f"figure-{name}-{run.traffic}")
    return written


def bars(
    title: str, axis: str, cases: Sequence[str], shown: Mapping[str, FloatArray], papers: Mapping[str, FloatArray] | None = None
) -> Any:
    """A picture of a group of bars a case. shown: by label (3, C) means, smallest and largest; papers: by label (C,) what a
    paper gives, marked on the bars, NaN where it gives nothing."""
    drawn = canvas(max(6.0, 0.8 * len(cases)), 3.6)
    axes = drawn.add_subplot()
    at_C, width = np.arange(len(cases)), 0.8 / len(shown)
    for number, (label, values_3C) in enumerate(shown.items()):
        mean_C, low_C, high_C = values_3C
        left_C = at_C - 0.4 + (number + 0.5) * width
        whisker_2C = np.maximum(np.stack([mean_C - low_C, high_C - mean_C]), 0)
        axes.bar(left_C, mean_C, width, label=label, yerr=whisker_2C, error_kw={"elinewidth": 0.6})
        if papers is not None:
            axes.plot(left_C, papers[label], "kD", markersize=4, label=None if number else "the paper's")
    axes.set_xticks(at_C, cases, rotation=45, ha="right")
    axes.set_ylabel(axis)
    axes.set_title(title, fontsize="medium")
    drawn.legend(fontsize="small", ncols=min(len(shown) + (papers is not None), 4), loc="outside lower center")
    return drawn


def draw_lazarus(made: LazarusEvaluation, folder: Path) -> list[Path]:
    """Each figure of an evaluation of Lazarus, the paper's numbers marked, and throughput over the spot trace."""
    written: list[Path] = []
    for name, kind in KINDS.items():
        rows = [one for one in made.found if one.figure == name]
        cases, ways = (list(dict.fromkeys(getattr(one, key) for one in rows)) for key in ("case", "way"))
        if not kind.axis or not rows:
            continue
        shown = {way: np.full((3, len(cases)), np.nan) for way in ways}
        papers = {way: np.full(len(cases), np.nan) for way in ways}
        for one in rows:
            at, mean = cases.index(one.case), one.ours.mean
            ends = (mean, one.ours.lowest, one.ours.highest)
            shown[one.way][:, at] = [mean if end is None else end for end in ends]
            papers[one.way][at] = np.nan if one.paper is None else one.paper
        drawn = bars(f"Fig. {name}: {kind.title}", kind.axis, cases, shown, papers)
        written += save_picture(drawn, folder, f"lazarus-{name}")
    for job, by in made.spot.items():
        drawn = canvas(7.0, 3.2)
        axes = drawn.add_subplot()
        for system in ("aurora", "DS", "DS(FT)"):
            rates = by[system]
            minutes = [time_s / 60 for time_s, _, _ in rates] + [SPOT_S / 60]
            axes.step(minutes, [rate for _, _, rate in rates] + [rates[-1][2]], where="post", label=system)
        axes.set_xlabel("minutes")
        axes.set_ylabel("samples a second")
        axes.set_ylim(bottom=0)
        axes.set_title(f"Fig. 9: spot instances, {job}", fontsize="medium")
        drawn.legend(fontsize="small", ncols=3, loc="outside lower center")
        written += save_picture(drawn, folder, f"lazarus-9-{job}")
    return written
