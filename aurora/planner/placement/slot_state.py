"""What each expert slot of each GPU holds during a slot search, compiled: its phase sums, and changes of slots."""

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from aurora.planner.placement.phase_sums import add_share
from aurora.types.arrays import BoolArray, FloatArray, IntArray
from aurora.types.placement import EMPTY_INT64 as EMPTY

FIRST: Any = np.int64(0)  # a place; no constant, for the reason of EMPTY_INT64
TOP = 4  # slowest GPUs that are kept, so that the slowest GPU that a change leaves alone is mostly among them


class Slots(NamedTuple):
    """What each slot holds, and the times that follow from it.

    Attributes:
        held_GP: (G, P) int64, the expert in each slot, EMPTY for none.
        share_GP: (G, P) float64, the share of its expert's tokens that each slot takes.
        count_E: (E,) int64, the replicas of each expert.
        gpu_EG: (E, G) int64, the GPUs that hold each expert, in its first count_E places.
        holds_GE: (G, E) bool, whether a GPU holds an expert.
        sum_s_GXW: (G, 4, W) seconds of each sum of each GPU.
        top_YWR: (2, W, TOP) int64, the slowest GPUs of each phase of each scenario, slowest first; EMPTY where there are fewer.
        top_s_YWR: (2, W, TOP) seconds of this phase there.
        seconds_W: (W,) seconds of each scenario.
        weight_W: (W,) 1 / worst for the scenarios that count, 0 for the others.
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
    """Returns the Slots of a start: held_GP (G, P) the expert in each slot, share_GP (G, P) what share it takes there."""
    gpus, experts, parts, scenarios = layer.part_s_GEXW.shape
    slots = Slots(
        held_GP,
        share_GP,
        np.zeros(experts, dtype=np.int64),
        np.zeros((experts, gpus), dtype=np.int64),
        np.zeros((gpus, experts), dtype=np.bool_),
        np.zeros((gpus, parts, scenarios)),
        np.zeros((2, scenarios, TOP), dtype=np.int64),
        np.zeros((2, scenarios, TOP)),
        np.zeros(scenarios),
        np.zeros(scenarios),
    )
    load_slots(layer, slots, held_GP.copy(), share_GP.copy())
    return slots


@njit(cache=True, nogil=True)
def load_slots(layer, slots, held_GP, share_GP):
    """Sets all slots anew."""
    slots.held_GP[:] = EMPTY
    slots.count_E[:] = 0
    slots.holds_GE[:] = False
    slots.sum_s_GXW[:] = layer.base_s_GXW
    for g in range(held_GP.shape[0]):
        for p in range(held_GP.shape[1]):
            if held_GP[g, p] != EMPTY:
                _give(layer, slots, g, p, held_GP[g, p], share_GP[g, p])


@njit(cache=True, nogil=True)
def swap(layer, slots, g, p, h, q):
    """Swaps what slot p of GPU g and slot q of GPU h hold; slot q may be empty."""
    a, share_a = _take(layer, slots, g, p)
    if slots.held_GP[h, q] != EMPTY:
        b, share_b = _take(layer, slots, h, q)
        _give(layer, slots, g, p, b, share_b)
    _give(layer, slots, h, q, a, share_a)


@njit(cache=True, nogil=True)
def exchange(layer, slots, g, h):
    """Exchanges all that GPUs g and h hold."""
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
    """Puts a further replica of expert e into slot q of GPU h, in place of what is there; e EMPTY: leaves the slot empty."""
    if slots.held_GP[h, q] != EMPTY:
        x, _ = _take(layer, slots, h, q)
        _even_out(layer, slots, x)
    if e != EMPTY:
        _give(layer, slots, h, q, e, 0.0)
        _even_out(layer, slots, e)


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
def _even_out(layer, slots, e):
    """Divides the tokens of expert e evenly over its replicas."""
    share = 1.0 / slots.count_E[e]
    for at in range(slots.count_E[e]):
        g = slots.gpu_EG[e, at]
        for p in range(slots.held_GP.shape[1]):
            if slots.held_GP[g, p] == e:
                add_share(layer.part_s_GEXW, slots.sum_s_GXW, g, g, e, share - slots.share_GP[g, p])
                slots.share_GP[g, p] = share
