"""Swap local search: moves and swaps single experts between GPUs, for one scenario or for the longest of several."""

from typing import NamedTuple

import numpy as np
from numba import njit

from aurora.planner.placement.cost_model import LayerCosts
from aurora.types.arrays import BoolArray, FloatArray, IntArray

KICKS = 64  # restarts from the best placement, each after a few random moves and swaps
SHAKES = 3
TOP = 3  # slowest GPUs that are kept: a move or swap changes two GPUs, so the slowest other GPU is among three
LOCAL, LOAD, WORK = range(3)  # amounts of an expert on a GPU, see Layer
NONE = -1  # no expert, where a move brings none back


class Layer(NamedTuple):
    """Costs of one layer in W scenarios, which no move changes.

    Attributes:
        amount_WGEX: (W, G, E, 3) LOCAL, LOAD and WORK of an expert on a GPU: tokens of the GPU's own rank, tokens of all ranks,
            seconds.
        own_WG: (W, G) tokens of each rank.
        gate_s_WG: (W, G) seconds of the gate.
        aggregate_s_W: (W,) seconds of the aggregation on the slowest GPU.
        port_s_GX: (G, 4) seconds per token: sent and received in the dispatch, sent and received in the combine.
        slots_G: (G,) int64, how many experts each GPU can hold.
        worst: how many scenarios count, the longest first.
    """

    amount_WGEX: FloatArray
    own_WG: FloatArray
    gate_s_WG: FloatArray
    aggregate_s_W: FloatArray
    port_s_GX: FloatArray
    slots_G: IntArray
    worst: int


class Totals(NamedTuple):
    """Sums that follow from the placement.

    Attributes:
        gpu_E: (E,) int64, the GPU of each expert.
        held_G: (G,) int64, how many experts each GPU holds.
        amount_WGX: (W, G, 3) LOCAL, LOAD and WORK summed over the experts of each GPU.
    """

    gpu_E: IntArray
    held_G: IntArray
    amount_WGX: FloatArray


class Prices(NamedTuple):
    """Times of the current placement. Phase 0 is gate + dispatch, phase 1 is experts + combine.

    Attributes:
        gpu_s_WGY: (W, G, 2) seconds of each phase on each GPU.
        top_WYR: (W, 2, TOP) int64, the slowest GPUs of each phase, slowest first.
        seconds_W: (W,) scratch for the seconds of a placement or candidate in each scenario.
        ranked_W: (W,) scratch for these seconds, largest first.
    """

    gpu_s_WGY: FloatArray
    top_WYR: IntArray
    seconds_W: FloatArray
    ranked_W: FloatArray


def swap_search(
    costs: LayerCosts, gpu_E: IntArray, slots_G: IntArray, rng: np.random.Generator, kicks: int = KICKS
) -> IntArray:
    """Moves and swaps single experts to lower `LayerCosts.value_s`, the seconds of Eq. 1 over the scenarios.

    It descends steepest first among the experts of the slowest GPUs. Then it restarts `kicks` times, from the best placement
    after a few random moves and swaps. Deterministic for a given `rng`.

    Args:
        costs: one layer in W scenarios.
        gpu_E: (E,) int64, the GPU of each expert to start from.
        slots_G: (G,) int64, how many experts each GPU can hold.
        rng: for the restarts.
        kicks: number of restarts.

    Returns:
        (E,) int64, the GPU of each expert; never worse than gpu_E.
    """
    experts, best_E = len(gpu_E), gpu_E.copy()
    layer = _layer(costs, slots_G)
    best_s = _descend(layer, best_E)
    for _ in range(kicks):
        trial_E = best_E.copy()
        for a, b in zip(rng.integers(0, experts, SHAKES), rng.integers(0, experts + len(slots_G), SHAKES), strict=True):
            if b < experts:
                trial_E[a], trial_E[b] = trial_E[b], trial_E[a]
            elif (trial_E == b - experts).sum() < slots_G[b - experts]:
                trial_E[a] = b - experts
        trial_s = _descend(layer, trial_E)
        if trial_s < best_s * (1 - 1e-12):
            best_E, best_s = trial_E, trial_s
    return best_E


def _layer(costs: LayerCosts, slots_G: IntArray) -> Layer:
    """The layer's costs as arrays for compiled code."""
    load_WGE = np.broadcast_to(costs.load_WE[:, None], costs.own_WGE.shape)
    return Layer(
        np.stack([costs.own_WGE, load_WGE, costs.expert_s_WGE], axis=3).astype(np.float64),
        np.add.accumulate(costs.own_WGE, axis=2)[:, :, -1].astype(np.float64),
        costs.gate_s_WG,
        costs.aggregate_s_WG.max(axis=1),
        np.ascontiguousarray(costs.port_s_XG.T),
        slots_G,
        costs.worst,
    )


