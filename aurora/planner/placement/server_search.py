"""Server search: simulated annealing of single experts over GPUs, so that few rows cross between servers.

A token crosses once to each server that holds experts of it, but not to its own. So the tokens are the edges of a hypergraph
over experts, and the rows that cross are its connectivity, the objective of hypergraph partitioning. Limits on the seconds of
each GPU and each server keep the load balanced.
"""

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from aurora.planner.placement.coactivation_search import Tokens
from aurora.types.arrays import FloatArray, IntArray

STEPS = 3000  # of a run, for each expert
RUNS, MOST_STEPS = 8, 1_600_000  # runs at most, and steps of all of them, unless one takes more
HOT, COLD = 0.08, 0.016  # first and last temperature, as shares of the mean expert's tokens
LENIENT, STRICT = 1.0, 30.0  # first and last price of a token above a limit, in tokens that cross
MARGIN = 0.001  # limits are lower by this share while the search runs, since it ends a little above them
NONE = -1  # in place of an expert or a server
TINY = 1e-9  # of all seconds, where a float sum must not count as above a limit


class Limits(NamedTuple):
    """What placements are held to.

    Attributes:
        server_G: (G,) int64, the server of each GPU.
        slots_G: (G,) int64, how many experts each GPU can hold.
        gpu_s_GE: (G, E) seconds of each expert on each GPU.
        server_s_NE: (N, E) seconds of each expert on each server, divided over all of its GPUs.
        most_gpu_s: seconds that a GPU may take.
        most_server_s: seconds that a server may take.
        beside_s_G: (G,) seconds that each GPU takes for other work.
        beside_s_N: (N,) the same of each server, divided over all of its GPUs.
    """

    server_G: IntArray
    slots_G: IntArray
    gpu_s_GE: FloatArray
    server_s_NE: FloatArray
    most_gpu_s: float
    most_server_s: float
    beside_s_G: FloatArray
    beside_s_N: FloatArray


class ServerTables(NamedTuple):
    """Counts that follow from the placement, so that a move or swap is priced in constant time.

    Attributes:
        gpu_E: (E,) int64, the GPU of each expert.
        held_G: (G,) int64, how many experts each GPU holds.
        gpu_s_G: (G,) seconds of each GPU, other work included.
        server_s_N: (N,) seconds of each server, other work included.
        hits_VN: (V, N) uint8, how many of a distinct token's experts each server holds; one more on the token's own server.
        missed_EN: (E, N) int64, tokens of an expert that do not go to a server.
        sole_E: (E,) int64, tokens that go to the expert's server for it alone.
        sole_EE: (E, E) int64, those of them that also choose another expert.
    """

    gpu_E: IntArray
    held_G: IntArray
    gpu_s_G: FloatArray
    server_s_N: FloatArray
    hits_VN: NDArray[np.uint8]
    missed_EN: IntArray
    sole_E: IntArray
    sole_EE: IntArray


