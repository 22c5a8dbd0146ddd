"""Server search: places experts by simulated annealing, so that few rows cross between servers.

A token crosses once to each server that holds experts of it, but not to its own. So the tokens are the edges of a hypergraph
over experts, and the rows that cross are its connectivity, the objective of hypergraph partitioning. Limits on the seconds of
each GPU and each server keep the load balanced.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from aurora.algorithms.replicas.slot_packing import swap_descent
from aurora.types.arrays import FloatArray, IntArray
from aurora.types.compiled import njit

MOST_TOKENS = 8192  # that the search sees; of more, it takes some
STEPS_PER_EXPERT = 1500  # of a run, for each expert
RUNS, MOST_STEPS = 8, 700_000  # runs at most, and steps of all of them, unless one takes more
HOT, COLD = 0.08, 0.016  # first and last temperature, as shares of the mean expert's tokens
LENIENT, STRICT = 1.0, 30.0  # first and last price of a token above a limit, in tokens that cross
MARGIN = 0.001  # limits are lower by this share while the search runs, since it ends a little above them
NONE = -1  # in place of an expert or a server
WORD = 64  # bits
EMPTY, FULL = np.uint64(0), np.uint64(0xFFFFFFFFFFFFFFFF)  # words
TINY = 1e-9  # of all seconds, where a float sum must not count as above a limit


class Limits(NamedTuple):
    """Limits of a server search: slots and maximum seconds of GPUs and servers; and the seconds of each expert there.

    Attributes:
        server_G: (G,) int64, the server of each GPU.
        slots_G: (G,) int64, how many experts each GPU can hold.
        gpu_s_GE: (G, E) seconds of each expert on each GPU.
        server_s_NE: (N, E) seconds of each expert on each server, if all GPUs of the server share its tokens.
        most_gpu_s: maximum seconds of a GPU.
        most_server_s: maximum seconds of a server.
        beside_s_G: (G,) seconds of other work on each GPU.
        beside_s_N: (N,) seconds of other work on each server, if all of its GPUs share it.
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
    """Tables that follow from the placement, from which the gain of a move or swap is computed quickly.

    Sets of tokens are bits in W words of 64, so that one operation covers 64 tokens.

    Attributes:
        gpu_E: (E,) int64, the GPU of each expert.
        held_G: (G,) int64, how many experts each GPU holds.
        gpu_s_G: (G,) seconds of each GPU, other work included.
        server_s_N: (N,) seconds of each server, other work included.
        chosen_EW: (E, W) uint64, the tokens that choose each expert.
        hits_NBW: (N, B, W) uint64, for each token the number of its experts that each server holds, plus one on the token's own
            server; B bits of the number, each in its own row of words.
        none_NW: (N, W) uint64, the tokens for which that number is zero.
        sole_NW: (N, W) uint64, the tokens for which it is one.
        carry_W: (W,) uint64, scratch memory for carries between bits.
    """

    gpu_E: IntArray
    held_G: IntArray
    gpu_s_G: FloatArray
    server_s_N: FloatArray
    chosen_EW: NDArray[np.uint64]
    hits_NBW: NDArray[np.uint64]
    none_NW: NDArray[np.uint64]
    sole_NW: NDArray[np.uint64]
    carry_W: NDArray[np.uint64]


