"""Starts of searches for replica placements, compiled: EPLB's replica counts, and packing by longest processing time first."""

import cython
import numpy as np
from cython import cfunc, declare, exceptval, nogil

if cython.compiled:
    from cython.cimports.aurora.algorithms.core_arrays import *
else:
    from aurora.algorithms.core_arrays import *

CLOSE = declare(Float, 1e-12)  # relative: values that differ by less are equal
INF = declare(Float, float("inf"))


def eplb_counts(load_E: ConstFloats1, slots: Index, most: Index):
    """Returns replica counts (E,), up to `most` each, that fill `slots` slots.

    Each expert gets one; each further slot goes to the expert with the largest load per replica.
    """
    count_E = np.ones(load_E.shape[0], np.int64)
    _add_replicas(load_E, slots - load_E.shape[0], most, 1, count_E)
    return count_E


def counts_by_size(load_E: ConstFloats1, size: Float, slots: Index, most: Index):
    """Returns replica counts (E,), up to `most` each, that fill `slots` slots; no replica takes more than `size` of load.

    Replicas a little smaller than a GPU's mean load can share a GPU with small experts. A further slot goes to the expert with
    the largest load / count^2: it helps more where it divides one of medium load than the hottest one once more.

    Returns:
        The counts; None if the slots are too few.
    """
    count_E = np.ceil(np.asarray(load_E) * ((1 - CLOSE) / size)).clip(1, most).astype(np.int64)
    spare: Index = slots - count_E.sum()
    if spare < 0:
        return None
    _add_replicas(load_E, spare, most, 2, count_E)
    return count_E


@cfunc
@nogil
@exceptval(check=False)
@cython.locals(chosen=Index, best=Float, value=Float)
def _add_replicas(load_E: ConstFloats1, more: Index, most: Index, power: Index, count_E: Ints1) -> cython.void:
    """Gives each of `more` replicas to the expert with the largest load / count^power, of those with less than `most`."""
    for _ in range(more):
        chosen, best = EMPTY, -1.0
        for e in range(load_E.shape[0]):
            value = load_E[e] / count_E[e] if power == 1 else load_E[e] / (count_E[e] * count_E[e])
            if count_E[e] < most and value > best * (1.0 + CLOSE):
                chosen, best = e, value
        if chosen == EMPTY:
            return
        count_E[chosen] += 1


def packed(load_E: ConstFloats1, count_E: ConstInts1, slots_G: ConstInts1, cost_G: ConstFloats1):
    """Packs replicas, largest first, each onto the GPU with an empty slot that ends first with it (LPT).

    A replica is left out if only GPUs that hold its expert have empty slots.

    Args:
        load_E: (E,) float64, the load of each expert.
        count_E: (E,) int64, the replicas of each expert.
        slots_G: (G,) int64, the slots of each GPU.
        cost_G: (G,) float64, the cost of a unit of load on each GPU.

    Returns:
        (G, P) int64, the expert in each slot, -1 for none; no expert is twice on a GPU.
    """
    gpus = len(slots_G)
    held_GP: Ints2 = np.full((gpus, np.asarray(slots_G).max()), EMPTY)
    size_E: Floats1 = np.asarray(load_E) / np.asarray(count_E)
    order_E: Ints1 = np.argsort(-np.asarray(size_E), kind="stable")
    time_G: Floats1 = np.zeros(gpus)
    used_G: Ints1 = np.zeros(gpus, np.int64)
    with nogil:
        _pack(size_E, order_E, count_E, slots_G, cost_G, held_GP, time_G, used_G)
    return np.asarray(held_GP)


@cfunc
@nogil
@exceptval(check=False)
@cython.locals(e=Index, chosen=Index, best=Float, ends=Float)
def _pack(
    size_E: Floats1, order_E: Ints1, count_E: ConstInts1, slots_G: ConstInts1, cost_G: ConstFloats1, held_GP: Ints2,
    time_G: Floats1, used_G: Ints1
) -> cython.void:  # fmt: skip
    for at in range(size_E.shape[0]):
        e = order_E[at]
        for _ in range(count_E[e]):
            chosen, best = EMPTY, INF
            for g in range(slots_G.shape[0]):
                ends = time_G[g] + size_E[e] * cost_G[g]
                if used_G[g] < slots_G[g] and ends < best * (1.0 - CLOSE) and not _holds(held_GP, g, e):
                    chosen, best = g, ends
            if chosen == EMPTY:
                break
            held_GP[chosen, used_G[chosen]] = e
            used_G[chosen] += 1
            time_G[chosen] += size_E[e] * cost_G[chosen]


@cfunc
@nogil
@exceptval(check=False)
def _holds(held_GP: Ints2, g: Index, e: Index) -> cython.bint:
    """Returns whether a GPU holds an expert."""
    for p in range(held_GP.shape[1]):  # noqa: SIM110 (a generator is no code without the GIL)
        if held_GP[g, p] == e:
            return True
    return False
