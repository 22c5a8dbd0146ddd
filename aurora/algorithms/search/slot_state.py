"""State of a slot search in one layer, compiled: the experts in slots, the seconds that they add to GPUs, and the objective.

The seconds of Aurora's Eq. 1 (arXiv:2410.17043) follow from four sums over the experts that a GPU holds: (0) gate and sending
in the dispatch, (1) gate and receiving in the dispatch, (2) experts and sending in the combine, (3) experts and receiving in
the combine. The first phase (gate + dispatch) is the larger of sums 0 and 1, the second phase (experts + combine) that of 2 and
3. A case takes the largest first phase of a GPU, the largest second phase, and the aggregation. `rebalance` uses one sum
per GPU and one case.

Each search calls its price function by name: numba does not cache functions that take functions as arguments, and calls that
are not inlined pass all arrays of a state, which made rebalancing 25 times as slow.
"""

from typing import Any, NamedTuple

import numpy as np

from aurora.types.arrays import BoolArray, FloatArray, IntArray
from aurora.types.compiled import njit
from aurora.types.placement import EMPTY_INT64 as EMPTY

SUMS = (("gate", "send"), ("gate", "recv"), ("expert", "csend"), ("expert", "crecv"))  # phases of each sum of a GPU
PARTS = len(SUMS)


class PhaseSums(NamedTuple):
    """Seconds of the four sums of each GPU (see this module) in W traffic cases: without experts, and added by each expert.

    Attributes:
        part_s_GEXW: (G, E, 4, W) seconds that each expert adds to each sum of each GPU.
        base_s_GXW: (G, 4, W) seconds of each sum of each GPU without experts.
        aggregate_s_W: (W,) seconds of the aggregation on the slowest GPU.
        slots_G: (G,) int64, how many experts each GPU can hold.
        worst: number of cases that count, longest first.
    """

    part_s_GEXW: FloatArray
    base_s_GXW: FloatArray
    aggregate_s_W: FloatArray
    slots_G: IntArray
    worst: int


@njit(cache=True, nogil=True)
def add_share(part_s_GEXW, row_GXW, at, g, e, share):
    """Adds `share` of expert e's seconds on GPU g to row_GXW[at]."""
    for x in range(row_GXW.shape[1]):
        for w in range(row_GXW.shape[2]):
            row_GXW[at, x, w] += share * part_s_GEXW[g, e, x, w]


@njit(cache=True, nogil=True)
def copy_with_share(part_s_GEXW, sum_s_GXW, row_GXW, at, g, e, share):
    """Sets row_GXW[at] to the sums of GPU g plus `share` of expert e's seconds there."""
    for x in range(PARTS):
        for w in range(row_GXW.shape[2]):
            row_GXW[at, x, w] = sum_s_GXW[g, x, w] + share * part_s_GEXW[g, e, x, w]


FIRST: Any = np.int64(0)  # a place; no constant, for the reason of EMPTY_INT64
TOP = 4  # slowest GPUs that are kept, so that the slowest GPU that a change leaves alone is mostly among them


class Slots(NamedTuple):
    """The expert in each slot, and the seconds of GPUs and cases that follow from it.

    Attributes:
        held_GP: (G, P) int64, the expert in each slot, EMPTY for none.
        share_GP: (G, P) float64, the share of its expert's tokens that each slot takes.
        count_E: (E,) int64, the number of replicas of each expert.
        gpu_EG: (E, G) int64; gpu_EG[e, : count_E[e]] are the GPUs that hold expert e.
        holds_GE: (G, E) bool, whether a GPU holds an expert.
        sum_s_GXW: (G, 4, W) seconds of each sum of each GPU.
        top_YWR: (2, W, TOP) int64, the slowest GPUs of each phase of each case, slowest first; EMPTY where there are fewer.
        top_s_YWR: (2, W, TOP) seconds of the phase on these GPUs.
        seconds_W: (W,) seconds of each case.
        weight_W: (W,) 1 / worst for the cases that count, 0 for the others.
    """

    held_GP: IntArray
    share_GP: FloatArray
    count_E: IntArray
    gpu_EG: IntArray
    holds_GE: BoolArray
    sum_s_GXW: FloatArray
    top_YWR: IntArray
    top_s_YWR: FloatArray
    seconds_W: FloatArray
    weight_W: FloatArray


@njit(cache=True, nogil=True)
def start_slots(layer, held_GP, share_GP):
    """Builds the Slots at the start of a search, with the seconds that follow from them.

    held_GP (G, P) is the expert in each slot, share_GP (G, P) the share of the expert's tokens in the slot.
    """
    gpus, experts, parts, cases = layer.part_s_GEXW.shape
    slots = Slots(
        held_GP,
        share_GP,
        np.zeros(experts, dtype=np.int64),
        np.zeros((experts, gpus), dtype=np.int64),
        np.zeros((gpus, experts), dtype=np.bool_),
        np.zeros((gpus, parts, cases)),
        np.zeros((2, cases, TOP), dtype=np.int64),
        np.zeros((2, cases, TOP)),
        np.zeros(cases),
        np.zeros(cases),
    )
    load_slots(layer, slots, held_GP.copy(), share_GP.copy())
    return slots


