"""What a change of slots makes of the objective, compiled: a swap, a move, an exchange, or another number of replicas."""

from typing import NamedTuple

import numpy as np
from numba import njit

from aurora.planner.placement.phase_sums import add_share, copy_with_share
from aurora.planner.placement.slot_state import FIRST, TOP
from aurora.types.arrays import FloatArray, IntArray
from aurora.types.placement import EMPTY_INT64 as EMPTY

ENOUGH_GPUS = 8  # a change that helps is taken when it is the best of this many GPUs' slots


class Scratch(NamedTuple):
    """Memory for pricing changes.

    Attributes:
        row_GXW: (G, 4, W) seconds of each sum of the GPUs that a change alters, in its first places.
        gpu_G: (G,) int64, these GPUs.
        row_G: (G,) int64, the place of each GPU in row_GXW, EMPTY for those that stay as they are.
        ours_PXW: (P, 4, W) sums of a GPU without the expert of each of its slots.
        theirs_QXW: (P, 4, W) the same of another GPU.
        rest_YW: (2, W) seconds of each phase on the slowest GPU that a change leaves alone.
        most_YW: (2, W) the same with some of the GPUs that it alters.
        seconds_W: (W,) seconds of each scenario after a change.
        ranked_W: (W,) these, largest first.
    """

    row_GXW: FloatArray
    gpu_G: IntArray
    row_G: IntArray
    ours_PXW: FloatArray
    theirs_QXW: FloatArray
    rest_YW: FloatArray
    most_YW: FloatArray
    seconds_W: FloatArray
    ranked_W: FloatArray


@njit(cache=True, nogil=True)
def scratch_memory(layer, width):
    """Returns Scratch for `width` slots per GPU."""
    gpus, _, parts, scenarios = layer.part_s_GEXW.shape
    return Scratch(
        np.zeros((gpus, parts, scenarios)),
        np.zeros(gpus, dtype=np.int64),
        np.full(gpus, EMPTY),
        np.zeros((width, parts, scenarios)),
        np.zeros((width, parts, scenarios)),
        np.zeros((2, scenarios)),
        np.zeros((2, scenarios)),
        np.zeros(scenarios),
        np.zeros(scenarios),
    )


@njit(cache=True, nogil=True)
def price(layer, slots, scratch):
    """Finds the slowest GPUs and the scenarios that count; returns the objective."""
    top_s_YWR, seconds_W, weight_W, ranked_W = slots.top_s_YWR, slots.seconds_W, slots.weight_W, scratch.ranked_W
    _find_slowest(slots.sum_s_GXW, slots.top_YWR, top_s_YWR)
    for w in range(len(seconds_W)):
        seconds_W[w] = top_s_YWR[0, w, 0] + top_s_YWR[1, w, 0] + layer.aggregate_s_W[w]
    value_s = _tail_mean(seconds_W, ranked_W, layer.worst)
    least_s, left = ranked_W[layer.worst - 1], layer.worst
    for w in range(len(seconds_W)):
        weight_W[w] = 1.0 / layer.worst if seconds_W[w] > least_s else 0.0
        left -= seconds_W[w] > least_s
    for w in range(len(seconds_W)):
        if left > 0 and seconds_W[w] == least_s:
            weight_W[w] = 1.0 / layer.worst
            left -= 1
    return value_s


@njit(cache=True, nogil=True)
def find_gains(slots, gain_G):
    """Fills gain_G: how far the objective falls if a critical GPU is no longer slowest; -1 for the other GPUs."""
    gain_G[:] = -1.0
    for y in range(2):
        for w in range(len(slots.seconds_W)):
            if slots.weight_W[w] > 0:
                g, over_s = slots.top_YWR[y, w, 0], slots.top_s_YWR[y, w, 0]
                if slots.top_YWR[y, w, 1] != EMPTY:
                    over_s -= slots.top_s_YWR[y, w, 1]
                gain_G[g] = max(gain_G[g], 0.0) + slots.weight_W[w] * over_s


