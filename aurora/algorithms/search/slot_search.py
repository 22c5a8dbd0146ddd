"""Slot search: local search over the experts in the slots of all GPUs, replicas included, for one traffic case or several.

The objective is the mean over the cases that count, each by Aurora's Eq. 1 (`PhaseSums`).

A GPU is critical if it is slowest in a phase of a case that counts. Each step takes the best change of a critical GPU: it
swaps one of its slots with another GPU's, moves an expert to an empty slot, gives one of its experts a further replica
elsewhere, or puts another expert in the place of a replica. If none of these helps, two GPUs exchange all their experts.
Without numba's JIT (NUMBA_DISABLE_JIT=1) the same code runs in plain Python.
"""

from collections.abc import Callable, Sequence

import numpy as np

from aurora.algorithms.search.slot_changes import best_count_change, best_exchange, best_swap, count_changed
from aurora.algorithms.search.slot_state import (
    PhaseSums,
    exchange,
    find_gains,
    load_slots,
    overwrite,
    price,
    scratch_memory,
    start_slots,
    swap,
)
from aurora.types.arrays import FloatArray, IntArray
from aurora.types.compiled import njit
from aurora.types.placement import EMPTY_INT64 as EMPTY

SHAKES = 8  # random changes of a kick: first one, then two, ..., up to this number, then one again
LEAST_GAIN = 1e-9  # relative: a smaller gain is none
ROUNDING = 1e-12  # share of the largest summand: smaller gains are rounding, also where the objective is zero
EXTREMES = 16  # busiest and idlest experts that are tried in an empty slot where no replica lowers the objective
EFFORT = 10_000_000  # changes times cases that the restarts of a search price at most: about 0.1 s
DESCENT = 10  # so many times that may the first descent price
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
        effort: maximum of changes evaluated x cases in the restarts; the first descent may take DESCENT times as many.

    Returns:
        ((G, P) int64, the expert in each slot; the objective in seconds). Never worse than the start.
    """
    assert held_GP.shape[1] >= layer.slots_G.max(), "compiled code reads every slot"
    held_GP = np.ascontiguousarray(held_GP, dtype=np.int64).copy()
    draws_KXD = rng.random((kicks, SHAKES, 4))
    value_s = _search(layer, held_GP, _even_shares(held_GP), draws_KXD, replicas, effort)
    return held_GP, value_s


def fill(layer: PhaseSums, held_GP: IntArray) -> tuple[IntArray, float]:
    """Puts replicas into all empty slots, one by one: each time the one that lowers the seconds of Aurora's Eq. 1 most.

    If none lowers them, it takes the most loaded expert whose replica does not raise them, or else the one that raises them
    least; only the EXTREMES most and least loaded experts are tried then. A GPU that holds every expert keeps its empty slots.

    Args:
        layer: the costs.
        held_GP: (G, P) int64, the expert in each slot, -1 for none.

    Returns:
        ((G, P) int64, the expert in each slot; the objective in seconds).
    """
    wide_GP = np.full((len(held_GP), max(held_GP.shape[1], int(layer.slots_G.max()))), EMPTY, dtype=np.int64)
    wide_GP[:, : held_GP.shape[1]] = held_GP
    value_s = _fill(layer, wide_GP, _even_shares(wide_GP))
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
        if not replicas:
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


def _even_shares(held_GP: IntArray) -> FloatArray:
    """(G, P): one over the number of replicas of the expert in each slot, 0 for an empty slot."""
    count_E = np.bincount(held_GP[held_GP >= 0])
    return np.where(held_GP >= 0, 1 / count_E[held_GP], 0.0)


@njit(cache=True, nogil=True)
def _search(layer, held_GP, share_GP, draws_KXD, replicas, effort):
    """The descent and its restarts, in place; returns the objective."""
    slots, scratch = start_slots(layer, held_GP.copy(), share_GP.copy()), scratch_memory(layer, held_GP.shape[1])
    least_s = ROUNDING * max(np.abs(layer.base_s_GXW).max(), np.abs(layer.part_s_GEXW).max())
    best_s, _ = _descend(layer, slots, scratch, replicas, DESCENT * effort, least_s)
    held_GP[:], share_GP[:] = slots.held_GP, slots.share_GP
    for k in range(draws_KXD.shape[0]):
        if effort <= 0:
            break
        load_slots(layer, slots, held_GP, share_GP)
        for x in range(1 + k % SHAKES):
            _shake(layer, slots, replicas, draws_KXD[k, x])
        value_s, effort = _descend(layer, slots, scratch, replicas, effort, least_s)
        if value_s < best_s * (1 - 1e-12):
            best_s = value_s
            held_GP[:], share_GP[:] = slots.held_GP, slots.share_GP
    return best_s


@njit(cache=True, nogil=True)
def _descend(layer, slots, scratch, replicas, effort, least_s):
    """Takes the best change of a critical GPU until none gains least_s; returns (the objective, what is left of the effort)."""
    gpus = len(layer.slots_G)
    gain_G, tried_G = np.empty(gpus), np.zeros(gpus, dtype=np.bool_)
    now_s = price(layer, slots, scratch)
    find_gains(slots, gain_G)
    while effort > 0:
        g = EMPTY
        for other in range(gpus):
            if gain_G[other] >= 0 and not tried_G[other] and (g == EMPTY or gain_G[other] > gain_G[g]):
                g = other
        if g == EMPTY:
            break
        tried_G[g] = True
        best_s = min(now_s * (1 - LEAST_GAIN), now_s - least_s)
        best_s, p, h, q, priced = best_swap(layer, slots, scratch, g, best_s)
        effort -= priced * len(slots.seconds_W)
        e = EMPTY
        count_s = best_s
        if replicas:
            count_s, to, place, e, priced = best_count_change(layer, slots, scratch, gain_G, g, best_s)
            effort -= priced * len(slots.seconds_W)
        if count_s < best_s:
            overwrite(layer, slots, to, place, e)
        elif p != EMPTY:
            swap(layer, slots, g, p, h, q)
        else:
            h, priced = best_exchange(layer, slots, scratch, g, best_s)
            effort -= priced * len(slots.seconds_W)
            if h == EMPTY:
                continue
            exchange(layer, slots, g, h)
        now_s = price(layer, slots, scratch)
        find_gains(slots, gain_G)
        tried_G[:] = False
    return now_s, effort


@njit(cache=True, nogil=True)
def _shake(layer, slots, replicas, draw_D):
    """Swaps a random slot with a random one of another GPU, or puts its expert there as a further replica, if that is allowed.

    draw_D are four numbers from zero to one.
    """
    gpus, experts = slots.holds_GE.shape
    a = min(int(draw_D[0] * experts), experts - 1)
    g = slots.gpu_EG[a, min(int(draw_D[1] * slots.count_E[a]), slots.count_E[a] - 1)]
    total = 0
    for h in range(gpus):
        total += layer.slots_G[h]
    at = min(int(draw_D[2] * total), total - 1)
    h = 0
    while at >= layer.slots_G[h]:
        at -= layer.slots_G[h]
        h += 1
    b = slots.held_GP[h, at]
    if h == g or slots.holds_GE[h, a] or (b != EMPTY and slots.holds_GE[g, b]):
        return
    if replicas and draw_D[3] < 0.5 and (b == EMPTY or slots.count_E[b] > 1):
        overwrite(layer, slots, h, at, a)
        return
    for p in range(layer.slots_G[g]):
        if slots.held_GP[g, p] == a:
            swap(layer, slots, g, p, h, at)
            return


@njit(cache=True, nogil=True)
def _fill(layer, held_GP, share_GP):
    """Fills empty slots in place; returns the objective."""
    slots, scratch = start_slots(layer, held_GP, share_GP), scratch_memory(layer, held_GP.shape[1])
    gpus, experts = slots.holds_GE.shape
    if layer.slots_G.sum() == slots.count_E.sum():
        return price(layer, slots, scratch)
    extremes = max(EXTREMES, held_GP.shape[1])  # more than a GPU with an empty slot holds
    busy_E, gain_G = np.zeros(experts), np.empty(gpus)
    for e in range(experts):
        for g in range(gpus):
            busy_E[e] += layer.part_s_GEXW[g, e, 1].sum() + layer.part_s_GEXW[g, e, 2].sum()
    while True:
        now_s = price(layer, slots, scratch)
        best_s, lowers, to, come = np.inf, False, EMPTY, EMPTY
        find_gains(slots, gain_G)
        below_s = now_s * (1 - LEAST_GAIN)
        for rank, e in enumerate(np.argsort(-busy_E / slots.count_E, kind="mergesort")):
            helps = _is_critical(slots, gain_G, e) and count_changed(layer, slots, scratch, EMPTY, EMPTY, e, np.inf) < below_s
            tried = helps or min(rank, experts - 1 - rank) < extremes
            if not tried or (not helps and (lowers or best_s <= now_s * (1 + LEAST_GAIN))):
                continue
            for h in range(gpus):
                if slots.holds_GE[h, e] or _free_slot(layer, slots, h) == EMPTY:
                    continue
                value_s = count_changed(layer, slots, scratch, h, EMPTY, e, best_s)
                if value_s < best_s:
                    best_s, to, come = value_s, h, e
                    lowers = value_s < now_s * (1 - LEAST_GAIN)
        if to == EMPTY:
            return now_s
        overwrite(layer, slots, to, _free_slot(layer, slots, to), come)


@njit(cache=True, nogil=True)
def _free_slot(layer, slots, h):
    """The first empty slot of GPU h; EMPTY if it has none."""
    for q in range(layer.slots_G[h]):
        if slots.held_GP[h, q] == EMPTY:
            return q
    return EMPTY


@njit(cache=True, nogil=True)
def _is_critical(slots, gain_G, e):
    """Returns whether a critical GPU holds expert e."""
    for at in range(slots.count_E[e]):  # noqa: SIM110 (numba compiles no generators)
        if gain_G[slots.gpu_EG[e, at]] >= 0:
            return True
    return False
