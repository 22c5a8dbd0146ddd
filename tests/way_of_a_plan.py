"""Counts the way of a profile through `aurora.plan`: stays in files, and returns to files.

A stay is a run of consecutive calls of functions of one file. The plan holds every expert once; choosing slots besides
(`slots_per_gpu` auto, the default) makes and simulates several such plans. Run `python -m tests.way_of_a_plan`; with -v it lists the files.
"""

import sys
import threading
from collections import Counter
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any

import aurora

SOURCES = str(Path(aurora.__file__).parent)


def way() -> list[str]:
    """Returns the files of all stays of a plan of one layer with 8 experts on 4 GPUs, in sequence."""
    traffic = aurora.synthetic_profile(
        "zipf:0.9", "mixtral-topics", aurora.SyntheticOptions(sources=4, windows=2, window_tokens=64)
    )
    layer, cluster = traffic.at_layers([0]), aurora.load("demo-4", aurora.Cluster)
    options = aurora.PlanOptions(slots_per_gpu=None)
    aurora.plan(cluster, layer, options)  # imports and compiles
    files: list[str] = []

    def called(frame: FrameType, event: str, _arg: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(SOURCES) and not code.co_name.startswith("<"):
            files.append(code.co_filename[len(SOURCES) + 1 :])

    threading.setprofile(called)
    sys.setprofile(called)
    aurora.plan(cluster, layer, options)
    sys.setprofile(None)
    threading.setprofile(None)  # type: ignore[arg-type]
    return [file for file, _ in groupby(files)]


if __name__ == "__main__":
    stays = way()
    counts = Counter(stays)
    print(f"{len(stays)} stays in {len(counts)} files, {len(stays) - len(counts)} returns")
    for file, count in counts.most_common() if "-v" in sys.argv else ():
        print(f"{count:4} {file}")
    if "-vv" in sys.argv:
        print("\n".join(stays))
