"""State of a slot search in one layer, compiled by Cython: experts in slots, the seconds that they add to GPUs, the objective.

Example: 2 GPUs of 3 slots, 4 experts, one case, one sum. Expert 0 adds 8 s, the others 2 s each.

    held_GP   [[0, 1, -1], [2, 3, -1]]   count_E [1, 1, 1, 1]   sum_s_GXW 10 and 4: the objective is 10
    overwrite(GPU 1, slot 2, expert 0)   count_E [2, 1, 1, 1]   sum_s_GXW 4 + 2 = 6 and 4 + 4 = 8: it is 8
    swap(GPU 0 slot 2, GPU 1 slot 1)     experts 0, 1, 3 and 2, 0:           8 and 6

1. `load_slots` sets the slots; `price` finds the slowest GPUs of each phase and case, and the objective.
2. A search asks slot_changes_core for the objective after each change: only rows of GPUs that it alters are added up.
3. `swap` and `overwrite` make the change.

Objective: see `phase_sums`. A search with one sum a GPU in place of four, such as `rebalance_core`, uses slots and moves alone.
"""

import cython
import numpy as np
from cython import cclass, cfunc, declare, exceptval, final, nogil

if cython.compiled:
    from cython.cimports.aurora.algorithms.core_arrays import *
else:
    from aurora.algorithms.core_arrays import *

TOP = declare(Index, 4)  # slowest GPUs that are kept, so that the slowest one that a change leaves alone is mostly among them
INF = declare(Float, float("inf"))


@final
@cclass
class Layer:
    """The costs of one layer; see PhaseSums. `sums` is how many sums a GPU has."""

    def __init__(self, sums):
        self.part_s_GEXW, self.base_s_GXW = sums.part_s_GEXW, sums.base_s_GXW
        self.aggregate_s_W, self.slots_G, self.worst = sums.aggregate_s_W, sums.slots_G, sums.worst
        self.gpus, self.experts, self.sums, self.cases = sums.part_s_GEXW.shape


@final
@cclass
class Slots:
    """The expert in each slot, the seconds that follow from it, and working memory for the prices of changes.

    Attributes:
        held_GP, share_GP: (G, P) the expert in each slot, EMPTY for none, and the share of its tokens that the slot takes.
        count_E: (E,) the number of replicas of each expert.
        gpu_EG: (E, G) gpu_EG[e, : count_E[e]] are the GPUs that hold expert e.
        holds_GE: (G, E) whether a GPU holds an expert.
        sum_s_GXW: (G, X, W) seconds of each sum of each GPU in each case.
        top_YWR, top_s_YWR: (2, W, TOP) the slowest GPUs of each phase of each case, slowest first, and their seconds.
        seconds_W, weight_W: (W,) seconds of each case; 1 / worst for the cases that count, 0 for the others.
        gain_G: (G,) see `find_gains`. tried_G: (G,) the GPUs whose changes a descent has tried.
        row_GXW, gpu_G, row_G: sums of the GPUs that a change alters, a row each; the GPU of each row, the row of each GPU.
        ours_PXW, theirs_QXW: (P, X, W) sums of one GPU, and of another, without the expert in each slot.
        rest_YW, most_YW: (2, W) seconds of each phase on the slowest GPU that a change leaves alone; and with altered ones.
        after_s_W, ranked_W: (W,) seconds of each case after a change; the same, longest first.
    """

    def __init__(self, layer: Layer, held_GP: Ints2):
        gpus, experts, cases, width = layer.gpus, layer.experts, layer.cases, held_GP.shape[1]
        self.held_GP, self.share_GP = np.empty((gpus, width), np.int64), np.zeros((gpus, width))
        self.count_E, self.gpu_EG = np.zeros(experts, np.int64), np.zeros((experts, gpus), np.int64)
        self.holds_GE, self.sum_s_GXW = np.zeros((gpus, experts), np.uint8), np.zeros((gpus, layer.sums, cases))
        self.top_YWR, self.top_s_YWR = np.zeros((2, cases, TOP), np.int64), np.zeros((2, cases, TOP))
        self.seconds_W, self.weight_W = np.zeros(cases), np.zeros(cases)
        self.row_GXW, self.gpu_G, self.row_G = (
            np.zeros((gpus, layer.sums, cases)),
            np.zeros(gpus, np.int64),
            np.full(gpus, EMPTY),
        )
        self.ours_PXW, self.theirs_QXW = np.zeros((width, layer.sums, cases)), np.zeros((width, layer.sums, cases))
        self.rest_YW, self.most_YW = np.zeros((2, cases)), np.zeros((2, cases))
        self.after_s_W, self.ranked_W = np.zeros(cases), np.zeros(cases)
        self.gain_G, self.tried_G = np.zeros(gpus), np.zeros(gpus, np.uint8)
        load_slots(layer, self, held_GP)


@cfunc
@nogil
@exceptval(check=False)
def add_share(layer: Layer, row_GXW: Floats3, at: Index, g: Index, e: Index, share: Float) -> cython.void:
    """Adds `share` of expert e's seconds on GPU g to row_GXW[at]."""
    for x in range(layer.sums):
        for w in range(layer.cases):
            row_GXW[at, x, w] += share * layer.part_s_GEXW[g, e, x, w]


