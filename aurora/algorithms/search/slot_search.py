"""Slot search: local search over the experts in the slots of all GPUs, replicas included, for one traffic case or several.

The objective is the mean over the cases that count, each by Aurora's Eq. 1 (`PhaseSums`).

A GPU is critical if it is slowest in a phase of a case that counts. Each step takes the best change of a critical GPU: it
swaps one of its slots with another GPU's, moves an expert to an empty slot, gives one of its experts a further replica
elsewhere, or puts another expert in the place of a replica.
The loops are in slot_search_core, slot_changes_core and slots_core, which are compiled.
"""

from collections.abc import Callable, Sequence

import numpy as np

from aurora.algorithms.search import slot_search_core as core
from aurora.algorithms.search.phase_sums import PhaseSums
from aurora.types.arrays import IntArray
from aurora.types.placement import EMPTY

SHAKES = 8  # most random changes of a kick
EFFORT = 10_000_000  # changes times cases that the restarts of a search price at most: about 0.1 s
ROUNDS = 4  # of a search at most
KICKS = 16  # restarts of the search in a round
WORTH = 0.01  # share of a layer's time that replicas in spare slots may cost at most


def slot_search(
    layer: PhaseSums,
    held_GP: IntArray,
    rng: np.random.Generator,
    kicks: int,
    replicas: bool = True,
    effort: int = EFFORT,
    enough_s: float = 0.0,
) -> tuple[IntArray, float]:
    """Changes the experts in slots by local search, to lower Aurora's Eq. 1, averaged over the traffic cases that count.

    It descends from held_GP, then restarts `kicks` times from random changes of the best slots. The result can be the start of
    another search. Deterministic for a given state of `rng`.

    Args:
        layer: the costs.
        held_GP: (G, P) int64, the expert in each slot to start from, -1 for none. Each expert is held, on a GPU at most once.
        rng: for the restarts.
        kicks: number of restarts.
        replicas: whether counts of replicas may change; otherwise slots only swap and move.
        effort: maximum of changes evaluated x cases in the restarts; the first descent may take ten times as many.
        enough_s: an objective in seconds at which the search ends.

    Returns:
        ((G, P) int64, the expert in each slot; the objective in seconds). Never worse than the start.
    """
    assert held_GP.shape[1] >= layer.slots_G.max(), "compiled code reads every slot"
    held_GP = np.ascontiguousarray(held_GP, dtype=np.int64).copy()
    draws_KXD = rng.random((kicks, SHAKES, 4))
    value_s = core.search(layer, held_GP, draws_KXD, replicas, effort, enough_s)
    return held_GP, value_s


def fill(layer: PhaseSums, held_GP: IntArray) -> tuple[IntArray, float]:
    """Puts replicas into all empty slots, one by one: each time the one that lowers the seconds of Aurora's Eq. 1 most.

    If none lowers them, it takes the most loaded expert whose replica does not raise them, or else the one that raises them
    least; only the 16 most and least loaded experts are tried then. A GPU that holds every expert keeps its empty slots.

    Args:
        layer: the costs.
        held_GP: (G, P) int64, the expert in each slot, -1 for none.

    Returns:
        ((G, P) int64, the expert in each slot; the objective in seconds).
    """
    wide_GP = np.full((len(held_GP), max(held_GP.shape[1], int(layer.slots_G.max()))), EMPTY, dtype=np.int64)
    wide_GP[:, : held_GP.shape[1]] = held_GP
    value_s = core.fill(layer, wide_GP)
    return wide_GP, value_s


def search_in_rounds(
    layer: PhaseSums,
    starts: Sequence[IntArray],
    judged_s: Callable[[IntArray], float],
    rng: np.random.Generator,
    replicas: bool,
    patient: bool,
) -> IntArray:
    """Returns the best of several starts and of what the search makes of them, as a second price judges it.

    The search goes on in rounds from the best of its results.

    Args:
        layer: the costs that the search sees.
        starts: (G, P) int64 each, the expert in each slot, -1 for none; filled with replicas if these are allowed.
        judged_s: returns the seconds by which results are compared, such as those on unseen traffic.
        rng: for the search.
        replicas: whether experts may have several, which then fill all slots, unless that costs more than WORTH: a hot expert
            that has a GPU to itself may have no neighbour that it can bear.
        patient: whether the search goes on after a round that gains nothing.

    Returns:
        (G, P) int64, the expert in each slot.
    """

    def full(held_GP: IntArray) -> IntArray:
        if not replicas or np.count_nonzero(held_GP != EMPTY) == layer.slots_G.sum():
            return held_GP
        filled_GP = fill(layer, held_GP)[0]
        return filled_GP if judged_s(held_GP) >= judged_s(filled_GP) * (1 - WORTH) else held_GP

    def refined(held_GP: IntArray, kicks: int) -> IntArray:
        return full(slot_search(layer, held_GP, rng, kicks, replicas)[0])

    begun = [full(start_GP) for start_GP in starts]
    improved = [refined(held_GP, 0) for held_GP in begun]
    candidates = [*improved, *begun]
    value_s = [judged_s(candidate) for candidate in candidates]
    best_GP, best_s = candidates[int(np.argmin(value_s))], min(value_s)
    held_GP = improved[int(np.argmin(value_s[: len(improved)]))]
    for _ in range(ROUNDS):
        held_GP = refined(held_GP, KICKS)
        if (now_s := judged_s(held_GP)) < best_s * (1 - 1e-12):
            best_GP, best_s = held_GP, now_s
        elif not patient:
            break
    return best_GP