@njit(cache=True, nogil=True)
def best_swap(layer, slots, scratch, g, best_s):
    """Returns the best swap or move of a slot of GPU g: (objective, slot, other GPU, its slot, changes priced).

    The slots and the other GPU are EMPTY if none brings the objective below best_s.
    """
    held_GP, share_GP, holds_GE, weight_W = slots.held_GP, slots.share_GP, slots.holds_GE, slots.weight_W
    part_s_GEXW, aggregate_s_W, sum_s_GXW = layer.part_s_GEXW, layer.aggregate_s_W, slots.sum_s_GXW
    ours_PXW, theirs_QXW, rest_YW = scratch.ours_PXW, scratch.theirs_QXW, scratch.rest_YW
    seconds_W, ranked_W, top_YWR, top_s_YWR = scratch.seconds_W, scratch.ranked_W, slots.top_YWR, slots.top_s_YWR
    scenarios = len(weight_W)
    found_p, found_h, found_q, priced = EMPTY, EMPTY, EMPTY, 0
    for p in range(layer.slots_G[g]):
        if held_GP[g, p] != EMPTY:
            copy_with_share(part_s_GEXW, sum_s_GXW, ours_PXW, p, g, held_GP[g, p], -share_GP[g, p])
    for step in range(1, len(layer.slots_G)):
        h = (g + step) % len(layer.slots_G)
        if step > ENOUGH_GPUS and found_p != EMPTY:
            break
        _find_rest_of_two(top_YWR, top_s_YWR, g, h, rest_YW)
        least_s = 0.0
        for w in range(scenarios):
            least_s += weight_W[w] * (rest_YW[0, w] + rest_YW[1, w] + aggregate_s_W[w])
        if least_s >= best_s:
            continue
        moved = False
        for q in range(layer.slots_G[h]):
            b, share_b = held_GP[h, q], share_GP[h, q]
            if b == EMPTY:
                if moved:
                    continue
                moved = True
                b, share_b = 0, 0.0  # nothing of some expert comes back
            elif holds_GE[g, b]:
                continue
            copy_with_share(part_s_GEXW, sum_s_GXW, theirs_QXW, q, h, b, -share_b)
            for p in range(layer.slots_G[g]):
                a, share_a = held_GP[g, p], share_GP[g, p]
                if a == EMPTY or holds_GE[h, a]:
                    continue
                priced += 1
                for w in range(scenarios):
                    first_s = _larger(
                        _larger(
                            ours_PXW[p, 0, w] + share_b * part_s_GEXW[g, b, 0, w],
                            ours_PXW[p, 1, w] + share_b * part_s_GEXW[g, b, 1, w],
                        ),
                        _larger(
                            theirs_QXW[q, 0, w] + share_a * part_s_GEXW[h, a, 0, w],
                            theirs_QXW[q, 1, w] + share_a * part_s_GEXW[h, a, 1, w],
                        ),
                    )
                    second_s = _larger(
                        _larger(
                            ours_PXW[p, 2, w] + share_b * part_s_GEXW[g, b, 2, w],
                            ours_PXW[p, 3, w] + share_b * part_s_GEXW[g, b, 3, w],
                        ),
                        _larger(
                            theirs_QXW[q, 2, w] + share_a * part_s_GEXW[h, a, 2, w],
                            theirs_QXW[q, 3, w] + share_a * part_s_GEXW[h, a, 3, w],
                        ),
                    )
                    seconds_W[w] = _larger(rest_YW[0, w], first_s) + _larger(rest_YW[1, w], second_s) + aggregate_s_W[w]
                value_s = _value(seconds_W, weight_W, ranked_W, layer.worst, best_s)
                if value_s < best_s:
                    best_s, found_p, found_h, found_q = value_s, p, h, q
    return best_s, found_p, found_h, found_q, priced