def server_search(
    experts_UK: IntArray, server_U: IntArray, limits: Limits, gpu_E: IntArray, rng: np.random.Generator
) -> IntArray:
    """Moves and swaps experts, by simulated annealing, so that fewer rows cross between servers.

    Then it balances the GPUs inside each server, which changes no row between servers. The best of several runs is returned.
    Deterministic for a given `rng`.

    Args:
        experts_UK: (U, K) int, the experts of each token. If there are more than MOST_TOKENS tokens, that many are drawn.
        server_U: (U,) int64, the server that each token starts on; NONE: rows to every server count.
        limits: limits of the placement. If the start exceeds some, the search first lowers the excess.
        gpu_E: (E,) int64, the GPU of each expert to start from; not changed.
        rng: for the random draws.

    Returns:
        (E,) int64, the GPU of each expert. Its seconds in excess of limits are no more than gpu_E's. If gpu_E has no excess, it
        has no more rows between servers than gpu_E, counted for the tokens that the search used.
    """
    experts, gpus = len(gpu_E), len(limits.slots_G)
    best_E, best = gpu_E.copy(), (np.inf, 0)
    steps = STEPS_PER_EXPERT * experts
    tokens = some_tokens(experts_UK, server_U, rng)
    slack_s = MARGIN * min(limits.most_gpu_s, limits.most_server_s)
    lower = limits._replace(most_gpu_s=(1 - MARGIN) * limits.most_gpu_s, most_server_s=(1 - MARGIN) * limits.most_server_s)
    for _ in range(int(np.clip(MOST_STEPS // steps, 1, RUNS)) if gpus > 1 else 0):
        next_E = gpu_E.copy()
        if (cost := _anneal(*tokens, lower, slack_s, next_E, steps, rng)) < best:
            best_E, best = next_E, cost
    _level(limits, best_E)
    return best_E


def some_tokens(experts_UK: IntArray, server_U: IntArray, rng: np.random.Generator) -> tuple[IntArray, IntArray]:
    """Returns (experts_UK, server_U) as int64, of MOST_TOKENS drawn tokens if there are more; Args: as in `server_search`."""
    some_U = rng.choice(len(server_U), MOST_TOKENS, replace=False) if len(server_U) > MOST_TOKENS else slice(None)
    return np.array(experts_UK[some_U], dtype=np.int64), np.array(server_U[some_U], dtype=np.int64)


@njit(cache=True, nogil=True)
def _anneal(
    experts_UK: IntArray,
    server_U: IntArray,
    limits: Limits,
    slack_s: float,
    gpu_E: IntArray,
    steps: int,
    rng: np.random.Generator,
) -> tuple[float, int]:
    """Runs simulated annealing from gpu_E, and writes the best placement into it.

    Returns the seconds that it has above limits beside slack_s, and how many rows more cross than at the start.
    """
    experts, gpus = len(gpu_E), len(limits.slots_G)
    tables = _tables(experts_UK, server_U, limits, gpu_E.copy())
    over_s = _over(tables.gpu_s_G, limits.most_gpu_s) + _over(tables.server_s_N, limits.most_server_s)
    change, best, best_over_s = 0, 0, max(over_s, slack_s)
    all_s = max(tables.gpu_s_G.sum() - limits.beside_s_G.sum(), 1e-300)
    choices = experts_UK.size
    fine, dearer = LENIENT * choices / all_s, (STRICT / LENIENT) ** (1.0 / steps)
    heat, cooler = HOT * choices / experts, (COLD / HOT) ** (1.0 / steps)
    for _ in range(steps):
        heat, fine = heat * cooler, fine * dearer
        a, other = rng.integers(0, experts), rng.integers(0, experts + gpus)
        b = other if other < experts else NONE  # to swap with; else a moves to a GPU
        g, h = tables.gpu_E[a], tables.gpu_E[b] if b != NONE else other - experts
        if g == h or (b == NONE and tables.held_G[h] == limits.slots_G[h]):
            continue
        rows, excess_s = _rows_changed(limits, tables, a, b, h), _excess_changed(limits, tables, a, b, h)
        cost = rows + fine * excess_s
        if cost > 0 and rng.random() >= np.exp(-cost / heat):
            continue
        _shift(limits, tables, a, h)
        if b != NONE:
            _shift(limits, tables, b, g)
        change, over_s = change + rows, over_s + excess_s
        if over_s < best_over_s - TINY * all_s or (change < best and over_s <= best_over_s):
            best, best_over_s = change, max(over_s, slack_s)
            gpu_E[:] = tables.gpu_E
    return best_over_s - slack_s, best


@njit(cache=True, nogil=True)
def _tables(experts_UK: IntArray, server_U: IntArray, limits: Limits, gpu_E: IntArray) -> ServerTables:
    """The tables of a placement, counted from its tokens."""
    experts, servers, words, digits = len(gpu_E), len(limits.server_s_NE), (len(server_U) + WORD - 1) // WORD, 1
    while 1 << digits <= experts_UK.shape[1] + 1:
        digits += 1
    chosen_EW, hits_NBW = np.zeros((experts, words), np.uint64), np.zeros((servers, digits, words), np.uint64)
    none_NW, sole_NW = np.empty((servers, words), np.uint64), np.empty((servers, words), np.uint64)
    for u in range(len(server_U)):
        bit = np.uint64(1) << np.uint64(u % WORD)
        for e in experts_UK[u]:
            chosen_EW[e, u // WORD] |= bit
        if server_U[u] != NONE:
            hits_NBW[server_U[u], 0, u // WORD] |= bit
    tables = ServerTables(
        gpu_E,
        np.zeros(len(limits.slots_G), np.int64),
        limits.beside_s_G.copy(),
        limits.beside_s_N.copy(),
        chosen_EW,
        hits_NBW,
        none_NW,
        sole_NW,
        np.empty(words, np.uint64),
    )
    nothing_W = np.zeros(words, np.uint64)
    for n in range(servers):
        _count(tables, n, nothing_W, EMPTY)
    for e in range(experts):
        g = gpu_E[e]
        n = limits.server_G[g]
        tables.held_G[g] += 1
        tables.gpu_s_G[g] += limits.gpu_s_GE[g, e]
        tables.server_s_N[n] += limits.server_s_NE[n, e]
        _count(tables, n, chosen_EW[e], EMPTY)
    return tables


@njit(cache=True, nogil=True)
def _count(tables: ServerTables, n: int, chosen_W: NDArray[np.uint64], less: np.uint64) -> None:
    """Adds one to a server's hits of some tokens, or takes one off if `less` is FULL, and marks those without and with one."""
    hits_BW, none_W, sole_W, carry_W = tables.hits_NBW[n], tables.none_NW[n], tables.sole_NW[n], tables.carry_W
    carry_W[:] = chosen_W
    none_W[:] = EMPTY
    for b in range(len(hits_BW)):
        digit_W = hits_BW[b]
        for w in range(len(carry_W)):
            digit = digit_W[w]
            digit_W[w] = digit ^ carry_W[w]
            carry_W[w] &= digit ^ less
            if b > 0:
                none_W[w] |= digit_W[w]
    for w in range(len(none_W)):
        more, lowest = none_W[w], hits_BW[0, w]
        none_W[w], sole_W[w] = ~(lowest | more), lowest & ~more


@njit(cache=True, nogil=True)
def _over(seconds_X: FloatArray, most_s: float) -> float:
    """The seconds above a limit, summed."""
    return np.maximum(seconds_X - most_s, 0.0).sum()


@njit(cache=True, nogil=True)
def _rows_changed(limits: Limits, tables: ServerTables, a: int, b: int, h: int) -> int:
    """Rows that cross more if expert a goes to GPU h, and b, if any, from there to a's GPU."""
    p, q = limits.server_G[tables.gpu_E[a]], limits.server_G[h]
    if p == q:
        return 0
    none_p, none_q, sole_p, sole_q = tables.none_NW[p], tables.none_NW[q], tables.sole_NW[p], tables.sole_NW[q]
    goes_W, comes_W = tables.chosen_EW[a], tables.chosen_EW[b if b != NONE else a]
    swaps = FULL if b != NONE else EMPTY
    rows = 0
    for w in range(len(goes_W)):
        goes, comes = goes_W[w], comes_W[w] & swaps
        goes, comes = goes & ~comes, comes & ~goes  # a token of both goes to the same servers as before
        rows += _ones((goes & none_q[w]) | (comes & none_p[w])) - _ones((goes & sole_p[w]) | (comes & sole_q[w]))
    return rows


@njit(cache=True, nogil=True)
def _ones(word):
    """Number of bits that are set in a word (Warren, Hacker's Delight, 5-1)."""
    word -= (word >> np.uint64(1)) & np.uint64(0x5555555555555555)
    word = (word & np.uint64(0x3333333333333333)) + ((word >> np.uint64(2)) & np.uint64(0x3333333333333333))
    word = (word + (word >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return np.int64((word * np.uint64(0x0101010101010101)) >> np.uint64(56))


@njit(cache=True, nogil=True)
def _excess_changed(limits: Limits, tables: ServerTables, a: int, b: int, h: int) -> float:
    """Seconds above limits that come on top if expert a goes to GPU h, and b, if any, from there to a's GPU."""
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
def _shift(limits: Limits, tables: ServerTables, a: int, h: int) -> None:
    """Puts expert a on GPU h and brings the tables up to date."""
    gpu_E, held_G, gpu_s_G, server_s_N = tables.gpu_E, tables.held_G, tables.gpu_s_G, tables.server_s_N
    g = gpu_E[a]
    p, q = limits.server_G[g], limits.server_G[h]
    gpu_E[a] = h
    held_G[g] -= 1
    held_G[h] += 1
    gpu_s_G[g] -= limits.gpu_s_GE[g, a]
    gpu_s_G[h] += limits.gpu_s_GE[h, a]
    if p == q:
        return
    server_s_N[p] -= limits.server_s_NE[p, a]
    server_s_N[q] += limits.server_s_NE[q, a]
    _count(tables, p, tables.chosen_EW[a], FULL)
    _count(tables, q, tables.chosen_EW[a], EMPTY)


def gpu_seconds(gpu_s_GE: FloatArray, gpu_E: IntArray) -> FloatArray:
    """Returns (G,) the seconds of the experts on each GPU.

    Args:
        gpu_s_GE: (G, E) seconds of each expert on each GPU.
        gpu_E: (E,) int64, the GPU of each expert.
    """
    return np.bincount(gpu_E, gpu_s_GE[gpu_E, np.arange(len(gpu_E))], len(gpu_s_GE)).astype(np.float64)


def _level(limits: Limits, gpu_E: IntArray) -> None:
    """Swaps and moves experts between the GPUs of each server as long as that shortens its fullest GPU; changes gpu_E."""
    part_GX = np.pad(limits.gpu_s_GE, ((0, 0), (0, 1)))  # the last is of an empty slot
    gpu_s_G = limits.beside_s_G + gpu_seconds(limits.gpu_s_GE, gpu_E)
    slots_G = np.minimum(limits.slots_G, len(gpu_E))
    held_GP = np.full((len(slots_G), slots_G.max()), NONE)
    for gpu, held_P in enumerate(held_GP):
        own_E = np.flatnonzero(gpu_E == gpu)
        held_P[: len(own_E)] = own_E
    for server in range(len(limits.server_s_NE)):
        gpu_X = np.flatnonzero(limits.server_G == server)
        held_XP = held_GP[gpu_X]
        swap_descent(part_GX[gpu_X], slots_G[gpu_X], held_XP, gpu_s_G[gpu_X], 0.0)
        at_X, slot_X = np.nonzero(held_XP != NONE)
        gpu_E[held_XP[at_X, slot_X]] = gpu_X[at_X]
