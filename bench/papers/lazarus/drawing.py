"""Lazarus' figures as pictures, SVG and PNG. What is drawn has been computed elsewhere."""

from pathlib import Path

import numpy as np

from bench.papers.drawing import bar_chart, canvas, save_picture
from bench.papers.lazarus.evaluation import SPOT_S, LazarusEvaluation
from bench.papers.lazarus.text import SECTIONS

SAMPLES = "samples: aurora / system"
AXES = {
    "6": SAMPLES,
    "7": SAMPLES,
    "8": "every expert is left",
    "9": SAMPLES,
    "10a": "throughput / its own at 1:1",
    "10b": "every expert is left",
    "11": "part of 80 minutes",
    "12": SAMPLES,
    "13": "time: system / lazarus",
}


def draw(made: LazarusEvaluation, folder: Path) -> list[Path]:
    """Draws each figure with the paper's numbers as marks, and throughput over the spot trace. Returns the files' paths."""
    return _figures(made, folder) + _spot_rates(made, folder)


def _figures(made: LazarusEvaluation, folder: Path) -> list[Path]:
    """A group of bars a case, a bar a system."""
    written: list[Path] = []
    for name, axis in AXES.items():
        rows = [one for one in made.found if one.figure == name]
        cases, ways = (list(dict.fromkeys(getattr(one, key) for one in rows)) for key in ("case", "way"))
        if not rows:
            continue
        shown = {way: np.full((3, len(cases)), np.nan) for way in ways}
        papers = {way: np.full(len(cases), np.nan) for way in ways}
        for one in rows:
            at, mean = cases.index(one.case), one.ours.mean
            ends = (mean, one.ours.lowest, one.ours.highest)
            shown[one.way][:, at] = [mean if end is None else end for end in ends]
            papers[one.way][at] = np.nan if one.paper is None else one.paper
        drawn = bar_chart(SECTIONS[name].split("\n")[0], axis, cases, shown, papers)
        written += save_picture(drawn, folder, f"lazarus-{name}")
    return written


def _spot_rates(made: LazarusEvaluation, folder: Path) -> list[Path]:
    """Fig. 9: samples a second over the trace, a picture a job."""
    written: list[Path] = []
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
