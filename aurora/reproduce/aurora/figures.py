"""Figures of the evaluation as numbers: runs over seeds, and what each figure shows of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from aurora.reproduce.aurora.studies import LEVELS, Outcomes
from aurora.types.arrays import FloatArray


@dataclass(frozen=True)
class Run:
    """One study under one traffic and one pricing.

    Attributes:
        study, traffic, pricing: their names in STUDIES, TRAFFIC and PRICINGS.
        ways: the methods that are compared, such as "Aurora" or "Lina, half"; axis W.
        cases: the models, data sets and layers; axis C.
        seconds_WSC, utilisation_WSC: (W, S, C) float64, by method, seed and case.
    """

    study: str
    traffic: str
    pricing: str
    ways: tuple[str, ...]
    cases: tuple[str, ...]
    seconds_WSC: FloatArray
    utilisation_WSC: FloatArray

    def seconds(self, way: str) -> FloatArray:
        """Returns (S, C) seconds of one method of `ways`."""
        return np.asarray(self.seconds_WSC[self.ways.index(way)])

    def utilisation(self, way: str) -> FloatArray:
        """Returns (S, C) utilisation of one method of `ways`, as a part of one."""
        return np.asarray(self.utilisation_WSC[self.ways.index(way)])


def run_of(study: str, traffic: str, pricing: str, seeds: Sequence[Outcomes]) -> Run:
    """Makes a Run of the outcomes of several seeds.

    Args:
        study, traffic, pricing: names, as in `Run`.
        seeds: one Outcomes per seed, with the same methods and cases.
    """
    ways = tuple(seeds[0])
    cases = tuple(seeds[0][ways[0]])
    found = [[[outcomes[way][case] for case in cases] for outcomes in seeds] for way in ways]
    seconds_WSC = np.array([[[one.seconds for one in row] for row in way] for way in found])
    utilisation_WSC = np.array([[[one.utilisation for one in row] for row in way] for way in found])
    return Run(study, traffic, pricing, ways, cases, seconds_WSC, utilisation_WSC)


Shown = dict[str, FloatArray]  # label -> (S, C)


@dataclass(frozen=True)
class Figure:
    """A figure of the paper.

    Attributes:
        title: what it is about.
        study: name of the study whose runs it shows.
        axis: what its numbers are.
        shown: (run) -> by label (S, C), the bars of each case, or the points of each level.
    """

    title: str
    study: str
    axis: str
    shown: Callable[[Run], Shown]


def _seconds(run: Run) -> Shown:
    return {way: run.seconds(way) * 1e3 for way in run.ways if way != "exclusive"}


def _utilisation(run: Run) -> Shown:
    names = {"Aurora": "Aurora + colocation", "exclusive": "Aurora + exclusive", "Lina, half": "Lina, half"}
    return {name: run.utilisation(way) for way, name in names.items()}


def _over_optimum(run: Run) -> Shown:
    return {way: run.seconds(way) / run.seconds("optimum") for way in ("Aurora", "ours")}


def acceleration(run: Run, level: int) -> FloatArray:
    """Returns (S, C): the random baseline's seconds over Aurora's.

    Args:
        run: of a study with foreign traffic.
        level: per cent of foreign traffic, one of LEVELS.
    """
    random = next(way for way in run.ways if way.startswith("RGA"))
    return run.seconds(f"{random.split(',')[0]}, {level} %") / run.seconds(f"Aurora, {level} %")


def _accelerations(run: Run) -> Shown:
    return {f"{level} %": acceleration(run, level) for level in LEVELS}


MS, SHARE = "inference time of a layer, ms", "GPU utilisation"
FIGURES: dict[str, Figure] = {
    "11a": Figure("exclusive, equal GPUs", "exclusive, equal", MS, _seconds),
    "11b": Figure("exclusive, mixed GPUs", "exclusive, mixed", MS, _seconds),
    "11c": Figure("colocated, equal GPUs", "colocated, equal", MS, _seconds),
    "11d": Figure("colocated, mixed GPUs", "colocated, mixed", MS, _seconds),
    "12a": Figure("utilisation, equal GPUs", "colocated, equal", SHARE, _utilisation),
    "12b": Figure("utilisation, mixed GPUs", "colocated, mixed", SHARE, _utilisation),
    "13": Figure("distance to the optimum", "optimum", "inference time / optimum", _over_optimum),
    "14a": Figure("foreign traffic, exclusive", "foreign, exclusive", "acceleration over RGA", _accelerations),
    "14b": Figure("foreign traffic, colocated", "foreign, colocated", "acceleration over RGA + REC", _accelerations),
}
