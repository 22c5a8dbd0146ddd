"""Co-activation local search: moves and swaps single experts where a token travels once to a GPU for all its experts there."""

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from aurora.types.arrays import FloatArray, IntArray

KICKS = 32  # restarts from the best placement, each after a few random moves and swaps
SHAKES = 3
NONE = -1


class Tokens(NamedTuple):
    """Distinct tokens: their experts, source, number; the tokens of expert e are of_expert_X[start_E[e] : start_E[e + 1]]."""

    experts_VK: IntArray
    source_V: IntArray
    count_V: IntArray
    of_expert_X: IntArray
    start_E: IntArray


class Costs(NamedTuple):
    """Seconds of experts, of the gate and of a token on each port; and how many experts each GPU can hold."""

    expert_s_GE: FloatArray
    gate_s_G: FloatArray
    port_s_XG: FloatArray
    slots_G: IntArray


class Tables(NamedTuple):
    """What follows from where experts sit, kept up to date so that a move or swap is priced in O(G).

    gpu_E (E,), held_G (G,), work_s_G (G,): the placement, experts held, their seconds. total_ES (E, S): tokens of each expert.
    hits_VG (V, G) uint8: experts of a token on a GPU. rows_SG (S, G): tokens from source to GPU. met_ESG (E, S, G): tokens of
    an expert that have another of their experts on a GPU. alone_EES (E, E, S): tokens of two experts of which the first is the
    only one on its GPU.
    """

    gpu_E: IntArray
    held_G: IntArray
    work_s_G: FloatArray
    total_ES: IntArray
    hits_VG: NDArray[np.uint8]
    rows_SG: IntArray
    met_ESG: IntArray
    alone_EES: IntArray


def coactivation_search(
    experts_VK: IntArray,
    source_V: IntArray,
    count_V: IntArray,
    gpu_E: IntArray,
    slots_G: IntArray,
    expert_s_GE: FloatArray,
    gate_s_G: FloatArray,
    port_s_XG: FloatArray,
    rng: np.random.Generator,
    kicks: int = KICKS,
) -> IntArray:
    """A placement no worse than gpu_E in Eq. 1 with deduplicated tokens, found by moves and swaps of single experts.

    Steepest descent in time, then in the ports' total; then `kicks` restarts from the best, shaken. Deterministic for `rng`.

    Args:
        experts_VK, source_V, count_V: (V, K), (V,), (V,) int64, distinct tokens: their experts, source and number.
        gpu_E: (E,) int64, the GPU of each expert to start from.
        slots_G: (G,) int64, how many experts each GPU can hold.
        expert_s_GE: (G, E) seconds of each expert on each GPU.
        gate_s_G: (G,) seconds of the gate.
        port_s_XG: (4, G) seconds a token on each port, sent and received in the dispatch, then in the combine.
        kicks: restarts.

    Returns:
        (E,) int64, the GPU of each expert.
    """
    experts, gpus = len(gpu_E), len(slots_G)
    shakes_XX2 = np.stack([rng.integers(0, experts, (kicks, SHAKES)), rng.integers(0, experts + gpus, (kicks, SHAKES))], axis=2)
    of_expert_X = np.argsort(experts_VK.ravel(), kind="stable") // experts_VK.shape[1]
    ends_E = np.cumsum(np.bincount(experts_VK.ravel(), minlength=experts))
    tokens = Tokens(experts_VK, source_V, count_V, of_expert_X, np.append(0, ends_E))
    found_E = gpu_E.copy()
    _search(tokens, Costs(expert_s_GE, gate_s_G, port_s_XG, slots_G), found_E, shakes_XX2)
    return found_E


@njit(cache=True)
def _search(tokens: Tokens, costs: Costs, gpu_E: IntArray, shakes: IntArray) -> None:
    """A descent and its restarts, in place."""
    tables = _tables(tokens, costs, gpu_E)
    best_s, best_ports = _descend(tokens, costs, tables)
    best_E = gpu_E.copy()
    for kick in range(len(shakes)):
        _shake(tokens, costs, tables, shakes[kick])
        now_s, now_ports = _descend(tokens, costs, tables)
        if _less(now_s, now_ports, best_s, best_ports):
            best_s, best_ports = now_s, now_ports
            best_E[:] = gpu_E
        else:
            for e in range(len(gpu_E)):
                _shift(tokens, costs, tables, e, best_E[e])