@njit(cache=True, nogil=True)
def best_exchange(layer, slots, scratch, g, best_s):
    """Returns the best GPU for GPU g to exchange all experts with: (GPU, changes priced).

    The GPU is EMPTY if none brings the objective below best_s.
    """
    held_GP, slots_G, base_s_GXW, row_GXW = slots.held_GP, layer.slots_G, layer.base_s_GXW, scratch.row_GXW
    rest_YW, seconds_W = scratch.rest_YW, scratch.seconds_W
    found, priced = EMPTY, 0
    for h in range(len(slots_G)):
        if h == g or _held(held_GP, g) > slots_G[h] or _held(held_GP, h) > slots_G[g]:
            continue
        priced += 1
        for at, own, other in ((0, g, h), (1, h, g)):
            copy_with_share(layer.part_s_GEXW, base_s_GXW, row_GXW, at, own, FIRST, 0.0)
            for p in range(slots_G[other]):
                if held_GP[other, p] != EMPTY:
                    add_share(layer.part_s_GEXW, row_GXW, at, own, held_GP[other, p], slots.share_GP[other, p])
        _find_rest_of_two(slots.top_YWR, slots.top_s_YWR, g, h, rest_YW)
        for w in range(len(seconds_W)):
            seconds_W[w] = layer.aggregate_s_W[w]
            for y in range(2):
                ours_s = _larger(row_GXW[0, 2 * y, w], row_GXW[0, 2 * y + 1, w])
                theirs_s = _larger(row_GXW[1, 2 * y, w], row_GXW[1, 2 * y + 1, w])
                seconds_W[w] += _larger(rest_YW[y, w], _larger(ours_s, theirs_s))
        value_s = _value(seconds_W, slots.weight_W, scratch.ranked_W, layer.worst, best_s)
        if value_s < best_s:
            best_s, found = value_s, h
    return found, priced


@njit(cache=True, nogil=True)
def best_count_change(layer, slots, scratch, gain_G, g, best_s):
    """Returns the best change of counts that relieves GPU g: (objective, GPU, slot, expert to put there, changes priced).

    Either one of its experts gets a replica elsewhere, in an empty slot or in place of another replica, or one of its replicas
    gives way to an expert of a critical GPU or to none. Only a relief that lowers the objective below best_s is followed up.
    """
    held_GP, count_E, holds_GE = slots.held_GP, slots.count_E, slots.holds_GE
    to, place, come, priced = EMPTY, EMPTY, EMPTY, 0
    for p in range(layer.slots_G[g]):
        a = held_GP[g, p]
        if a == EMPTY:
            continue
        priced += 2
        if count_E[a] < len(holds_GE) and count_changed(layer, slots, scratch, EMPTY, EMPTY, a, best_s) < best_s:
            best_s, h, q, more = _best_place(layer, slots, scratch, a, best_s)
            priced += more
            if h != EMPTY:
                to, place, come = h, q, a
        if count_E[a] > 1:
            value_s = count_changed(layer, slots, scratch, g, a, EMPTY, best_s)
            if value_s < best_s:
                best_s, to, place, come = value_s, g, p, EMPTY
                for h in range(len(gain_G)):
                    for q in range(layer.slots_G[h]):
                        e = held_GP[h, q]
                        if e == EMPTY or holds_GE[g, e]:
                            continue
                        priced += 1
                        value_s = count_changed(layer, slots, scratch, g, a, e, best_s)
                        if value_s < best_s:
                            best_s, to, place, come = value_s, g, p, e
    return best_s, to, place, come, priced


@njit(cache=True, nogil=True)
def count_changed(layer, slots, scratch, h, x, e, best_s):
    """Returns the objective if a replica of x leaves GPU h and a further one of e comes there.

    At or above best_s it is a lower bound. Each of x, e and h may be EMPTY: without h, the new replica of e takes its share
    away from the others, as if at no cost.
    """
    part_s_GEXW, sum_s_GXW, count_E, gpu_EG = layer.part_s_GEXW, slots.sum_s_GXW, slots.count_E, slots.gpu_EG
    row_GXW, row_G, gpu_G, rest_YW = scratch.row_GXW, scratch.row_G, scratch.gpu_G, scratch.rest_YW
    seconds_W, rows = scratch.seconds_W, FIRST
    if e != EMPTY:
        share = 1.0 / (count_E[e] + 1)
        for at in range(count_E[e]):
            g = gpu_EG[e, at]
            rows = _change_row(part_s_GEXW, sum_s_GXW, row_GXW, row_G, gpu_G, rows, g, e, share - 1.0 / count_E[e])
        if h != EMPTY:
            rows = _change_row(part_s_GEXW, sum_s_GXW, row_GXW, row_G, gpu_G, rows, h, e, share)
    if x != EMPTY:
        share = 1.0 / count_E[x]
        more = 1.0 / (count_E[x] - 1) - share
        for at in range(count_E[x]):
            g = gpu_EG[x, at]
            rows = _change_row(part_s_GEXW, sum_s_GXW, row_GXW, row_G, gpu_G, rows, g, x, -share if g == h else more)
    _find_rest(sum_s_GXW, slots.top_YWR, slots.top_s_YWR, row_G, rest_YW)
    for at in range(rows):
        row_G[gpu_G[at]] = EMPTY
        for y in range(2):
            for w in range(len(seconds_W)):
                rest_YW[y, w] = _larger(rest_YW[y, w], _larger(row_GXW[at, 2 * y, w], row_GXW[at, 2 * y + 1, w]))
    for w in range(len(seconds_W)):
        seconds_W[w] = rest_YW[0, w] + rest_YW[1, w] + layer.aggregate_s_W[w]
    return _value(seconds_W, slots.weight_W, scratch.ranked_W, layer.worst, best_s)


