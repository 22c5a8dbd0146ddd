"""Pictures of the figures, SVG and PNG. This module computes no numbers."""

from pathlib import Path

import numpy as np

from bench.papers.bcc.evaluation import FIGURE_2, BccResults
from bench.papers.bcc.studies import SCHEMES
from bench.papers.drawing import canvas, save_picture


def draw(found: BccResults, folder: Path) -> list[Path]:
    """Draws Fig. 2, 4 and 5 of the paper. Returns the paths of the files written."""
    return _fig_2(found, folder) + _fig_4(found, folder) + _fig_5(found, folder)


def _fig_2(found: BccResults, folder: Path) -> list[Path]:
    drawn = canvas(5.0, 3.6)
    axes = drawn.add_subplot()
    for scheme in dict.fromkeys(one.scheme for one in found.thresholds):
        some = [one for one in found.thresholds if one.scheme == scheme]
        axes.plot([one.load for one in some], [one.exact for one in some], label=scheme, marker=".")
    loads = sorted({one.load for one in found.thresholds})
    axes.plot(loads, [FIGURE_2 / load for load in loads], label="bound", color="black", linestyle=":")
    axes.set_xlabel("computational load r")
    axes.set_ylabel("recovery threshold K, exact")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.legend(fontsize="small")
    return save_picture(drawn, folder, "bcc-figure-2")


def _fig_4(found: BccResults, folder: Path) -> list[Path]:
    drawn = canvas(4.0 * len(found.simulated), 3.6)
    for number, (workers, by_delays) in enumerate(found.simulated.items()):
        axes = drawn.add_subplot(1, len(found.simulated), number + 1)
        at_D, width = np.arange(len(by_delays)), 0.8 / len(SCHEMES)
        for place, scheme in enumerate(SCHEMES):
            seconds = [next(t.seconds for t in timings if t.scheme == scheme) for timings in by_delays.values()]
            axes.bar(at_D - 0.4 + (place + 0.5) * width, seconds, width, label=scheme if number == 0 else None)
        axes.set_xticks(at_D, list(by_delays), rotation=30, ha="right")
        axes.set_ylabel(f"s for {found.options.iterations} iterations, simulated clock")
        axes.set_title(f"{workers} workers", fontsize="medium")
    drawn.legend(fontsize="small", ncols=len(SCHEMES), loc="outside lower center")
    return save_picture(drawn, folder, "bcc-figure-4")


def _fig_5(found: BccResults, folder: Path) -> list[Path]:
    one = found.mixed
    drawn = canvas(5.0, 3.2)
    axes = drawn.add_subplot()
    bars = {
        "load-balanced": one.balanced_s,
        "P2, m log m results": one.p2_s,
        "P2, sum recoverable": one.recovery.mean_s,
        "even split": one.even_s,
        "recommended": one.recommended_s,
    }
    axes.barh(list(bars), list(bars.values()))
    axes.set_xlabel("expected seconds")
    return save_picture(drawn, folder, "bcc-figure-5")
