"""PLACE: strategies that divide the experts of one layer into J groups, one for each GPU.

Each strategy takes (load_E, slots_J, rng) and returns group_E, as `balanced` describes them.
"""

from collections.abc import Callable

import numpy as np

from aurora.algorithms.replicas.eplb import balanced
from aurora.errors import BadInput
from aurora.types.arrays import IntArray

GroupingStrategy = Callable[[IntArray, IntArray, np.random.Generator], IntArray]


def contiguous(load_E: IntArray, slots_J: IntArray, rng: np.random.Generator) -> IntArray:
    """Fills groups in order of expert index, as engines do without a plan. Args and returns: as in `balanced`."""
    return np.repeat(np.arange(len(slots_J)), slots_J)[: len(load_E)]


def shuffled(load_E: IntArray, slots_J: IntArray, rng: np.random.Generator) -> IntArray:
    """Fills groups with experts in random order. Args and returns: as in `balanced`."""
    return rng.permutation(contiguous(load_E, slots_J, rng))


PLACE: dict[str, GroupingStrategy] = {"balanced": balanced, "contiguous": contiguous, "random": shuffled}


def grouped(place: str, load_E: IntArray, slots_J: IntArray, rng: np.random.Generator) -> IntArray:
    """Calls a strategy of PLACE, checks the result (users may register strategies), and returns (E,) int64 groups.

    Args:
        place: the strategy's name.
        load_E, slots_J, rng: as in `balanced`.

    Raises:
        BadInput: if an expert has no group from 0 to J - 1, or a group has more experts than slots.
    """
    group_E = np.asarray(PLACE[place](load_E, slots_J, rng))
    whole = group_E.shape == load_E.shape and group_E.dtype.kind in "iu"
    if not whole or group_E.min() < 0 or group_E.max() >= len(slots_J):
        raise BadInput(f"`place` {place}: expected a group from 0 to {len(slots_J) - 1} for each of {len(load_E)} experts")
    if ((held_J := np.bincount(group_E, minlength=len(slots_J))) > slots_J).any():
        raise BadInput(f"`place` {place}: expected at most {slots_J.tolist()} experts in groups, found {held_J.tolist()}")
    return group_E.astype(np.int64)