@njit(cache=True)
def _descend(layer: Layer, gpu_E: IntArray) -> float:
    """Takes the best move or swap of an expert of a slowest GPU until none helps, in place; returns `tail_mean`."""
    totals, prices = _totals(layer, gpu_E), _no_prices(layer)
    while True:
        now_s = _price_all(layer, totals, prices)
        a, b, to_gpu = _best_step(layer, totals, prices, _critical_gpus(layer, prices), now_s)
        if a == NONE:
            return now_s
        from_gpu = gpu_E[a]
        _shift(layer, totals, a, from_gpu, to_gpu)
        if b != NONE:
            _shift(layer, totals, b, to_gpu, from_gpu)


@njit(cache=True)
def _totals(layer: Layer, gpu_E: IntArray) -> Totals:
    """The sums of a placement, from its experts."""
    scenarios, gpus, experts, amounts = layer.amount_WGEX.shape
    held_G, amount_WGX = np.zeros(gpus, dtype=np.int64), np.zeros((scenarios, gpus, amounts))
    for e in range(experts):
        held_G[gpu_E[e]] += 1
    for w in range(scenarios):
        for e in range(experts):
            for x in range(amounts):
                amount_WGX[w, gpu_E[e], x] += layer.amount_WGEX[w, gpu_E[e], e, x]
    return Totals(gpu_E, held_G, amount_WGX)


@njit(cache=True)
def _no_prices(layer: Layer) -> Prices:
    """Prices filled with zeros."""
    scenarios, gpus = layer.gate_s_WG.shape
    top_WYR = np.zeros((scenarios, 2, TOP), dtype=np.int64)
    return Prices(np.zeros((scenarios, gpus, 2)), top_WYR, np.zeros(scenarios), np.zeros(scenarios))


@njit(cache=True)
def _price_all(layer: Layer, totals: Totals, prices: Prices) -> float:
    """Prices the current placement; returns its `tail_mean`."""
    scenarios, gpus = layer.gate_s_WG.shape
    for w in range(scenarios):
        for g in range(gpus):
            first_s, second_s = _gpu_seconds(
                totals.amount_WGX[w, g, LOCAL], totals.amount_WGX[w, g, LOAD], totals.amount_WGX[w, g, WORK],
                layer.own_WG[w, g], layer.gate_s_WG[w, g], layer.port_s_GX, g,
            )  # fmt: skip
            prices.gpu_s_WGY[w, g, 0], prices.gpu_s_WGY[w, g, 1] = first_s, second_s
        first_s = _slowest(prices.gpu_s_WGY[w, :, 0], prices.top_WYR[w, 0])
        second_s = _slowest(prices.gpu_s_WGY[w, :, 1], prices.top_WYR[w, 1])
        prices.seconds_W[w] = first_s + second_s + layer.aggregate_s_W[w]
    return _tail_mean(prices.seconds_W, prices.ranked_W, layer.worst)


@njit(cache=True)
def _critical_gpus(layer: Layer, prices: Prices) -> BoolArray:
    """(G,) bool: the GPUs that are slowest in a phase of a scenario that counts."""
    critical_G = np.zeros(len(layer.slots_G), dtype=np.bool_)
    for w in range(len(prices.seconds_W)):
        if prices.seconds_W[w] >= prices.ranked_W[layer.worst - 1]:
            critical_G[prices.top_WYR[w, 0, 0]] = True
            critical_G[prices.top_WYR[w, 1, 0]] = True
    return critical_G


@njit(cache=True)
def _best_step(layer: Layer, totals: Totals, prices: Prices, critical_G: BoolArray, now_s: float) -> tuple[int, int, int]:
    """The best move or swap that helps: (expert, the expert it swaps with or NONE, its new GPU); NONE thrice if none helps."""
    gpu_E, held_G, amount_WGX = totals
    amount_WGEX, own_WG, gate_s_WG, aggregate_s_W, port_s_GX, slots_G, worst = layer
    gpu_s_WGY, top_WYR, seconds_W, ranked_W = prices
    experts = len(gpu_E)
    best_s, best_a, best_b, best_gpu = now_s * (1 - 1e-9), NONE, NONE, NONE
    for a in range(experts):
        if not critical_G[gpu_E[a]]:
            continue
        for to in range(experts + len(held_G)):  # the place of another expert, or a free slot of a GPU
            b, h = (to, gpu_E[to]) if to < experts else (NONE, to - experts)
            if h == gpu_E[a] or (b == NONE and held_G[h] >= slots_G[h]):
                continue
            for w in range(len(seconds_W)):
                seconds_W[w] = aggregate_s_W[w] + _price_step(
                    w, a, gpu_E[a], b, h, amount_WGEX, amount_WGX, own_WG, gate_s_WG, port_s_GX, gpu_s_WGY, top_WYR
                )
            step_s = _tail_mean(seconds_W, ranked_W, worst)
            if step_s < best_s:
                best_s, best_a, best_b, best_gpu = step_s, a, b, h
    return best_a, best_b, best_gpu


