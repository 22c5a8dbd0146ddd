"""Experts moved and swapped between GPUs one at a time, where a token counts once for each GPU that hosts some of its own."""

import numpy as np
from numba import njit

from aurora.types.arrays import FloatArray, IntArray

KICKS = 32  # restarts from the best placement, each after a few random moves and swaps
SHAKES = 3


def coactivation_search(
    experts_VK: IntArray,
    source_V: IntArray,
    count_V: IntArray,
    gpu_E: IntArray,
    room_G: IntArray,
    expert_s_GE: FloatArray,
    gate_s_G: FloatArray,
    port_s_XG: FloatArray,
    rng: np.random.Generator,
    kicks: int = KICKS,
) -> IntArray:
    """(E,) int64: a placement no worse than gpu_E in Eq. 1, by moves and swaps of single experts.

    experts_VK (V, K), source_V, count_V (V,) int64: tokens alike, their source and number. room_G (G,) int64: experts that fit.
    expert_s_GE (G, E) and gate_s_G (G,) seconds; port_s_XG (4, G): seconds a token on each port, sending and receiving in the
    dispatch, then in the combine. Steepest descent in time, then in the ports' total; `kicks` restarts from a shaken best.
    Tables of how many tokens meet others on each GPU price a move or swap in O(G). Deterministic for rng.
    """
    experts, gpus = len(gpu_E), len(room_G)
    shakes_XX2 = np.stack([rng.integers(0, experts, (kicks, SHAKES)), rng.integers(0, experts + gpus, (kicks, SHAKES))], axis=2)
    by_expert = np.argsort(experts_VK.ravel(), kind="stable") // experts_VK.shape[1]
    ends_E = np.cumsum(np.bincount(experts_VK.ravel(), minlength=experts))
    found_E = gpu_E.copy()
    _search(
        found_E, experts_VK, source_V, count_V, by_expert, np.append(0, ends_E), room_G, expert_s_GE, gate_s_G, port_s_XG,
        shakes_XX2,
    )  # fmt: skip
    return found_E


@njit(cache=True)
def _search(gpu_E, tokens_VK, source_V, count_V, of_expert, start_E, room_G, expert_s, gate_s, port_s, shakes):
    """The kicks, in place. The tables: hits (V, G) experts of a token on a GPU; rows (S, G) tokens from source to GPU; alone
    (E, E, S) tokens of two experts of which the first is the only one on its GPU; met (E, S, G) tokens of an expert that have
    another on a GPU."""
    experts, gpus = len(gpu_E), len(room_G)
    hits = np.zeros((len(tokens_VK), gpus), dtype=np.uint8)
    rows = np.zeros((gpus, gpus), dtype=np.int64)
    total = np.zeros((experts, gpus), dtype=np.int64)
    met = np.zeros((experts, gpus, gpus), dtype=np.int64)
    alone = np.zeros((experts, experts, gpus), dtype=np.int64)
    held = np.zeros(gpus, dtype=np.int64)
    work = np.zeros(gpus)
    for e in range(experts):
        held[gpu_E[e]] += 1
        work[gpu_E[e]] += expert_s[gpu_E[e], e]
    for v in range(len(tokens_VK)):
        s, many = source_V[v], count_V[v]
        for e in tokens_VK[v]:
            hits[v, gpu_E[e]] += 1
            total[e, s] += many
        for g in range(gpus):
            if hits[v, g]:
                rows[s, g] += many
                for e in tokens_VK[v]:
                    if hits[v, g] > (gpu_E[e] == g):
                        met[e, s, g] += many
        for e in tokens_VK[v]:
            if hits[v, gpu_E[e]] == 1:
                for f in tokens_VK[v]:
                    alone[e, f, s] += many
    tables = (tokens_VK, source_V, count_V, of_expert, start_E, hits, rows, met, alone, held, work, expert_s)
    best_s, best_ports = _descend(gpu_E, tables, total, room_G, gate_s, port_s)
    best_E = gpu_E.copy()
    for kick in range(len(shakes)):
        for a, b in shakes[kick]:
            if b < experts:
                g, h = gpu_E[a], gpu_E[b]
                _shift(a, h, gpu_E, tables)
                _shift(b, g, gpu_E, tables)
            elif held[b - experts] < room_G[b - experts]:
                _shift(a, b - experts, gpu_E, tables)
        now_s, now_ports = _descend(gpu_E, tables, total, room_G, gate_s, port_s)
        if _less(now_s, now_ports, best_s, best_ports):
            best_s, best_ports = now_s, now_ports
            best_E[:] = gpu_E
        else:
            for e in range(experts):
                _shift(e, best_E[e], gpu_E, tables)


@njit(cache=True)
def _less(s, ports, than_s, than_ports):
    """Shorter; or as short, with less on all ports together."""
    return s < than_s * (1 - 1e-9) or (s <= than_s * (1 + 1e-12) and ports < than_ports * (1 - 1e-9))