@cfunc
@nogil
@exceptval(check=False)
def copy_with_share(
    layer: Layer, sum_s_GXW: ConstFloats3, row_GXW: Floats3, at: Index, g: Index, e: Index, share: Float
) -> cython.void:
    """Sets row_GXW[at] to the sums of GPU g plus `share` of expert e's seconds there."""
    for x in range(layer.sums):
        for w in range(layer.cases):
            row_GXW[at, x, w] = sum_s_GXW[g, x, w] + share * layer.part_s_GEXW[g, e, x, w]


@cfunc
@nogil
@exceptval(check=False)
@cython.locals(e=Index)
def load_slots(layer: Layer, slots: Slots, held_GP: Ints2) -> cython.void:
    """Sets all slots, with even shares; if an expert is in two slots of a GPU, as in EPLB, only the first counts."""
    slots.held_GP[:, :] = EMPTY
    slots.count_E[:] = 0
    slots.holds_GE[:, :] = 0
    slots.sum_s_GXW[:, :, :] = layer.base_s_GXW
    for g in range(held_GP.shape[0]):
        for p in range(held_GP.shape[1]):
            e = held_GP[g, p]
            if e != EMPTY and not slots.holds_GE[g, e]:
                _give(layer, slots, g, p, e, 0.0)
    for e in range(layer.experts):
        if slots.count_E[e] > 0:
            even_out(layer, slots, e)


@cfunc
@nogil
@exceptval(check=False)
def _give(layer: Layer, slots: Slots, g: Index, p: Index, e: Index, share: Float) -> cython.void:
    """Puts expert e with its share into the empty slot p of GPU g."""
    slots.held_GP[g, p], slots.share_GP[g, p] = e, share
    slots.gpu_EG[e, slots.count_E[e]] = g
    slots.count_E[e] += 1
    slots.holds_GE[g, e] = 1
    add_share(layer, slots.sum_s_GXW, g, g, e, share)


@cfunc
@nogil
@exceptval(check=False)
def _take(layer: Layer, slots: Slots, g: Index, p: Index) -> tuple[Index, Float]:
    """Empties slot p of GPU g; returns its expert and share."""
    e: Index = slots.held_GP[g, p]
    share: Float = slots.share_GP[g, p]
    slots.held_GP[g, p], slots.share_GP[g, p] = EMPTY, 0.0
    slots.count_E[e] -= 1
    last: Index = slots.count_E[e]
    for at in range(last):
        if slots.gpu_EG[e, at] == g:
            slots.gpu_EG[e, at] = slots.gpu_EG[e, last]
    slots.holds_GE[g, e] = 0
    add_share(layer, slots.sum_s_GXW, g, g, e, -share)
    return e, share


@cfunc
@nogil
@exceptval(check=False)
def swap(layer: Layer, slots: Slots, g: Index, p: Index, h: Index, q: Index) -> cython.void:
    """Swaps the experts in slot p of GPU g and slot q of GPU h; slot q may be empty."""
    a, share_a = _take(layer, slots, g, p)
    if slots.held_GP[h, q] != EMPTY:
        b, share_b = _take(layer, slots, h, q)
        _give(layer, slots, g, p, b, share_b)
    _give(layer, slots, h, q, a, share_a)


@cfunc
@nogil
@exceptval(check=False)
def overwrite(layer: Layer, slots: Slots, h: Index, q: Index, e: Index) -> cython.void:
    """Replaces the expert in slot q of GPU h by a further replica of expert e; e EMPTY: empties the slot."""
    if slots.held_GP[h, q] != EMPTY:
        x, _ = _take(layer, slots, h, q)
        even_out(layer, slots, x)
    if e != EMPTY:
        _give(layer, slots, h, q, e, 0.0)
        even_out(layer, slots, e)


@cfunc
@nogil
@exceptval(check=False)
@cython.locals(g=Index)
def even_out(layer: Layer, slots: Slots, e: Index) -> cython.void:
    """Divides the tokens of expert e evenly over its replicas."""
    share: Float = 1.0 / slots.count_E[e]
    for at in range(slots.count_E[e]):
        g = slots.gpu_EG[e, at]
        for p in range(slots.held_GP.shape[1]):
            if slots.held_GP[g, p] == e:
                add_share(layer, slots.sum_s_GXW, g, g, e, share - slots.share_GP[g, p])
                slots.share_GP[g, p] = share


@cfunc
@nogil
@exceptval(check=False)
def price(layer: Layer, slots: Slots) -> Float:
    """Updates the slowest GPUs, seconds and weights of the cases in `slots`, and returns the objective in seconds."""
    _find_slowest(slots)
    for w in range(layer.cases):
        slots.seconds_W[w] = slots.top_s_YWR[0, w, 0] + slots.top_s_YWR[1, w, 0] + layer.aggregate_s_W[w]
    value_s: Float = _tail_mean(slots.seconds_W, slots.ranked_W, layer.worst)
    least_s: Float = slots.ranked_W[layer.worst - 1]
    places: Index = layer.worst
    for w in range(layer.cases):
        slots.weight_W[w] = 0.0
        if slots.seconds_W[w] > least_s:
            slots.weight_W[w] = 1.0 / layer.worst
            places -= 1
    for w in range(layer.cases):
        if places > 0 and slots.seconds_W[w] == least_s:
            slots.weight_W[w] = 1.0 / layer.worst
            places -= 1
    return value_s


