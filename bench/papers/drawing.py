"""Bar charts as papers draw them. This module computes no numbers."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from aurora.reports.pictures import canvas
from aurora.types.arrays import FloatArray


def bar_chart(
    title: str, axis: str, cases: Sequence[str], shown: Mapping[str, FloatArray], papers: Mapping[str, FloatArray] | None = None
) -> Any:
    """Draws a group of bars for each of C cases and returns the matplotlib figure.

    `shown` has by label (3, C): heights, and lower and upper ends of the whiskers. `papers` has by label (C,) the paper's
    numbers, drawn as marks.
    """
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