@njit(cache=True, nogil=True)
def _best_place(layer, slots, scratch, a, best_s):
    """The best place of a further replica of expert a: (objective, GPU, slot, changes priced), if below best_s.

    It follows `count_changed` for the relief of a: rest_YW has the slowest GPUs after that, and where the changed GPU is one
    of them, its seconds count as if it kept all that it holds.
    """
    held_GP, count_E, gpu_EG, sum_s_GXW = slots.held_GP, slots.count_E, slots.gpu_EG, slots.sum_s_GXW
    part_s_GEXW, theirs_QXW, row_GXW = layer.part_s_GEXW, scratch.theirs_QXW, scratch.row_GXW
    rest_YW, most_YW, seconds_W = scratch.rest_YW, scratch.most_YW, scratch.seconds_W
    share, scenarios = 1.0 / (count_E[a] + 1), len(seconds_W)
    to, place, priced = EMPTY, EMPTY, 0
    for step in range(len(layer.slots_G)):
        h = (gpu_EG[a, 0] + step) % len(layer.slots_G)
        if step > ENOUGH_GPUS and to != EMPTY:
            break
        if slots.holds_GE[h, a]:
            continue
        emptied, copied = False, False
        for q in range(layer.slots_G[h]):
            x, gone = held_GP[h, q], 0.0
            if x == EMPTY:
                if emptied:
                    continue
                emptied = True
                x = a
            elif count_E[x] < 2:
                continue
            else:
                gone = 1.0 / count_E[x]
            if not copied:
                copied = True
                copy_with_share(part_s_GEXW, sum_s_GXW, theirs_QXW, FIRST, h, a, share)
            priced += 1
            for y in range(2):
                for w in range(scenarios):
                    most_YW[y, w] = _larger(
                        rest_YW[y, w],
                        _larger(
                            theirs_QXW[0, 2 * y, w] - gone * part_s_GEXW[h, x, 2 * y, w],
                            theirs_QXW[0, 2 * y + 1, w] - gone * part_s_GEXW[h, x, 2 * y + 1, w],
                        ),
                    )
            if x != a:
                more = 1.0 / (count_E[x] - 1) - gone
                for at in range(count_E[x]):
                    k = gpu_EG[x, at]
                    if k != h:
                        relief = share - 1.0 / count_E[a] if slots.holds_GE[k, a] else 0.0
                        copy_with_share(part_s_GEXW, sum_s_GXW, row_GXW, FIRST, k, a, relief)
                        for y in range(2):
                            for w in range(scenarios):
                                most_YW[y, w] = _larger(
                                    most_YW[y, w],
                                    _larger(
                                        row_GXW[0, 2 * y, w] + more * part_s_GEXW[k, x, 2 * y, w],
                                        row_GXW[0, 2 * y + 1, w] + more * part_s_GEXW[k, x, 2 * y + 1, w],
                                    ),
                                )
            for w in range(scenarios):
                seconds_W[w] = most_YW[0, w] + most_YW[1, w] + layer.aggregate_s_W[w]
            value_s = _value(seconds_W, slots.weight_W, scratch.ranked_W, layer.worst, best_s)
            if value_s < best_s:
                best_s, to, place = value_s, h, q
    return best_s, to, place, priced