@njit(cache=True, inline="always")
def _price_step(w, a, g, b, h, amount_WGEX, amount_WGX, own_WG, gate_s_WG, port_s_GX, gpu_s_WGY, top_WYR):
    """Seconds of scenario w before aggregation if expert a went from GPU g to h and expert b, unless NONE, from h to g."""
    first_s, second_s = 0.0, 0.0
    for rank in range(min(TOP, len(port_s_GX))):
        x, y = top_WYR[w, 0, rank], top_WYR[w, 1, rank]
        if x != g and x != h:
            first_s = max(first_s, gpu_s_WGY[w, x, 0])
        if y != g and y != h:
            second_s = max(second_s, gpu_s_WGY[w, y, 1])
    for side in range(2):
        here, gone, come = (g, a, b) if side == 0 else (h, b, a)
        local, load, work_s = amount_WGX[w, here, LOCAL], amount_WGX[w, here, LOAD], amount_WGX[w, here, WORK]
        if gone != NONE:
            local -= amount_WGEX[w, here, gone, LOCAL]
            load -= amount_WGEX[w, here, gone, LOAD]
            work_s -= amount_WGEX[w, here, gone, WORK]
        if come != NONE:
            local += amount_WGEX[w, here, come, LOCAL]
            load += amount_WGEX[w, here, come, LOAD]
            work_s += amount_WGEX[w, here, come, WORK]
        here_s = _gpu_seconds(local, load, work_s, own_WG[w, here], gate_s_WG[w, here], port_s_GX, here)
        first_s, second_s = max(first_s, here_s[0]), max(second_s, here_s[1])
    return first_s + second_s


@njit(cache=True, inline="always")
def _gpu_seconds(local, load, work_s, own, gate_s, port_s_GX, g):
    """Seconds of gate + dispatch and of experts + combine on GPU g.

    own: tokens of its rank. load: tokens of its experts, of which `local` come from its rank. work_s: seconds of its experts.
    """
    send, recv = own - local, load - local
    first_s = gate_s + max(send * port_s_GX[g, 0], recv * port_s_GX[g, 1])
    return first_s, work_s + max(recv * port_s_GX[g, 2], send * port_s_GX[g, 3])


@njit(cache=True)
def _shift(layer: Layer, totals: Totals, e: int, g: int, h: int) -> None:
    """Moves expert e from GPU g to GPU h."""
    totals.gpu_E[e] = h
    totals.held_G[g] -= 1
    totals.held_G[h] += 1
    for w in range(len(layer.aggregate_s_W)):
        for x in range(3):
            totals.amount_WGX[w, g, x] -= layer.amount_WGEX[w, g, e, x]
            totals.amount_WGX[w, h, x] += layer.amount_WGEX[w, h, e, x]


@njit(cache=True)
def _slowest(seconds_G: FloatArray, top_R: IntArray) -> float:
    """The largest of seconds_G; writes the GPUs of the TOP largest into top_R, filled up with GPU 0 if there are fewer."""
    top_R[:] = 0
    for rank in range(min(TOP, len(seconds_G))):
        best = -1
        for g in range(len(seconds_G)):
            taken = (rank > 0 and g == top_R[0]) or (rank > 1 and g == top_R[1])
            if not taken and (best < 0 or seconds_G[g] > seconds_G[best]):
                best = g
        top_R[rank] = best
    return seconds_G[top_R[0]]


@njit(cache=True)
def _tail_mean(seconds_W: FloatArray, ranked_W: FloatArray, worst: int) -> float:
    """The mean of the `worst` largest of seconds_W; writes all of them into ranked_W, largest first."""
    for w in range(len(seconds_W)):
        value = seconds_W[w]
        at = w
        while at > 0 and ranked_W[at - 1] < value:
            ranked_W[at] = ranked_W[at - 1]
            at -= 1
        ranked_W[at] = value
    return ranked_W[:worst].mean()
