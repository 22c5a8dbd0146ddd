"""Pictures by matplotlib, the same bytes every time, and bar charts as papers draw them. This module computes no numbers."""

from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from aurora.io.files import write_bytes
from aurora.types.arrays import FloatArray

UNDATED = {"svg": {"Date": None}, "png": {"Software": None}, "pdf": {"CreationDate": None}}  # metadata by suffix


def canvas(width: float, height: float) -> Any:
    """Returns a matplotlib figure that needs no screen.

    Args:
        width, height: size in inches.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save_picture(drawn: Any, folder: Path, name: str, suffixes: Sequence[str] = ("svg", "png")) -> list[Path]:
    """Writes a picture as NAME.svg and so on. Returns the paths.

    Args:
        drawn: a matplotlib figure.
        folder: folder to write to.
        name: name of the files, without suffix.
        suffixes: kinds of files: "svg", "png", "pdf".
    """
    import matplotlib

    written = []
    for suffix in suffixes:
        picture = BytesIO()
        with matplotlib.rc_context({"svg.hashsalt": name}):
            drawn.savefig(picture, format=suffix, dpi=150, metadata=UNDATED[suffix])
        path = folder / f"{name}.{suffix}"
        write_bytes(path, picture.getvalue())
        written.append(path)
    return written


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