@njit(cache=True)
def _tables(tokens: Tokens, costs: Costs, gpu_E: IntArray) -> Tables:
    experts, gpus = len(gpu_E), len(costs.slots_G)
    experts_VK, source_V, count_V, _, _ = tokens
    hits = np.zeros((len(experts_VK), gpus), dtype=np.uint8)
    rows = np.zeros((gpus, gpus), dtype=np.int64)
    total = np.zeros((experts, gpus), dtype=np.int64)
    met = np.zeros((experts, gpus, gpus), dtype=np.int64)
    alone = np.zeros((experts, experts, gpus), dtype=np.int64)
    held = np.zeros(gpus, dtype=np.int64)
    work = np.zeros(gpus)
    for e in range(experts):
        held[gpu_E[e]] += 1
        work[gpu_E[e]] += costs.expert_s_GE[gpu_E[e], e]
    for v in range(len(experts_VK)):
        s, many = source_V[v], count_V[v]
        for e in experts_VK[v]:
            hits[v, gpu_E[e]] += 1
            total[e, s] += many
        for g in range(gpus):
            if hits[v, g]:
                rows[s, g] += many
                for e in experts_VK[v]:
                    if hits[v, g] > (gpu_E[e] == g):
                        met[e, s, g] += many
        for e in experts_VK[v]:
            if hits[v, gpu_E[e]] == 1:
                for f in experts_VK[v]:
                    alone[e, f, s] += many
    return Tables(gpu_E, held, work, total, hits, rows, met, alone)


@njit(cache=True)
def _shake(tokens: Tokens, costs: Costs, tables: Tables, pairs: IntArray) -> None:
    """Swaps the experts of each pair; a second number past the experts is a GPU, to which the first moves if it has a slot."""
    gpu_E, experts = tables.gpu_E, len(tables.gpu_E)
    for a, b in pairs:
        if b < experts:
            g, h = gpu_E[a], gpu_E[b]
            _shift(tokens, costs, tables, a, h)
            _shift(tokens, costs, tables, b, g)
        elif tables.held_G[b - experts] < costs.slots_G[b - experts]:
            _shift(tokens, costs, tables, a, b - experts)


@njit(cache=True)
def _less(s, ports, than_s, than_ports):
    """Shorter; or as short, with less on all ports together."""
    return s < than_s * (1 - 1e-9) or (s <= than_s * (1 + 1e-12) and ports < than_ports * (1 - 1e-9))


@njit(cache=True)
def _descend(tokens: Tokens, costs: Costs, tables: Tables) -> tuple[float, float]:
    """Takes the best move or swap until none helps, in place: of experts on the GPUs that set the time, or else of all.

    Returns the seconds of Eq. 1 without aggregation, and the seconds of all ports together.
    """
    everywhere = False
    while True:
        now_s, now_ports, a, b, to_gpu = _best_step(costs, tables, everywhere)
        if a == NONE:
            if everywhere:
                return now_s, now_ports
            everywhere = True
            continue
        everywhere = False
        from_gpu = tables.gpu_E[a]
        _shift(tokens, costs, tables, a, to_gpu)
        if b != NONE:
            _shift(tokens, costs, tables, b, from_gpu)


@njit(cache=True)
def _best_step(costs: Costs, tables: Tables, everywhere: bool) -> tuple[float, float, int, int, int]:
    """(seconds now, port seconds now, expert, the expert it changes places with or NONE, its new GPU) of the best move or swap
    that helps; the last three are NONE if none does. everywhere: look at all experts, not only at the critical GPUs'."""
    expert_s_GE, gate_s_G, port_s_XG, slots_G = costs
    gpu_E, held_G, work_s_G, total_ES, _, rows_SG, met_ESG, alone_EES = tables
    experts, gpus = len(gpu_E), len(slots_G)
    send_G, recv_G = _traffic(rows_SG)
    sent_G, received_G, busy_s_G = send_G.copy(), recv_G.copy(), work_s_G.copy()
    now_s, now_ports, slow_first, slow_second = _price(send_G, recv_G, work_s_G, gate_s_G, port_s_XG)
    best_s, best_ports, best_a, best_b, best_gpu = now_s, now_ports, NONE, NONE, NONE
    for a in range(experts):
        g = gpu_E[a]
        if not everywhere and g != slow_first and g != slow_second:
            continue
        for to in range(experts + gpus):  # the place of another expert, or a free slot of a GPU
            b, h = (to, gpu_E[to]) if to < experts else (NONE, to - experts)
            if h == g or (b == NONE and held_G[h] >= slots_G[h]) or (b != NONE and everywhere and b < a):
                continue
            sent_G[:] = send_G
            received_G[:] = recv_G
            _change_traffic(sent_G, received_G, a, g, b, h, total_ES, met_ESG, alone_EES)
            busy_s_G[g] -= expert_s_GE[g, a]
            busy_s_G[h] += expert_s_GE[h, a]
            if b != NONE:
                busy_s_G[g] += expert_s_GE[g, b]
                busy_s_G[h] -= expert_s_GE[h, b]
            step_s, step_ports, _, _ = _price(sent_G, received_G, busy_s_G, gate_s_G, port_s_XG)
            busy_s_G[g], busy_s_G[h] = work_s_G[g], work_s_G[h]
            if _less(step_s, step_ports, best_s, best_ports):
                best_s, best_ports, best_a, best_b, best_gpu = step_s, step_ports, a, b, h
    return now_s, now_ports, best_a, best_b, best_gpu


