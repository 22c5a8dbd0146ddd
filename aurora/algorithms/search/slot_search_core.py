"""Drivers of the slot search, compiled by Cython: descent, restarts from random changes, and filling of empty slots.

`slot_search` calls `search` and `fill`, and says what they do.
"""

import cython
import numpy as np
from cython import cast, cfunc, declare, exceptval, nogil

if cython.compiled:
    from cython.cimports.aurora.algorithms.core_arrays import *
    from cython.cimports.aurora.algorithms.search.slot_changes_core import *
    from cython.cimports.aurora.algorithms.search.slots_core import *
    from cython.cimports.aurora.algorithms.sorting_core import descending
else:
    from aurora.algorithms.core_arrays import *
    from aurora.algorithms.search.slot_changes_core import *
    from aurora.algorithms.search.slots_core import *
    from aurora.algorithms.sorting_core import descending

SHAKES = declare(Index, 8)  # random changes of a kick: first one, then two, ..., up to this number, then one again
DROPS = declare(Float, 0.9)  # share of random changes of replicated experts that are no drops
LEAST_GAIN = declare(Float, 1e-9)  # relative: a smaller gain is none
ROUNDING = 1e-12  # share of the largest summand: smaller gains are rounding, also where the objective is zero
EXTREMES = declare(Index, 16)  # busiest and idlest experts that are tried where no replica in an empty slot helps
DESCENT = declare(Int, 10)  # so many times that may the first descent price
INF = declare(Float, float("inf"))


@cython.locals(best_s=Float, value_s=Float)
def search(sums, held_GP: Ints2, draws_KXD: Floats3, replicas: cython.bint, effort: Int, enough_s: Float) -> float:
    """The descent and its restarts, in place; returns the objective. It ends once that is enough_s or less."""
    layer = Layer(sums)
    slots = Slots(layer, held_GP)
    least_s: Float = ROUNDING * max(np.abs(sums.base_s_GXW).max(), np.abs(sums.part_s_GEXW).max())
    with nogil:
        best_s, _ = descend(layer, slots, replicas, DESCENT * effort, least_s, enough_s)
        held_GP[:, :] = slots.held_GP
        for k in range(draws_KXD.shape[0]):
            if effort <= 0 or best_s <= enough_s:
                break
            load_slots(layer, slots, held_GP)
            for x in range(1 + k % SHAKES):
                _shake(layer, slots, replicas, draws_KXD, k, x)
            value_s, effort = descend(layer, slots, replicas, effort, least_s, enough_s)
            if value_s < best_s * (1 - 1e-12):
                best_s = value_s
                held_GP[:, :] = slots.held_GP
    return best_s


@cython.locals(value_s=Float)
def fill(sums, held_GP: Ints2) -> float:
    """Fills empty slots in place; returns the objective."""
    layer = Layer(sums)
    slots = Slots(layer, held_GP)
    busy_E: Floats1 = np.zeros(layer.experts)
    key_E: Floats1 = np.zeros(layer.experts)
    order_E: Ints1 = np.zeros(layer.experts, np.int64)
    spare_E: Ints1 = np.zeros(layer.experts, np.int64)
    with nogil:
        value_s = _fill(layer, slots, busy_E, key_E, order_E, spare_E)
        held_GP[:, :] = slots.held_GP
    return value_s


@cfunc
@nogil
@exceptval(check=False)
@cython.locals(g=Index, best_s=Float, now_s=Float)
def descend(
    layer: Layer, slots: Slots, replicas: cython.bint, effort: Int, least_s: Float, enough_s: Float
) -> tuple[Float, Int]:
    """Takes the best change of a critical GPU until none gains least_s, or the objective is enough_s or less.

    Returns (the objective, what is left of the effort).
    """
    found = declare(SwapFound)
    count = declare(CountFound)
    slots.tried_G[:] = 0
    now_s = price(layer, slots)
    find_gains(slots)
    while effort > 0 and now_s > enough_s:
        g = EMPTY
        for other in range(layer.gpus):
            if slots.gain_G[other] >= 0 and not slots.tried_G[other] and (g == EMPTY or slots.gain_G[other] > slots.gain_G[g]):
                g = other
        if g == EMPTY:
            break
        slots.tried_G[g] = 1
        best_s = min(now_s * (1 - LEAST_GAIN), now_s - least_s)
        found = best_swap(layer, slots, g, best_s)
        best_s = found.value_s
        effort -= found.priced * layer.cases
        count.value_s = best_s
        if replicas:
            count = best_count_change(layer, slots, g, best_s)
            effort -= count.priced * layer.cases
        if count.value_s < best_s:
            overwrite(layer, slots, count.to, count.place, count.come)
        elif found.p != EMPTY:
            swap(layer, slots, g, found.p, found.h, found.q)
        else:
            continue
        now_s = price(layer, slots)
        find_gains(slots)
        slots.tried_G[:] = 0
    return now_s, effort


