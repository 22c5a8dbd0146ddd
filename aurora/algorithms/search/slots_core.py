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
        self.part_s_GEXW, self.base_s_GXW, self.fixed_s_Z = sums.part_s_GEXW, sums.base_s_GXW, sums.fixed_s_Z
        self.slots_G, self.worst, self.alike = sums.slots_G, sums.worst, sums.alike or sums.part_s_GEXW.shape[1]
        self.gpus, self.experts, self.sums, self.cases = sums.part_s_GEXW.shape
        self.count_ZYW = sums.paths_ZYW


@final
@cclass
class Slots:
    """The expert in each slot, the seconds that follow from it, and working memory for the prices of changes.

    Attributes:
        held_GP: (G, P) the expert in each slot, EMPTY for none.
        count_E, share_E: (E,) the number of replicas of each expert, and the share of its tokens that each of them takes.
        gpu_EG: (E, G) gpu_EG[e, : count_E[e]] are the GPUs that hold expert e.
        holds_GE: (G, E) whether a GPU holds an expert.
        sum_s_GXW: (G, X, W) seconds of each sum of each GPU in each case.
        top_YWR, top_s_YWR: (2, W, TOP) the slowest GPUs of each phase of each case, slowest first, and their seconds.
        path_s_Z, ranked_Z: (Z,) seconds of each path; the same, longest first.
        weight_YW, fixed_s: (2, W) how often each term is in the paths that count, divided by their number; and so their seconds
            besides terms. With these weights, terms add up to the objective, or to less if a change makes other paths count.
        gain_G: (G,) see `find_gains`. tried_G: (G,) the GPUs whose changes a descent has tried.
        row_GXW, gpu_G, row_G: sums of the GPUs that a change alters, a row each; the GPU of each row, the row of each GPU.
        ours_PXW, theirs_QXW: (P, X, W) sums of one GPU, and of another, without the expert in each slot.
        rest_YW, most_YW: (2, W) seconds of each phase on the slowest GPU that a change leaves alone; and with altered ones.
    """

    def __init__(self, layer: Layer, held_GP: Ints2):
        gpus, experts, cases, width = layer.gpus, layer.experts, layer.cases, held_GP.shape[1]
        self.held_GP, self.share_E = np.empty((gpus, width), np.int64), np.zeros(experts)
        self.count_E, self.gpu_EG = np.zeros(experts, np.int64), np.zeros((experts, gpus), np.int64)
        self.holds_GE, self.sum_s_GXW = np.zeros((gpus, experts), np.uint8), np.zeros((gpus, layer.sums, cases))
        self.top_YWR, self.top_s_YWR = np.zeros((2, cases, TOP), np.int64), np.zeros((2, cases, TOP))
        self.path_s_Z, self.ranked_Z = np.zeros(len(layer.fixed_s_Z)), np.zeros(len(layer.fixed_s_Z))
        self.weight_YW, self.fixed_s = np.zeros((2, cases)), 0.0
        self.row_GXW, self.gpu_G, self.row_G = (
            np.zeros((gpus, layer.sums, cases)),
            np.zeros(gpus, np.int64),
            np.full(gpus, EMPTY),
        )
        self.ours_PXW, self.theirs_QXW = np.zeros((width, layer.sums, cases)), np.zeros((width, layer.sums, cases))
        self.rest_YW, self.most_YW = np.zeros((2, cases)), np.zeros((2, cases))
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
    """Sets all slots; if an expert is in two slots of a GPU, as in EPLB, only the first counts."""
    slots.held_GP[:, :] = EMPTY
    slots.count_E[:] = 0
    slots.holds_GE[:, :] = 0
    slots.sum_s_GXW[:, :, :] = layer.base_s_GXW
    for g in range(held_GP.shape[0]):
        for p in range(held_GP.shape[1]):
            e = held_GP[g, p]
            if e != EMPTY and not slots.holds_GE[g, e]:
                _put(slots, g, p, e)
    for e in range(layer.experts):
        _add_all(layer, slots, e, 1.0)


@cfunc
@nogil
@exceptval(check=False)
def _put(slots: Slots, g: Index, p: Index, e: Index) -> cython.void:
    """Puts expert e into the empty slot p of GPU g; adds no seconds."""
    slots.held_GP[g, p] = e
    slots.gpu_EG[e, slots.count_E[e]] = g
    slots.count_E[e] += 1
    slots.holds_GE[g, e] = 1


@cfunc
@nogil
@exceptval(check=False)
def _take(slots: Slots, g: Index, p: Index) -> Index:
    """Empties slot p of GPU g, and returns its expert; takes no seconds away."""
    e: Index = slots.held_GP[g, p]
    slots.held_GP[g, p] = EMPTY
    slots.count_E[e] -= 1
    last: Index = slots.count_E[e]
    for at in range(last):
        if slots.gpu_EG[e, at] == g:
            slots.gpu_EG[e, at] = slots.gpu_EG[e, last]
    slots.holds_GE[g, e] = 0
    return e


@cfunc
@nogil
@exceptval(check=False)
@cython.locals(g=Index)
def _add_all(layer: Layer, slots: Slots, e: Index, sign: Float) -> cython.void:
    """Adds the seconds of all replicas of expert e, in even shares, or takes them away if the sign is -1."""
    if slots.count_E[e] > 0:
        slots.share_E[e] = 1.0 / slots.count_E[e]
    for at in range(slots.count_E[e]):
        g = slots.gpu_EG[e, at]
        add_share(layer, slots.sum_s_GXW, g, g, e, sign * slots.share_E[e])


