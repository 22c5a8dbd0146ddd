"""Compares a map of experts with no map on given traffic, and finds the number of GPUs that it may have been made for."""

from dataclasses import dataclass

import numpy as np

from aurora.algorithms.workload.traffic import contiguous_split
from aurora.errors import BadInput
from aurora.types import Placement
from aurora.types.arrays import FloatArray, IntArray


@dataclass(frozen=True, eq=False)
class MapBalance:
    """Balance of a map; `str` is a sentence for users.

    Attributes:
        ratio_L: (L,) the largest load of a GPU / the mean, by layer, under the map.
        without_L: (L,) the same without a map, with experts on GPUs in sequence.
        gpus: number of GPUs.
        made_for: another number of GPUs on which the map is at least as good as none, and best beside none, and its mean ratio
            there; None if there is none, or the map is better than none on `gpus`.
    """

    ratio_L: FloatArray
    without_L: FloatArray
    gpus: int
    made_for: tuple[int, float] | None

    @property
    def worse(self) -> bool:
        """True if the map's mean ratio is above that without a map."""
        return bool(self.ratio_L.mean() > self.without_L.mean() + 1e-9)

    def __str__(self) -> str:
        worst = int(self.ratio_L.argmax())
        uneven = f" ({self.ratio_L[worst]:.2f} in layer {worst})" if self.ratio_L[worst] > self.ratio_L.min() + 5e-3 else ""
        said = f"the fullest GPU has {self.ratio_L.mean():.2f} of the mean load{uneven} on {self.gpus} GPUs"
        said += f", {'worse than' if self.worse else 'beside'} no map ({self.without_L.mean():.2f})"
        if self.made_for is None:
            return said
        gpus, ratio = self.made_for
        return f"{said}: on {gpus} GPUs it has {ratio:.2f}; was it made for {gpus}?"


def map_balance(placement: Placement, load_LE: FloatArray, slots_LP: IntArray | None = None) -> MapBalance:
    """Returns the balance of a map on traffic.

    Args:
        placement: the map.
        load_LE: (L, E) tokens of each expert.
        slots_LP: (L, P) the expert in each slot, where slots could be divided over other numbers of GPUs; None: they could not.

    Raises:
        BadInput: if the loads are of other layers or experts.
    """
    layers, experts = len(placement.slots_LG), placement.experts
    if load_LE.shape != (layers, experts):
        found = f"{load_LE.shape[0]} layers and {load_LE.shape[1]} experts"
        raise BadInput(f"`loads`: expected {layers} layers and {experts} experts, as in the map, found {found}")
    ratio_L, without_L = _ratios(placement, load_LE)
    made_for = None
    if slots_LP is not None and ratio_L.mean() > without_L.mean() + 1e-9:
        slots, best = slots_LP.shape[1], 1 - 1e-9
        for gpus in (count for count in range(2, slots) if slots % count == 0 and count != placement.gpus):
            divided = Placement.evenly(tuple(tuple(map(tuple, row.reshape(gpus, -1).tolist())) for row in slots_LP))
            other_L, none_L = _ratios(divided, load_LE)
            if (gain := float(none_L.mean() / other_L.mean())) >= best:
                made_for, best = (gpus, float(other_L.mean())), gain
    return MapBalance(ratio_L, without_L, placement.gpus, made_for)


def _ratios(placement: Placement, load_LE: FloatArray) -> tuple[FloatArray, FloatArray]:
    """(L,) largest load of a GPU / mean load, 1 without load: under the placement, and with experts in sequence."""
    without_EG = contiguous_split(placement.experts, placement.gpus)
    of_map, of_none = (
        [load_E @ split_EG for load_E, split_EG in zip(load_LE, splits, strict=True)]
        for splits in (map(placement.split_EG, range(len(load_LE))), [without_EG] * len(load_LE))
    )
    return _over_mean(np.array(of_map)), _over_mean(np.array(of_none))


def _over_mean(load_LG: FloatArray) -> FloatArray:
    """(L,) the largest of each row / its mean; 1 where there is no load."""
    mean_L = load_LG.mean(axis=1)
    return np.where(mean_L > 0, load_LG.max(axis=1) / np.maximum(mean_L, 1e-300), 1.0)