@cfunc
@nogil
@exceptval(check=False)
def _shake(layer: Layer, slots: Slots, replicas: cython.bint, draws_KXD: Floats3, k: Index, x: Index) -> cython.void:
    """Swaps a random slot with a random one of another GPU; or, if allowed, replicates its expert there, or drops it."""
    a: Index = min(cast(Index, draws_KXD[k, x, 0] * layer.experts), layer.experts - 1)
    count: Index = slots.count_E[a]
    g: Index = slots.gpu_EG[a, min(cast(Index, draws_KXD[k, x, 1] * count), count - 1)]
    p: Index = slot_of(layer, slots, g, a)
    total: Index = 0
    for i in range(layer.gpus):
        total += layer.slots_G[i]
    at: Index = min(cast(Index, draws_KXD[k, x, 2] * total), total - 1)
    h: Index = 0
    while at >= layer.slots_G[h]:
        at -= layer.slots_G[h]
        h += 1
    if layer.alike < layer.experts:
        at = p
    b: Index = slots.held_GP[h, at]
    if replicas and draws_KXD[k, x, 3] > DROPS and count > 1:
        overwrite(layer, slots, g, p, EMPTY)
        return
    if h == g or slots.holds_GE[h, a] or (b != EMPTY and slots.holds_GE[g, b]):
        return
    if replicas and draws_KXD[k, x, 3] < 0.5 and (b == EMPTY or slots.count_E[b] > 1):
        overwrite(layer, slots, h, at, a)
    else:
        swap(layer, slots, g, p, h, at)


@cfunc
@nogil
@exceptval(check=False)
@cython.locals(
    e=Index, to=Index, come=Index, helps=cython.bint, lowers=cython.bint, first_s=Float, second_s=Float, now_s=Float,
    best_s=Float, below_s=Float, value_s=Float
)  # fmt: skip
def _fill(layer: Layer, slots: Slots, busy_E: Floats1, key_E: Floats1, order_E: Ints1, spare_E: Ints1) -> Float:
    """Fills empty slots; returns the objective."""
    place = declare(SwapFound)
    unfilled: Index = 0
    for g in range(layer.gpus):
        unfilled += layer.slots_G[g]
    for i in range(layer.experts):
        unfilled -= slots.count_E[i]
    if unfilled == 0:
        return price(layer, slots)
    extremes: Index = max(EXTREMES, slots.held_GP.shape[1])  # more than a GPU with an empty slot holds
    for i in range(layer.experts):
        for g in range(layer.gpus):
            first_s, second_s = 0.0, 0.0
            for w in range(layer.cases):
                first_s += layer.part_s_GEXW[g, i, 1, w]
                second_s += layer.part_s_GEXW[g, i, 2, w]
            busy_E[i] += first_s + second_s
    while True:
        now_s = price(layer, slots)
        best_s, lowers, to, come = INF, False, EMPTY, EMPTY
        find_gains(slots)
        below_s = now_s * (1 - LEAST_GAIN)
        for i in range(layer.experts):
            key_E[i], order_E[i] = busy_E[i] / slots.count_E[i], i
        descending(key_E, order_E, spare_E, layer.experts)
        for rank in range(layer.experts):
            e = order_E[rank]
            helps = _is_critical(slots, e) and count_changed(layer, slots, EMPTY, EMPTY, e, INF) < below_s
            if not helps and (min(rank, layer.experts - 1 - rank) >= extremes or lowers or best_s <= now_s * (1 + LEAST_GAIN)):
                continue
            for h in range(layer.gpus):  # a replica may shorten what its GPU sends, which matters where that is critical
                if slots.gain_G[h] >= 0 and not slots.holds_GE[h, e] and slot_of(layer, slots, h, EMPTY) != EMPTY:
                    value_s = count_changed(layer, slots, h, EMPTY, e, best_s)
                    if value_s < best_s:
                        best_s, to, come = value_s, h, e
            count_changed(layer, slots, EMPTY, EMPTY, e, best_s)
            place = best_place(layer, slots, e, best_s, True)
            if place.h != EMPTY:
                best_s, to, come = place.value_s, place.h, e
            lowers = best_s < below_s
        if to == EMPTY:
            return now_s
        overwrite(layer, slots, to, slot_of(layer, slots, to, EMPTY), come)


@cfunc
@nogil
@exceptval(check=False)
def _is_critical(slots: Slots, e: Index) -> cython.bint:
    """Returns whether a critical GPU holds expert e."""
    for at in range(slots.count_E[e]):  # noqa: SIM110 (a generator is no code without the GIL)
        if slots.gain_G[slots.gpu_EG[e, at]] >= 0:
            return True
    return False