@njit(cache=True, nogil=True)
def load_slots(layer, slots, held_GP, share_GP):
    """Sets all slots to held_GP and share_GP; if an expert is in two slots of a GPU, as in EPLB, only the first counts."""
    slots.held_GP[:] = EMPTY
    slots.count_E[:] = 0
    slots.holds_GE[:] = False
    slots.sum_s_GXW[:] = layer.base_s_GXW
    for g in range(held_GP.shape[0]):
        for p in range(held_GP.shape[1]):
            if held_GP[g, p] != EMPTY and not slots.holds_GE[g, held_GP[g, p]]:
                _give(layer, slots, g, p, held_GP[g, p], share_GP[g, p])


@njit(cache=True, nogil=True)
def swap(layer, slots, g, p, h, q):
    """Swaps the experts in slot p of GPU g and slot q of GPU h; slot q may be empty."""
    a, share_a = _take(layer, slots, g, p)
    if slots.held_GP[h, q] != EMPTY:
        b, share_b = _take(layer, slots, h, q)
        _give(layer, slots, g, p, b, share_b)
    _give(layer, slots, h, q, a, share_a)


@njit(cache=True, nogil=True)
def exchange(layer, slots, g, h):
    """Exchanges all experts of GPUs g and h."""
    ours_P, our_share_P = slots.held_GP[g].copy(), slots.share_GP[g].copy()
    theirs_P, their_share_P = slots.held_GP[h].copy(), slots.share_GP[h].copy()
    for p in range(len(ours_P)):
        if ours_P[p] != EMPTY:
            _take(layer, slots, g, p)
        if theirs_P[p] != EMPTY:
            _take(layer, slots, h, p)
    for k, held_P, share_P in ((g, theirs_P, their_share_P), (h, ours_P, our_share_P)):
        p = FIRST
        for at in range(len(held_P)):
            if held_P[at] != EMPTY:
                _give(layer, slots, k, p, held_P[at], share_P[at])
                p += 1


@njit(cache=True, nogil=True)
def overwrite(layer, slots, h, q, e):
    """Replaces the expert in slot q of GPU h by a further replica of expert e; e EMPTY: empties the slot."""
    if slots.held_GP[h, q] != EMPTY:
        x, _ = _take(layer, slots, h, q)
        even_out(layer, slots, x)
    if e != EMPTY:
        _give(layer, slots, h, q, e, 0.0)
        even_out(layer, slots, e)


@njit(cache=True, nogil=True)
def _give(layer, slots, g, p, e, share):
    """Puts expert e with its share into the empty slot p of GPU g."""
    slots.held_GP[g, p], slots.share_GP[g, p] = e, share
    slots.gpu_EG[e, slots.count_E[e]] = g
    slots.count_E[e] += 1
    slots.holds_GE[g, e] = True
    add_share(layer.part_s_GEXW, slots.sum_s_GXW, g, g, e, share)


@njit(cache=True, nogil=True)
def _take(layer, slots, g, p):
    """Empties slot p of GPU g; returns its expert and share."""
    e, share = slots.held_GP[g, p], slots.share_GP[g, p]
    slots.held_GP[g, p], slots.share_GP[g, p] = EMPTY, 0.0
    slots.count_E[e] -= 1
    last = slots.count_E[e]
    for at in range(last):
        if slots.gpu_EG[e, at] == g:
            slots.gpu_EG[e, at] = slots.gpu_EG[e, last]
    slots.holds_GE[g, e] = False
    add_share(layer.part_s_GEXW, slots.sum_s_GXW, g, g, e, -share)
    return e, share


@njit(cache=True, nogil=True)
def even_out(layer, slots, e):
    """Divides the tokens of expert e evenly over its replicas."""
    share = 1.0 / slots.count_E[e]
    for at in range(slots.count_E[e]):
        g = slots.gpu_EG[e, at]
        for p in range(slots.held_GP.shape[1]):
            if slots.held_GP[g, p] == e:
                add_share(layer.part_s_GEXW, slots.sum_s_GXW, g, g, e, share - slots.share_GP[g, p])
                slots.share_GP[g, p] = share


