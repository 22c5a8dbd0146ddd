"""Compares a map of experts with no map on given traffic, and finds the number of GPUs that it may have been made for."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from aurora.algorithms.workload.traffic import contiguous_split
from aurora.errors import BadInput
from aurora.types import Placement
from aurora.types.arrays import FloatArray, IntArray
from aurora.types.placement import TINY

SAME = 1e-9  # ratios that differ by less are equal


@dataclass(frozen=True, eq=False)
class MapBalance:
    """Balance of a map; `str` is a sentence for users.

    Attributes:
        ratio_L: (L,) the largest load of a GPU / the mean, by layer, under the map.
        without_L: (L,) the same without a map, with experts on GPUs in sequence.
        gpus: number of GPUs.
        made_for: another number of GPUs on which the map is at least as good as none, and best beside none, with its mean ratio
            there; empty if there is none, or the map is no worse than none on `gpus`.
    """

    ratio_L: FloatArray
    without_L: FloatArray
    gpus: int
    made_for: tuple[tuple[int, float], ...]

    def __str__(self) -> str:
        worst, ratio, without = int(self.ratio_L.argmax()), self.ratio_L.mean(), self.without_L.mean()
        uneven = f" ({self.ratio_L[worst]:.2f} in layer {worst})" if self.ratio_L[worst] > self.ratio_L.min() + 5e-3 else ""
        beside = "worse than" if ratio > without + SAME else "beside"
        said = f"the fullest GPU has {ratio:.2f} of the mean load{uneven} on {self.gpus} GPUs, {beside} no map ({without:.2f})"
        return said + "".join(f": on {gpus} GPUs it has {there:.2f}; was it made for {gpus}?" for gpus, there in self.made_for)

    @property
    def as_json(self) -> dict[str, Any]:
        """The balance as an object for `--json`."""
        return {"ratios": self.ratio_L, "without": self.without_L, "made_for": next((gpus for gpus, _ in self.made_for), None)}


def map_balance(placement: Placement, load_LE: FloatArray, slots_LP: IntArray | None = None) -> MapBalance:
    """Returns the balance of a map on traffic.

    Args:
        placement: the map.
        load_LE: (L, E) tokens of each expert.
        slots_LP: (L, P) the expert in each slot, where slots could be divided over other numbers of GPUs; None: they could not.

    Raises:
        BadInput: if the loads are of other layers or experts.
    """
    expected, found = (len(placement.slots_LG), placement.experts), load_LE.shape
    if found != expected:
        raise BadInput(f"`loads`: expected layers and experts {expected}, as in the map, found {found}")
    ratio_L, without_L = _ratios(placement, load_LE)
    gains: dict[float, tuple[int, float]] = {}
    if slots_LP is not None and ratio_L.mean() > without_L.mean() + SAME:
        slots = slots_LP.shape[1]
        for gpus in (count for count in range(2, slots) if slots % count == 0 and count != placement.gpus):
            divided = Placement.evenly(tuple(tuple(map(tuple, row.reshape(gpus, -1).tolist())) for row in slots_LP))
            other_L, none_L = _ratios(divided, load_LE)
            gains[float(none_L.mean() / other_L.mean())] = gpus, float(other_L.mean())
    best = max(gains, default=0.0)
    return MapBalance(ratio_L, without_L, placement.gpus, (gains[best],) if best > 1 - SAME else ())


def _ratios(placement: Placement, load_LE: FloatArray) -> tuple[FloatArray, FloatArray]:
    """(L,) largest load of a GPU / mean load, 1 without load: under the placement, and with experts in sequence."""
    split_LEG = np.array([placement.split_EG(layer) for layer in range(len(load_LE))])
    of_map_LG = np.einsum("le,leg->lg", load_LE, split_LEG) + TINY
    of_none_LG = load_LE @ contiguous_split(placement.experts, placement.gpus) + TINY
    return of_map_LG.max(axis=1) / of_map_LG.mean(axis=1), of_none_LG.max(axis=1) / of_none_LG.mean(axis=1)