@cfunc
@nogil
@exceptval(check=False)
@cython.locals(g=Index, over_s=Float)
def find_gains(slots: Slots) -> cython.void:
    """Fills gain_G: seconds by which the objective falls if a critical GPU takes no time; -1 for GPUs not critical."""
    slots.gain_G[:] = -1.0
    for y in range(2):
        for w in range(slots.seconds_W.shape[0]):
            if slots.weight_W[w] > 0:
                g, over_s = slots.top_YWR[y, w, 0], slots.top_s_YWR[y, w, 0]
                if slots.top_YWR[y, w, 1] != EMPTY:
                    over_s -= slots.top_s_YWR[y, w, 1]
                slots.gain_G[g] = larger(slots.gain_G[g], 0.0) + slots.weight_W[w] * over_s


@cfunc
@nogil
@exceptval(check=False)
@cython.locals(value_s=Float, at=Index)
def _find_slowest(slots: Slots) -> cython.void:
    """Fills top_YWR and top_s_YWR from the sums of all GPUs."""
    slots.top_YWR[:, :, :] = EMPTY
    slots.top_s_YWR[:, :, :] = -INF
    for g in range(slots.sum_s_GXW.shape[0]):
        for y in range(2):
            for w in range(slots.sum_s_GXW.shape[2]):
                value_s = larger(slots.sum_s_GXW[g, 2 * y, w], slots.sum_s_GXW[g, 2 * y + 1, w])
                if value_s > slots.top_s_YWR[y, w, TOP - 1]:
                    at = TOP - 1
                    while at > 0 and value_s > slots.top_s_YWR[y, w, at - 1]:
                        slots.top_YWR[y, w, at], slots.top_s_YWR[y, w, at] = (
                            slots.top_YWR[y, w, at - 1],
                            slots.top_s_YWR[y, w, at - 1],
                        )
                        at -= 1
                    slots.top_YWR[y, w, at], slots.top_s_YWR[y, w, at] = g, value_s


@cfunc
@nogil
@exceptval(check=False)
@cython.locals(at=Index)
def find_rest(slots: Slots) -> cython.void:
    """Fills rest_YW with the seconds of each phase on the slowest of the GPUs whose row_G is EMPTY."""
    for y in range(2):
        for w in range(slots.rest_YW.shape[1]):
            at = 0
            while at < TOP and slots.top_YWR[y, w, at] != EMPTY and slots.row_G[slots.top_YWR[y, w, at]] != EMPTY:
                at += 1
            if at < TOP:
                slots.rest_YW[y, w] = slots.top_s_YWR[y, w, at]
                continue
            slots.rest_YW[y, w] = -INF
            for g in range(slots.row_G.shape[0]):
                if slots.row_G[g] == EMPTY:
                    slots.rest_YW[y, w] = larger(
                        slots.rest_YW[y, w], larger(slots.sum_s_GXW[g, 2 * y, w], slots.sum_s_GXW[g, 2 * y + 1, w])
                    )


@cfunc
@nogil
@exceptval(check=False)
@cython.locals(at=Index)
def find_rest_of_two(slots: Slots, g: Index, h: Index) -> cython.void:
    """Fills rest_YW with the seconds of each phase on the slowest GPU other than g and h."""
    for y in range(2):
        for w in range(slots.rest_YW.shape[1]):
            at = 0
            while slots.top_YWR[y, w, at] == g or slots.top_YWR[y, w, at] == h:
                at += 1
            slots.rest_YW[y, w] = slots.top_s_YWR[y, w, at]


@cfunc
@nogil
@exceptval(check=False)
def objective(layer: Layer, slots: Slots, best_s: Float) -> Float:
    """The objective of cases that take after_s_W; stops early with a lower bound if that reaches best_s."""
    value_s: Float = 0.0
    for w in range(layer.cases):
        value_s += slots.weight_W[w] * slots.after_s_W[w]
    if value_s >= best_s or layer.worst == layer.cases:
        return value_s
    return _tail_mean(slots.after_s_W, slots.ranked_W, layer.worst)


@cfunc
@nogil
@exceptval(check=False)
@cython.locals(value=Float, at=Index)
def _tail_mean(seconds_W: Floats1, ranked_W: Floats1, worst: Index) -> Float:
    """The mean of the `worst` largest of seconds_W; writes all of them into ranked_W, largest first."""
    for w in range(seconds_W.shape[0]):
        value = seconds_W[w]
        at = w
        while at > 0 and ranked_W[at - 1] < value:
            ranked_W[at] = ranked_W[at - 1]
            at -= 1
        ranked_W[at] = value
    total: Float = 0.0
    for w in range(worst):
        total += ranked_W[w]
    return total / worst
