"""Experts moved and swapped between GPUs one at a time, for one scenario or the worst of many."""

import numpy as np
from numba import njit

from aurora.planner.placement.scenarios import Scenarios
from aurora.types.arrays import IntArray

KICKS = 64  # restarts from the best placement, each after a few random moves and swaps
SHAKES = 3


def refined(
    costs: Scenarios, gpu_E: IntArray, room_G: IntArray, worst: int, rng: np.random.Generator, kicks: int = KICKS
) -> IntArray:
    """(E,) int64: a placement no worse than gpu_E in `tail_mean` of Eq. 1, by moves and swaps of single experts.

    room_G (G,) int64: how many experts each GPU can hold. Steepest descent among the experts of the GPUs that set the time,
    then `kicks` restarts from a shaken best. Deterministic for rng.
    """
    experts, best_E = len(gpu_E), gpu_E.copy()
    arrays = (
        costs.own_WGE, costs.load_WE, costs.expert_s_WGE, costs.gate_s_WG, costs.aggregate_s_WG.max(axis=1),
        costs.send_s_G, costs.recv_s_G, costs.csend_s_G, costs.crecv_s_G, room_G, worst,
    )  # fmt: skip
    best_s = _descend(best_E, *arrays)
    for _ in range(kicks):
        trial_E = best_E.copy()
        for a, b in zip(rng.integers(0, experts, SHAKES), rng.integers(0, experts + len(room_G), SHAKES), strict=True):
            if b < experts:
                trial_E[a], trial_E[b] = trial_E[b], trial_E[a]
            elif (trial_E == b - experts).sum() < room_G[b - experts]:
                trial_E[a] = b - experts
        trial_s = _descend(trial_E, *arrays)
        if trial_s < best_s * (1 - 1e-12):
            best_E, best_s = trial_E, trial_s
    return best_E


@njit(cache=True)
def _descend(gpu_E, own, load_WE, expert_s, gate_s, aggregate_s, send_s, recv_s, csend_s, crecv_s, room_G, worst):
    """Best move or swap of an expert on a GPU that sets the time, again and again, in place; gives tail_mean in the end."""
    scenarios, gpus, experts = own.shape
    held = np.zeros(gpus, dtype=np.int64)
    local = np.zeros((scenarios, gpus))
    load = np.zeros((scenarios, gpus))
    work = np.zeros((scenarios, gpus))
    sent = np.zeros((scenarios, gpus))
    for e in range(experts):
        held[gpu_E[e]] += 1
    for w in range(scenarios):
        for e in range(experts):
            g = gpu_E[e]
            local[w, g] += own[w, g, e]
            load[w, g] += load_WE[w, e]
            work[w, g] += expert_s[w, g, e]
            for s in range(gpus):
                sent[w, s] += own[w, s, e]
    first = np.zeros((scenarios, gpus))
    second = np.zeros((scenarios, gpus))
    top = np.zeros((2, scenarios, 3), dtype=np.int64)  # of each sum of phases, the three slowest GPUs
    seconds = np.zeros(scenarios)
    ranked = np.zeros(scenarios)
    critical = np.zeros(gpus, dtype=np.bool_)
    now = np.inf
    while True:
        for w in range(scenarios):
            for g in range(gpus):
                send = sent[w, g] - local[w, g]
                recv = load[w, g] - local[w, g]
                first[w, g] = gate_s[w, g] + max(send * send_s[g], recv * recv_s[g])
                second[w, g] = work[w, g] + max(recv * csend_s[g], send * crecv_s[g])
            _slowest(first[w], top[0, w])
            _slowest(second[w], top[1, w])
            seconds[w] = first[w, top[0, w, 0]] + second[w, top[1, w, 0]] + aggregate_s[w]
        now = _tail(seconds, ranked, worst)
        critical[:] = False
        for w in range(scenarios):
            if seconds[w] >= ranked[worst - 1]:
                critical[top[0, w, 0]] = True
                critical[top[1, w, 0]] = True
        best = now * (1 - 1e-9)
        from_e, to_e, to_g = -1, -1, -1
        for a in range(experts):
            g = gpu_E[a]
            if not critical[g]:
                continue
            for b in range(experts + gpus):
                swaps = b < experts
                h = gpu_E[b] if swaps else b - experts
                if h == g or (not swaps and held[h] >= room_G[h]):
                    continue
                for w in range(scenarios):
                    slow_first, slow_second = 0.0, 0.0
                    for rank in range(min(3, gpus)):
                        x = top[0, w, rank]
                        if x != g and x != h:
                            slow_first = max(slow_first, first[w, x])
                        x = top[1, w, rank]
                        if x != g and x != h:
                            slow_second = max(slow_second, second[w, x])
                    for side in range(2):
                        here = g if side == 0 else h
                        gone = a if side == 0 else b
                        come = b if side == 0 else a
                        near, bulk, busy = local[w, here], load[w, here], work[w, here]
                        if side == 0 or swaps:
                            near -= own[w, here, gone]
                            bulk -= load_WE[w, gone]
                            busy -= expert_s[w, here, gone]
                        if side == 1 or swaps:
                            near += own[w, here, come]
                            bulk += load_WE[w, come]
                            busy += expert_s[w, here, come]
                        send, recv = sent[w, here] - near, bulk - near
                        slow_first = max(slow_first, gate_s[w, here] + max(send * send_s[here], recv * recv_s[here]))
                        slow_second = max(slow_second, busy + max(recv * csend_s[here], send * crecv_s[here]))
                    seconds[w] = slow_first + slow_second + aggregate_s[w]
                reached = _tail(seconds, ranked, worst)
                if reached < best:
                    best, from_e, to_g = reached, a, h
                    to_e = b if swaps else -1
        if from_e < 0:
            return now
        g = gpu_E[from_e]
        _shift(from_e, g, to_g, gpu_E, held, local, load, work, own, load_WE, expert_s)
        if to_e >= 0:
            _shift(to_e, to_g, g, gpu_E, held, local, load, work, own, load_WE, expert_s)


@njit(cache=True)
def _shift(e, g, h, gpu_E, held, local, load, work, own, load_WE, expert_s):
    gpu_E[e] = h
    held[g] -= 1
    held[h] += 1
    for w in range(own.shape[0]):
        local[w, g] -= own[w, g, e]
        local[w, h] += own[w, h, e]
        load[w, g] -= load_WE[w, e]
        load[w, h] += load_WE[w, e]
        work[w, g] -= expert_s[w, g, e]
        work[w, h] += expert_s[w, h, e]


@njit(cache=True)
def _slowest(seconds_G, top):
    """The three largest of seconds_G, by index; of fewer GPUs the first repeats."""
    top[:] = 0
    for rank in range(min(3, len(seconds_G))):
        best = -1
        for g in range(len(seconds_G)):
            taken = (rank > 0 and g == top[0]) or (rank > 1 and g == top[1])
            if not taken and (best < 0 or seconds_G[g] > seconds_G[best]):
                best = g
        top[rank] = best


@njit(cache=True)
def _tail(seconds, ranked, worst):
    """The mean of the `worst` largest; ranked gets all, largest first."""
    for w in range(len(seconds)):
        value = seconds[w]
        at = w
        while at > 0 and ranked[at - 1] < value:
            ranked[at] = ranked[at - 1]
            at -= 1
        ranked[at] = value
    return ranked[:worst].mean()