@cfunc
@nogil
@exceptval(check=False)
@cython.locals(a=Index, b=Index)
def swap(layer: Layer, slots: Slots, g: Index, p: Index, h: Index, q: Index) -> cython.void:
    """Swaps the experts in slot p of GPU g and slot q of GPU h; slot q may be empty."""
    a, b = _take(slots, g, p), slots.held_GP[h, q]
    if b != EMPTY:
        _take(slots, h, q)
        _put(slots, g, p, b)
        add_share(layer, slots.sum_s_GXW, h, h, b, -slots.share_E[b])
        add_share(layer, slots.sum_s_GXW, g, g, b, slots.share_E[b])
    _put(slots, h, q, a)
    add_share(layer, slots.sum_s_GXW, g, g, a, -slots.share_E[a])
    add_share(layer, slots.sum_s_GXW, h, h, a, slots.share_E[a])


@cfunc
@nogil
@exceptval(check=False)
@cython.locals(x=Index)
def overwrite(layer: Layer, slots: Slots, h: Index, q: Index, e: Index) -> cython.void:
    """Replaces the expert in slot q of GPU h by a further replica of expert e; e EMPTY: empties the slot."""
    x = slots.held_GP[h, q]
    if x != EMPTY:
        _add_all(layer, slots, x, -1.0)
        _take(slots, h, q)
        _add_all(layer, slots, x, 1.0)
    if e != EMPTY:
        _add_all(layer, slots, e, -1.0)
        _put(slots, h, q, e)
        _add_all(layer, slots, e, 1.0)


@cfunc
@nogil
@exceptval(check=False)
def slot_of(layer: Layer, slots: Slots, g: Index, e: Index) -> Index:
    """The slot of GPU g that holds expert e, or the first empty one if e is EMPTY; EMPTY if there is none."""
    for p in range(layer.slots_G[g]):
        if slots.held_GP[g, p] == e:
            return p
    return EMPTY


@cfunc
@nogil
@exceptval(check=False)
@cython.locals(least_s=Float, weight=Float, places=Index, number=Float)
def price(layer: Layer, slots: Slots) -> Float:
    """Updates the slowest GPUs and the paths that count in `slots`, and returns the objective in seconds."""
    _find_slowest(slots)
    for y in range(2):
        for w in range(layer.cases):
            slots.most_YW[y, w] = slots.top_s_YWR[y, w, 0]
            slots.weight_YW[y, w] = 0.0
    value_s: Float = _mean_of_longest(layer, slots)
    least_s, places, number = slots.ranked_Z[layer.worst - 1], layer.worst, layer.worst
    for z in range(layer.worst):
        places -= slots.ranked_Z[z] > least_s  # what is left for paths as long as the shortest that counts
    slots.fixed_s = 0.0
    for z in range(slots.path_s_Z.shape[0]):
        if slots.path_s_Z[z] < least_s or (slots.path_s_Z[z] == least_s and places == 0):
            continue
        places -= slots.path_s_Z[z] == least_s
        slots.fixed_s += layer.fixed_s_Z[z] / number
        for y in range(2):
            for w in range(layer.cases):
                slots.weight_YW[y, w] += layer.count_ZYW[z, y, w] / number
    return value_s


@cfunc
@nogil
@exceptval(check=False)
@cython.locals(g=Index, over_s=Float)
def find_gains(slots: Slots) -> cython.void:
    """Fills gain_G: seconds by which the objective falls if a critical GPU takes no time; -1 for GPUs not critical."""
    slots.gain_G[:] = -1.0
    for y in range(2):
        for w in range(slots.weight_YW.shape[1]):
            if slots.weight_YW[y, w] > 0:
                g, over_s = slots.top_YWR[y, w, 0], slots.top_s_YWR[y, w, 0]
                if slots.top_YWR[y, w, 1] != EMPTY:
                    over_s -= slots.top_s_YWR[y, w, 1]
                slots.gain_G[g] = larger(slots.gain_G[g], 0.0) + slots.weight_YW[y, w] * over_s


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
def objective(layer: Layer, slots: Slots, best_s: Float) -> Float:
    """The objective if phases take most_YW; stops early with a lower bound if that reaches best_s."""
    value_s: Float = slots.fixed_s
    for y in range(2):
        for w in range(layer.cases):
            value_s += slots.weight_YW[y, w] * slots.most_YW[y, w]
    if value_s >= best_s or layer.worst == slots.path_s_Z.shape[0]:
        return value_s
    return _mean_of_longest(layer, slots)


@cfunc
@nogil
@exceptval(check=False)
@cython.locals(path_s=Float, at=Index)
def _mean_of_longest(layer: Layer, slots: Slots) -> Float:
    """The mean of the `worst` longest paths if phases take most_YW; writes path_s_Z and ranked_Z."""
    for z in range(slots.path_s_Z.shape[0]):
        path_s = layer.fixed_s_Z[z]
        for y in range(2):
            for w in range(layer.cases):
                path_s += layer.count_ZYW[z, y, w] * slots.most_YW[y, w]
        slots.path_s_Z[z] = path_s
        at = z
        while at > 0 and slots.ranked_Z[at - 1] < path_s:
            slots.ranked_Z[at] = slots.ranked_Z[at - 1]
            at -= 1
        slots.ranked_Z[at] = path_s
    total: Float = 0.0
    for z in range(layer.worst):
        total += slots.ranked_Z[z]
    return total / layer.worst