def server_search(tokens: Tokens, limits: Limits, gpu_E: IntArray, rng: np.random.Generator) -> IntArray:
    """Moves and swaps experts, by simulated annealing, so that fewer rows cross between servers.

    Then it levels the GPUs inside each server, which changes no row between servers. The best of several runs counts.
    Deterministic for a given `rng`.

    Args:
        tokens: distinct tokens; their `source_V` is the server that each starts on, or NONE to count that server like others.
        limits: what the placement is held to. Where the start is above a limit, the search lowers that first.
        gpu_E: (E,) int64, the GPU of each expert to start from; not changed.
        rng: for the draws.

    Returns:
        (E,) int64, the GPU of each expert. It has no more seconds above limits than gpu_E, nor more rows if gpu_E has none.
    """
    experts, gpus = len(gpu_E), len(limits.slots_G)
    best_E, best = gpu_E, (np.inf, 0)
    steps = STEPS * experts
    for _ in range(int(np.clip(MOST_STEPS // steps, 1, RUNS)) if gpus > 1 else 0):
        found_E = gpu_E.copy()
        if (found := _anneal(tokens, limits, found_E, steps, rng)) < best:
            best_E, best = found_E, found
    return best_E


@njit(cache=True, nogil=True)
def _anneal(tokens: Tokens, limits: Limits, gpu_E: IntArray, steps: int, rng: np.random.Generator) -> tuple[float, int]:
    """Runs simulated annealing from gpu_E, and writes the best placement into it.

    Returns the seconds that it has above limits, and how many rows more cross than at the start.
    """
    experts, gpus = len(gpu_E), len(limits.slots_G)
    slack_s = MARGIN * min(limits.most_gpu_s, limits.most_server_s)
    lower = Limits(
        limits.server_G,
        limits.slots_G,
        limits.gpu_s_GE,
        limits.server_s_NE,
        (1 - MARGIN) * limits.most_gpu_s,
        (1 - MARGIN) * limits.most_server_s,
        limits.beside_s_G,
        limits.beside_s_N,
    )
    tables = _tables(tokens, lower, gpu_E.copy())
    over_s = _over(tables.gpu_s_G, lower.most_gpu_s) + _over(tables.server_s_N, lower.most_server_s)
    change, best, best_over_s = 0, 0, max(over_s, slack_s)
    all_s = max(tables.gpu_s_G.sum() - limits.beside_s_G.sum(), 1e-300)
    choices = tokens.count_V.sum() * tokens.experts_VK.shape[1]
    fine, dearer = LENIENT * choices / all_s, (STRICT / LENIENT) ** (1.0 / steps)
    heat, cooler = HOT * choices / experts, (COLD / HOT) ** (1.0 / steps)
    for _ in range(steps):
        heat, fine = heat * cooler, fine * dearer
        a, other = rng.integers(0, experts), rng.integers(0, experts + gpus)
        b = other if other < experts else NONE  # to swap with; else a moves to a GPU
        g, h = tables.gpu_E[a], tables.gpu_E[b] if b != NONE else other - experts
        if g == h or (b == NONE and tables.held_G[h] == lower.slots_G[h]):
            continue
        rows, excess_s = _rows_changed(lower, tables, a, b, h), _excess_changed(lower, tables, a, b, h)
        cost = rows + fine * excess_s
        if cost > 0 and rng.random() >= np.exp(-cost / heat):
            continue
        _shift(tokens, lower, tables, a, h)
        if b != NONE:
            _shift(tokens, lower, tables, b, g)
        change, over_s = change + rows, over_s + excess_s
        if over_s < best_over_s - TINY * all_s or (change < best and over_s <= best_over_s):
            best, best_over_s = change, max(over_s, slack_s)
            gpu_E[:] = tables.gpu_E
    _level(limits, gpu_E)
    return best_over_s - slack_s, best


@njit(cache=True, nogil=True)
def _tables(tokens: Tokens, limits: Limits, gpu_E: IntArray) -> ServerTables:
    """The tables of a placement, counted from its tokens."""
    experts, servers = len(gpu_E), len(limits.server_s_NE)
    experts_VK, source_V, count_V, _, _ = tokens
    hits_VN = np.zeros((len(experts_VK), servers), dtype=np.uint8)
    missed_EN = np.zeros((experts, servers), dtype=np.int64)
    sole_E = np.zeros(experts, dtype=np.int64)
    sole_EE = np.zeros((experts, experts), dtype=np.int64)
    held_G = np.zeros(len(limits.slots_G), dtype=np.int64)
    gpu_s_G, server_s_N = limits.beside_s_G.copy(), limits.beside_s_N.copy()
    for e in range(experts):
        g = gpu_E[e]
        held_G[g] += 1
        gpu_s_G[g] += limits.gpu_s_GE[g, e]
        server_s_N[limits.server_G[g]] += limits.server_s_NE[limits.server_G[g], e]
    for v in range(len(experts_VK)):
        if source_V[v] != NONE:
            hits_VN[v, source_V[v]] = 1
        for e in experts_VK[v]:
            hits_VN[v, limits.server_G[gpu_E[e]]] += 1
        for e in experts_VK[v]:
            for n in range(servers):
                if hits_VN[v, n] == 0:
                    missed_EN[e, n] += count_V[v]
            if hits_VN[v, limits.server_G[gpu_E[e]]] == 1:
                sole_E[e] += count_V[v]
                for f in experts_VK[v]:
                    sole_EE[e, f] += count_V[v]
    return ServerTables(gpu_E, held_G, gpu_s_G, server_s_N, hits_VN, missed_EN, sole_E, sole_EE)


@njit(cache=True, nogil=True)
def _over(seconds_X: FloatArray, most_s: float) -> float:
    """The seconds above a limit, summed."""
    return np.maximum(seconds_X - most_s, 0.0).sum()


@njit(cache=True, nogil=True)
def _rows_changed(limits: Limits, tables: ServerTables, a: int, b: int, h: int) -> int:
    """How many rows more cross if expert a goes to GPU h, and b, if any, from there to a's GPU."""
    p, q = limits.server_G[tables.gpu_E[a]], limits.server_G[h]
    if p == q:
        return 0
    rows = tables.missed_EN[a, q] - tables.sole_E[a]
    if b != NONE:  # a token of both goes to the same servers as before
        rows += tables.missed_EN[b, p] - tables.sole_E[b] + tables.sole_EE[a, b] + tables.sole_EE[b, a]
    return rows


@njit(cache=True, nogil=True)
def _excess_changed(limits: Limits, tables: ServerTables, a: int, b: int, h: int) -> float:
    """How many seconds more are above limits if expert a goes to GPU h, and b, if any, from there to a's GPU."""
    g = tables.gpu_E[a]
    p, q = limits.server_G[g], limits.server_G[h]
    at_g, at_h, at_p, at_q = tables.gpu_s_G[g], tables.gpu_s_G[h], tables.server_s_N[p], tables.server_s_N[q]
    to_g, to_h = at_g - limits.gpu_s_GE[g, a], at_h + limits.gpu_s_GE[h, a]
    to_p, to_q = at_p - limits.server_s_NE[p, a], at_q + limits.server_s_NE[q, a]
    if b != NONE:
        to_g, to_h = to_g + limits.gpu_s_GE[g, b], to_h - limits.gpu_s_GE[h, b]
        to_p, to_q = to_p + limits.server_s_NE[p, b], to_q - limits.server_s_NE[q, b]
    most_s = limits.most_gpu_s
    excess_s = max(to_g - most_s, 0.0) + max(to_h - most_s, 0.0) - max(at_g - most_s, 0.0) - max(at_h - most_s, 0.0)
    if p != q:
        most_s = limits.most_server_s
        excess_s += max(to_p - most_s, 0.0) + max(to_q - most_s, 0.0) - max(at_p - most_s, 0.0) - max(at_q - most_s, 0.0)
    return excess_s


@njit(cache=True, nogil=True)
def _shift(tokens: Tokens, limits: Limits, tables: ServerTables, a: int, h: int) -> None:
    """Puts expert a on GPU h and brings the tables up to date."""
    gpu_E, held_G, gpu_s_G, server_s_N, hits_VN, missed_EN, sole_E, sole_EE = tables
    experts_VK, _, count_V, of_expert_X, start_E = tokens
    server_G, g = limits.server_G, gpu_E[a]
    p, q = server_G[g], server_G[h]
    gpu_E[a] = h
    held_G[g] -= 1
    held_G[h] += 1
    gpu_s_G[g] -= limits.gpu_s_GE[g, a]
    gpu_s_G[h] += limits.gpu_s_GE[h, a]
    if p == q:
        return
    server_s_N[p] -= limits.server_s_NE[p, a]
    server_s_N[q] += limits.server_s_NE[q, a]
    for v in of_expert_X[start_E[a] : start_E[a + 1]]:
        many, left, came = count_V[v], hits_VN[v, p] - 1, hits_VN[v, q] + 1
        hits_VN[v, p], hits_VN[v, q] = left, came
        if left == 0:
            for e in experts_VK[v]:
                missed_EN[e, p] += many
        if came == 1:
            for e in experts_VK[v]:
                missed_EN[e, q] -= many
        if (left == 0) != (came == 1):
            turned = many if came == 1 else -many
            sole_E[a] += turned
            for f in experts_VK[v]:
                sole_EE[a, f] += turned
        if left != 1 and came != 2:
            continue
        for e in experts_VK[v]:
            n = server_G[gpu_E[e]]
            becomes = many if n == p and left == 1 else -many if n == q and came == 2 and e != a else 0
            if becomes:
                sole_E[e] += becomes
                for f in experts_VK[v]:
                    sole_EE[e, f] += becomes


@njit(cache=True, nogil=True)
def _level(limits: Limits, gpu_E: IntArray) -> None:
    """Swaps and moves experts between GPUs of a server, fullest GPU first, as long as that shortens it."""
    experts, gpus = len(gpu_E), len(limits.slots_G)
    held_G, gpu_s_G = np.zeros(gpus, dtype=np.int64), limits.beside_s_G.copy()
    for e in range(experts):
        held_G[gpu_E[e]] += 1
        gpu_s_G[gpu_E[e]] += limits.gpu_s_GE[gpu_E[e], e]
    for server in range(len(limits.server_s_NE)):
        while True:
            g = NONE
            for each in range(gpus):
                if limits.server_G[each] == server and (g == NONE or gpu_s_G[each] > gpu_s_G[g]):
                    g = each
            least_s, best_a, best_b, best_h = gpu_s_G[g] * (1 - TINY), NONE, NONE, NONE
            for a in range(experts):
                if gpu_E[a] != g:
                    continue
                for other in range(experts + gpus):
                    b = other if other < experts else NONE
                    h = gpu_E[other] if b != NONE else other - experts
                    if h == g or limits.server_G[h] != server or (b == NONE and held_G[h] == limits.slots_G[h]):
                        continue
                    at_g, at_h = gpu_s_G[g] - limits.gpu_s_GE[g, a], gpu_s_G[h] + limits.gpu_s_GE[h, a]
                    if b != NONE:
                        at_g, at_h = at_g + limits.gpu_s_GE[g, b], at_h - limits.gpu_s_GE[h, b]
                    if max(at_g, at_h) < least_s:
                        least_s, best_a, best_b, best_h = max(at_g, at_h), a, b, h
            if best_a == NONE:
                break
            for e, to in ((best_a, best_h), (best_b, g)):
                if e != NONE:
                    held_G[gpu_E[e]] -= 1
                    gpu_s_G[gpu_E[e]] -= limits.gpu_s_GE[gpu_E[e], e]
                    gpu_E[e] = to
                    held_G[to] += 1
                    gpu_s_G[to] += limits.gpu_s_GE[to, e]
