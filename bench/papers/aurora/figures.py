"""Figures of the evaluation as numbers: runs over seeds, and what each figure shows of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from aurora.types.arrays import FloatArray
from bench.papers.aurora.jobs import LayerOutcome
from bench.papers.aurora.studies import LEVELS


@dataclass(frozen=True)
class Run:
    """One study under one traffic and one pricing."""

    study: str  # its name in STUDIES
    traffic: str  # its name in TRAFFIC
    pricing: str  # its name in PRICINGS
    ways: tuple[str, ...]  # the methods that are compared, such as "Aurora" or "Lina, half"; axis W
    cases: tuple[str, ...]  # the models, data sets and layers; axis C
    seconds_WSC: FloatArray  # by method, seed and case
    utilisation_WSC: FloatArray

    @classmethod
    def of(cls, study: str, traffic: str, pricing: str, seeds: Sequence[Mapping[tuple[str, str], LayerOutcome]]) -> Self:
        """Returns the Run of several seeds, given as one mapping per seed from (method, case) to the outcome."""
        ways, cases = (tuple(dict.fromkeys(names)) for names in zip(*seeds[0], strict=True))
        seconds_WSC, utilisation_WSC = (
            np.array([[[getattr(found[way, case], name) for case in cases] for found in seeds] for way in ways])
            for name in ("seconds", "utilisation")
        )
        return cls(study, traffic, pricing, ways, cases, seconds_WSC, utilisation_WSC)

    def seconds(self, way: str) -> FloatArray:
        """Returns (S, C) seconds of one method of `ways`."""
        return np.asarray(self.seconds_WSC[self.ways.index(way)])

    def utilisation(self, way: str) -> FloatArray:
        """Returns (S, C) utilisation, from 0 to 1, of one method of `ways`."""
        return np.asarray(self.utilisation_WSC[self.ways.index(way)])


Shown = dict[str, FloatArray]  # label -> (S, C)


@dataclass(frozen=True)
class Figure:
    """A figure of the paper: the study it shows, and its numbers."""

    title: str  # what it is about
    study: str  # name of the study whose runs it shows
    axis: str  # what its numbers are
    shown: Callable[[Run], Shown]  # returns a run's numbers (S, C) by label: bars of each case, or points of each level


def _seconds(run: Run) -> Shown:
    return {way: run.seconds(way) * 1e3 for way in run.ways if way != "exclusive"}


def _utilisation(run: Run) -> Shown:
    names = {"Aurora": "Aurora + colocation", "exclusive": "Aurora + exclusive", "Lina, half": "Lina, half"}
    return {name: run.utilisation(way) for way, name in names.items()}


def _over_optimum(run: Run) -> Shown:
    return {way: run.seconds(way) / run.seconds("optimum") for way in ("Aurora", "ours")}


def acceleration(run: Run, level: int) -> FloatArray:
    """Returns (S, C), the random baseline's seconds divided by Aurora's, with `level` per cent of foreign traffic."""
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