@njit(cache=True)
def _traffic(rows_SG: IntArray) -> tuple[IntArray, IntArray]:
    """Tokens that each GPU sends to others and receives from others."""
    send_G, recv_G = np.zeros(len(rows_SG), dtype=np.int64), np.zeros(len(rows_SG), dtype=np.int64)
    for s in range(len(rows_SG)):
        for g in range(len(rows_SG)):
            if s != g:
                send_G[s] += rows_SG[s, g]
                recv_G[g] += rows_SG[s, g]
    return send_G, recv_G


@njit(cache=True, inline="always")
def _change_traffic(sent_G, received_G, a, g, b, h, total_ES, met_ESG, alone_EES):
    """Adds to both what changes if expert a goes from GPU g to h and expert b, unless NONE, from h to g."""
    for s in range(len(sent_G)):
        here = met_ESG[a, s, g] - total_ES[a, s]
        there = total_ES[a, s] - met_ESG[a, s, h]
        if b != NONE:
            here += total_ES[b, s] - met_ESG[b, s, g] + alone_EES[a, b, s]
            there += met_ESG[b, s, h] - total_ES[b, s] + alone_EES[b, a, s]
        if s != g:
            sent_G[s] += here
            received_G[g] += here
        if s != h:
            sent_G[s] += there
            received_G[h] += there


@njit(cache=True)
def _price(send_G, recv_G, work_s_G, gate_s_G, port_s_XG):
    """Seconds of Eq. 1 without aggregation, seconds of all ports together, and the GPUs that set its two maxima."""
    ports = 0.0
    first, second, at_first, at_second = -1.0, -1.0, 0, 0
    for g in range(len(send_G)):
        out, into = send_G[g] * port_s_XG[0, g], recv_G[g] * port_s_XG[1, g]
        back, home = recv_G[g] * port_s_XG[2, g], send_G[g] * port_s_XG[3, g]
        ports += out + into + back + home
        if gate_s_G[g] + max(out, into) > first:
            first, at_first = gate_s_G[g] + max(out, into), g
        if work_s_G[g] + max(back, home) > second:
            second, at_second = work_s_G[g] + max(back, home), g
    return first + second, ports, at_first, at_second


@njit(cache=True)
def _shift(tokens: Tokens, costs: Costs, tables: Tables, a: int, h: int) -> None:
    """Moves expert a to GPU h, in all tables."""
    experts_VK, source_V, count_V, of_expert_X, start_E = tokens
    gpu_E, held_G, work_s_G, _, hits_VG, rows_SG, met_ESG, alone_EES = tables
    g = gpu_E[a]
    if g == h:
        return
    for v in of_expert_X[start_E[a] : start_E[a + 1]]:
        s, many = source_V[v], count_V[v]
        left, came = hits_VG[v, g] - 1, hits_VG[v, h]
        if left == 0:
            rows_SG[s, g] -= many
        if came == 0:
            rows_SG[s, h] += many
        turned = (came == 0) * many - (left == 0) * many  # a, alone or not
        for e in experts_VK[v]:
            if e == a:
                continue
            alone_EES[a, e, s] += turned
            if left == (gpu_E[e] == g):
                met_ESG[e, s, g] -= many
            if came == (gpu_E[e] == h):
                met_ESG[e, s, h] += many
            becomes = many if gpu_E[e] == g and left == 1 else -many if gpu_E[e] == h and came == 1 else 0
            if becomes:
                for f in experts_VK[v]:
                    alone_EES[e, f, s] += becomes
        hits_VG[v, g] = left
        hits_VG[v, h] = came + 1
    gpu_E[a] = h
    held_G[g] -= 1
    held_G[h] += 1
    work_s_G[g] -= costs.expert_s_GE[g, a]
    work_s_G[h] += costs.expert_s_GE[h, a]