class Scratch(NamedTuple):
    """Working memory for the evaluation of changes.

    Attributes:
        row_GXW: (G, 4, W) seconds of each sum of the GPUs that a change alters, one row per GPU; further rows are unused.
        gpu_G: (G,) int64, the GPU of each row.
        row_G: (G,) int64, the row of each GPU in row_GXW; EMPTY for GPUs that the change does not alter.
        ours_PXW: (P, 4, W) sums of one GPU without the expert in slot p, for each of its slots.
        theirs_QXW: (P, 4, W) the same for another GPU.
        rest_YW: (2, W) seconds of each phase on the slowest GPU that a change does not alter.
        most_YW: (2, W) the same maximum over these and some of the altered GPUs.
        seconds_W: (W,) seconds of each traffic case after a change.
        ranked_W: (W,) the same, largest first.
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
    gpus, _, parts, cases = layer.part_s_GEXW.shape
    return Scratch(
        np.zeros((gpus, parts, cases)),
        np.zeros(gpus, dtype=np.int64),
        np.full(gpus, EMPTY),
        np.zeros((width, parts, cases)),
        np.zeros((width, parts, cases)),
        np.zeros((2, cases)),
        np.zeros((2, cases)),
        np.zeros(cases),
        np.zeros(cases),
    )


@njit(cache=True, nogil=True)
def price(layer, slots, scratch):
    """Updates the slowest GPUs, seconds and weights of the cases in `slots`, and returns the objective in seconds."""
    top_s_YWR, seconds_W, weight_W, ranked_W = slots.top_s_YWR, slots.seconds_W, slots.weight_W, scratch.ranked_W
    _find_slowest(slots.sum_s_GXW, slots.top_YWR, top_s_YWR)
    for w in range(len(seconds_W)):
        seconds_W[w] = top_s_YWR[0, w, 0] + top_s_YWR[1, w, 0] + layer.aggregate_s_W[w]
    value_s = _tail_mean(seconds_W, ranked_W, layer.worst)
    least_s, places = ranked_W[layer.worst - 1], layer.worst
    for w in range(len(seconds_W)):
        weight_W[w] = 1.0 / layer.worst if seconds_W[w] > least_s else 0.0
        places -= seconds_W[w] > least_s
    for w in range(len(seconds_W)):
        if places > 0 and seconds_W[w] == least_s:
            weight_W[w] = 1.0 / layer.worst
            places -= 1
    return value_s


@njit(cache=True, nogil=True)
def find_gains(slots, gain_G):
    """Fills gain_G (G,): seconds by which the objective falls if a critical GPU takes no time; -1 for GPUs not critical."""
    gain_G[:] = -1.0
    for y in range(2):
        for w in range(len(slots.seconds_W)):
            if slots.weight_W[w] > 0:
                g, over_s = slots.top_YWR[y, w, 0], slots.top_s_YWR[y, w, 0]
                if slots.top_YWR[y, w, 1] != EMPTY:
                    over_s -= slots.top_s_YWR[y, w, 1]
                gain_G[g] = max(gain_G[g], 0.0) + slots.weight_W[w] * over_s


@njit(cache=True, nogil=True)
def _find_slowest(sum_s_GXW, top_YWR, top_s_YWR):
    """Fills top_YWR and top_s_YWR from the sums of all GPUs."""
    top_YWR[:] = EMPTY
    top_s_YWR[:] = -np.inf
    for g in range(sum_s_GXW.shape[0]):
        for y in range(2):
            for w in range(sum_s_GXW.shape[2]):
                value_s = larger(sum_s_GXW[g, 2 * y, w], sum_s_GXW[g, 2 * y + 1, w])
                if value_s > top_s_YWR[y, w, TOP - 1]:
                    at = TOP - 1
                    while at > 0 and value_s > top_s_YWR[y, w, at - 1]:
                        top_YWR[y, w, at], top_s_YWR[y, w, at] = top_YWR[y, w, at - 1], top_s_YWR[y, w, at - 1]
                        at -= 1
                    top_YWR[y, w, at], top_s_YWR[y, w, at] = g, value_s


@njit(cache=True, nogil=True)
def find_rest(sum_s_GXW, top_YWR, top_s_YWR, row_G, rest_YW):
    """Fills rest_YW (2, W) with the seconds of each phase on the slowest of the GPUs whose row_G is EMPTY."""
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
                    rest_YW[y, w] = max(rest_YW[y, w], larger(sum_s_GXW[g, 2 * y, w], sum_s_GXW[g, 2 * y + 1, w]))


@njit(cache=True, nogil=True)
def find_rest_of_two(top_YWR, top_s_YWR, g, h, rest_YW):
    """Fills rest_YW (2, W) with the seconds of each phase on the slowest GPU other than g and h."""
    for y in range(2):
        for w in range(rest_YW.shape[1]):
            at = 0
            while top_YWR[y, w, at] == g or top_YWR[y, w, at] == h:
                at += 1
            rest_YW[y, w] = top_s_YWR[y, w, at]


@njit(cache=True, nogil=True)
def objective(seconds_W, weight_W, ranked_W, worst, best_s):
    """Returns the objective of traffic cases with seconds_W (W,); stops early with a lower bound if that reaches best_s."""
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
def with_share(row_GXW, at, part_s_GEXW, g, e, share, y, w):
    """Returns the seconds of phase y in traffic case w for row_GXW[at] plus `share` of expert e's seconds on GPU g."""
    one_s = row_GXW[at, 2 * y, w] + share * part_s_GEXW[g, e, 2 * y, w]
    return larger(one_s, row_GXW[at, 2 * y + 1, w] + share * part_s_GEXW[g, e, 2 * y + 1, w])


@njit(cache=True, nogil=True, inline="always")
def larger(a, b):
    """Returns the larger of two numbers; compiles to one instruction."""
    return a if a > b else b