@njit(cache=True)
def _descend(gpu_E, tables, total, room_G, gate_s, port_s):
    """Best move or swap again and again, in place: of experts on the GPUs that set the time, or where that ends of all.

    Gives the seconds of Eq. 1 but aggregation, and those of all ports together."""
    rows, met, alone, held, work, expert_s = tables[6], tables[7], tables[8], tables[9], tables[10], tables[11]
    experts, gpus = len(gpu_E), len(room_G)
    send, recv = np.zeros(gpus, dtype=np.int64), np.zeros(gpus, dtype=np.int64)
    there, here = np.zeros(gpus, dtype=np.int64), np.zeros(gpus, dtype=np.int64)
    sent, received, busy = send.copy(), recv.copy(), work.copy()
    everywhere = False
    while True:
        send[:] = 0
        recv[:] = 0
        for s in range(gpus):
            for g in range(gpus):
                if s != g:
                    send[s] += rows[s, g]
                    recv[g] += rows[s, g]
        now_s, now_ports, slow_first, slow_second = _price(send, recv, work, gate_s, port_s)
        best_s, best_ports, best_a, best_b = now_s, now_ports, -1, -1
        for a in range(experts):
            g = gpu_E[a]
            if not everywhere and g != slow_first and g != slow_second:
                continue
            for b in range(experts + gpus):
                swaps = b < experts
                h = gpu_E[b] if swaps else b - experts
                if h == g or (swaps and everywhere and b < a) or (not swaps and held[h] >= room_G[h]):
                    continue
                for s in range(gpus):
                    here[s] = met[a, s, g] - total[a, s]
                    there[s] = total[a, s] - met[a, s, h]
                    if swaps:
                        here[s] += total[b, s] - met[b, s, g] + alone[a, b, s]
                        there[s] += met[b, s, h] - total[b, s] + alone[b, a, s]
                sent[:] = send
                received[:] = recv
                for s in range(gpus):
                    if s != g:
                        sent[s] += here[s]
                        received[g] += here[s]
                    if s != h:
                        sent[s] += there[s]
                        received[h] += there[s]
                busy[g] -= expert_s[g, a]
                busy[h] += expert_s[h, a]
                if swaps:
                    busy[g] += expert_s[g, b]
                    busy[h] -= expert_s[h, b]
                s_now, ports, _, _ = _price(sent, received, busy, gate_s, port_s)
                busy[g], busy[h] = work[g], work[h]
                if _less(s_now, ports, best_s, best_ports):
                    best_s, best_ports, best_a, best_b = s_now, ports, a, b
        if best_a < 0:
            if everywhere:
                return now_s, now_ports
            everywhere = True
            continue
        everywhere = False
        g = gpu_E[best_a]
        _shift(best_a, gpu_E[best_b] if best_b < experts else best_b - experts, gpu_E, tables)
        if best_b < experts:
            _shift(best_b, g, gpu_E, tables)
        busy[:] = work


@njit(cache=True)
def _price(send, recv, work, gate_s, port_s):
    """Seconds of Eq. 1 but aggregation, of all ports together, and the GPUs that set its two maxima."""
    ports = 0.0
    first, second, at_first, at_second = -1.0, -1.0, 0, 0
    for g in range(len(send)):
        out, into = send[g] * port_s[0, g], recv[g] * port_s[1, g]
        back, home = recv[g] * port_s[2, g], send[g] * port_s[3, g]
        ports += out + into + back + home
        if gate_s[g] + max(out, into) > first:
            first, at_first = gate_s[g] + max(out, into), g
        if work[g] + max(back, home) > second:
            second, at_second = work[g] + max(back, home), g
    return first + second, ports, at_first, at_second


@njit(cache=True)
def _shift(a, h, gpu_E, tables):
    """Expert a to GPU h, in all tables."""
    tokens_VK, source_V, count_V, of_expert, start_E, hits, rows, met, alone, held, work, expert_s = tables
    g = gpu_E[a]
    if g == h:
        return
    for v in of_expert[start_E[a] : start_E[a + 1]]:
        s, many = source_V[v], count_V[v]
        left, came = hits[v, g] - 1, hits[v, h]
        if left == 0:
            rows[s, g] -= many
        if came == 0:
            rows[s, h] += many
        turned = (came == 0) * many - (left == 0) * many  # a, alone or not
        for e in tokens_VK[v]:
            if e == a:
                continue
            alone[a, e, s] += turned
            if left == (gpu_E[e] == g):
                met[e, s, g] -= many
            if came == (gpu_E[e] == h):
                met[e, s, h] += many
            becomes = many if gpu_E[e] == g and left == 1 else -many if gpu_E[e] == h and came == 1 else 0
            if becomes:
                for f in tokens_VK[v]:
                    alone[e, f, s] += becomes
        hits[v, g] = left
        hits[v, h] = came + 1
    gpu_E[a] = h
    held[g] -= 1
    held[h] += 1
    work[g] -= expert_s[g, a]
    work[h] += expert_s[h, a]