@njit(cache=True, nogil=True)
def _find_slowest(sum_s_GXW, top_YWR, top_s_YWR):
    """Fills top_YWR and top_s_YWR from the sums of all GPUs."""
    top_YWR[:] = EMPTY
    top_s_YWR[:] = -np.inf
    for g in range(sum_s_GXW.shape[0]):
        for y in range(2):
            for w in range(sum_s_GXW.shape[2]):
                value_s = _larger(sum_s_GXW[g, 2 * y, w], sum_s_GXW[g, 2 * y + 1, w])
                if value_s > top_s_YWR[y, w, TOP - 1]:
                    at = TOP - 1
                    while at > 0 and value_s > top_s_YWR[y, w, at - 1]:
                        top_YWR[y, w, at], top_s_YWR[y, w, at] = top_YWR[y, w, at - 1], top_s_YWR[y, w, at - 1]
                        at -= 1
                    top_YWR[y, w, at], top_s_YWR[y, w, at] = g, value_s


@njit(cache=True, nogil=True)
def _find_rest(sum_s_GXW, top_YWR, top_s_YWR, row_G, rest_YW):
    """Fills rest_YW (2, W) with the seconds of each phase on the slowest GPU without a row in row_G."""
    for y in range(2):
        for w in range(rest_YW.shape[1]):
            at = 0
            while at < TOP and top_YWR[y, w, at] != EMPTY and row_G[top_YWR[y, w, at]] != EMPTY:
                at += 1
            if at < TOP:
                rest_YW[y, w] = top_s_YWR[y, w, at]
                continue
            rest_YW[y, w] = -np.inf
            for g in range(len(row_G)):
                if row_G[g] == EMPTY:
                    rest_YW[y, w] = max(rest_YW[y, w], _larger(sum_s_GXW[g, 2 * y, w], sum_s_GXW[g, 2 * y + 1, w]))


@njit(cache=True, nogil=True)
def _find_rest_of_two(top_YWR, top_s_YWR, g, h, rest_YW):
    """Fills rest_YW (2, W) with the seconds of each phase on the slowest GPU other than g and h."""
    for y in range(2):
        for w in range(rest_YW.shape[1]):
            at = 0
            while top_YWR[y, w, at] == g or top_YWR[y, w, at] == h:
                at += 1
            rest_YW[y, w] = top_s_YWR[y, w, at]


@njit(cache=True, nogil=True)
def _change_row(part_s_GEXW, sum_s_GXW, row_GXW, row_G, gpu_G, rows, g, e, share):
    """Adds a share of expert e to the row of GPU g, a new one unless it has one; returns the number of rows."""
    if row_G[g] != EMPTY:
        add_share(part_s_GEXW, row_GXW, row_G[g], g, e, share)
        return rows
    row_G[g], gpu_G[rows] = rows, g
    copy_with_share(part_s_GEXW, sum_s_GXW, row_GXW, rows, g, e, share)
    return rows + 1


@njit(cache=True, nogil=True)
def _held(held_GP, g):
    """How many experts GPU g holds."""
    held = 0
    for e in held_GP[g]:
        held += e != EMPTY
    return held


@njit(cache=True, nogil=True)
def _value(seconds_W, weight_W, ranked_W, worst, best_s):
    """The objective of seconds_W, or, where that is enough to be at least best_s, a lower bound on it."""
    value_s = 0.0
    for w in range(len(weight_W)):
        value_s += weight_W[w] * seconds_W[w]
    if value_s >= best_s or worst == len(weight_W):
        return value_s
    return _tail_mean(seconds_W, ranked_W, worst)


@njit(cache=True, nogil=True)
def _tail_mean(seconds_W, ranked_W, worst):
    """The mean of the `worst` largest of seconds_W; writes all of them into ranked_W, largest first."""
    for w in range(len(seconds_W)):
        value = seconds_W[w]
        at = w
        while at > 0 and ranked_W[at - 1] < value:
            ranked_W[at] = ranked_W[at - 1]
            at -= 1
        ranked_W[at] = value
    return ranked_W[:worst].mean()


@njit(cache=True, nogil=True, inline="always")
def _larger(a, b):
    """The larger of two numbers; compiles to one instruction."""
    return a if a > b else b
