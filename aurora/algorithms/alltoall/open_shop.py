"""Dense open-shop schedules: one message per pair, one partner per port at a time, computed in microseconds. Compiled.

A schedule is dense if it never leaves both a sender and a receiver free while the sender has traffic for the receiver. For
nearly equal traffic, where dense schedules are up to 15 % above the bound, ring schedules are tried too. Without numba's JIT
(NUMBA_DISABLE_JIT=1) the same code runs in plain Python, for debugging.
"""

from typing import NamedTuple

import numpy as np

from aurora.algorithms.network.port_bounds import longest_port, pair_seconds
from aurora.types import Network, Order
from aurora.types.arrays import FloatArray, IntArray, locked
from aurora.types.compiled import njit


def all_pairs(ranks: int) -> IntArray:
    """Returns (X, 2) int64, every pair (source, destination) of different ranks, sorted by source."""
    return np.argwhere(~np.eye(ranks, dtype=np.bool_))


def with_silent_pairs(pairs_X2: IntArray, bytes_GG: IntArray) -> IntArray:
    """Returns the rows pairs_X2 (X, 2), followed by every pair that has no bytes in bytes_GG (G, G).

    An order needs all pairs, because other batches may have bytes for them.
    """
    if np.count_nonzero(bytes_GG) < len(bytes_GG) * (len(bytes_GG) - 1):
        pairs_X2 = _with_silent_pairs(np.ascontiguousarray(pairs_X2), np.ascontiguousarray(bytes_GG))
    return pairs_X2


@njit(cache=True)
def _with_silent_pairs(pairs_X2, bytes_GG):
    """See `with_silent_pairs`; each layout of memory would be compiled anew."""
    n, at = len(bytes_GG), len(pairs_X2)
    rows_X2 = np.empty((at + n * n, 2), np.int64)
    rows_X2[:at] = pairs_X2
    for src in range(n):
        for dst in range(n):
            if bytes_GG[src, dst] == 0 and src != dst:
                rows_X2[at] = src, dst
                at += 1
    return rows_X2[:at]


MOST_CUTS = 4
NO_CUTS: FloatArray = locked(np.zeros((0, 4)))
DE_BRUIJN = 0x077CB531  # times a power of two below 2^32: bits 27 to 31 differ for each
BIT_INDEX = np.zeros(32, dtype=np.int64)
BIT_INDEX[[((DE_BRUIJN << bit) >> 27) & 31 for bit in range(32)]] = np.arange(32)
SMALL = 12  # ranks; below this, a single priority can be far from the bound, and trying more is cheap
SMALL_TRIES = 90
DRAWS = 15  # tries that are drawn at once
HOPELESS = 1.1  # dense schedules or rings are not drawn if the plain one is longer than the best schedule by this factor
RELIEFS = 30  # schedules that `relieved` makes
RELIEF = 0.3  # of a port's seconds beyond the bound, which are added to its priority
AMPLITUDES = (0.1, 0.3, 1.0)  # of drawn priorities, as shares of the bound, in turn
FAST = {"nnan", "nsz"}  # infinities keep their meaning


class DenseSchedule(NamedTuple):
    """A schedule in which each port serves one partner at a time; its rows are sorted by start."""

    pairs_X2: IntArray  # (source, destination)
    span_s_X2: FloatArray  # start and end in seconds
    makespan_s: float


def openshop(bytes_GG: IntArray, network: Network, *, rng: np.random.Generator) -> Order:
    """Dense open shop: starts a transfer whenever a sender and a receiver are both free and have traffic for each other.

    Each pair has one message and each rank one partner at a time, without splits or barriers. Of the ports that become free,
    the one with the largest remaining load chooses first, and takes the free partner with the largest remaining load. Below
    SMALL ranks, up to SMALL_TRIES further priorities are drawn at random, and the shortest schedule is kept. Like any dense
    schedule it is shorter than twice the one-to-one bound.

    Args: as in `registry.OrderStrategy`.

    Source: Gonzalez & Sahni 1976.
    """
    seconds_GG = pair_seconds(bytes_GG, network)
    schedule = search(seconds_GG, SMALL_TRIES if len(bytes_GG) < SMALL else 0, longest_port(seconds_GG) * (1 + 1e-12), rng)
    return Order("openshop", locked(with_silent_pairs(schedule.pairs_X2, bytes_GG)))


def search(
    seconds_GG: FloatArray, tries: int, bound_s: float, rng: np.random.Generator, known: DenseSchedule | None = None
) -> DenseSchedule:
    """Searches dense schedules, rings and `known` for the shortest, and returns it; stops at one that takes only bound_s.

    Deterministic for the state of rng.

    Args:
        seconds_GG: (G, G) float64, seconds of each transfer if it is alone; zero for no transfer.
        tries: number of random priorities to try after the rule "largest load first"; also number of random rings.
        bound_s: a lower bound on the makespan, in seconds.
        rng: draws priorities and rings.
        known: a schedule to beat; None: there is none.
    """
    pairs_X2, span_s_X2, dense_s, ring_s = _plain(seconds_GG)
    best = DenseSchedule(pairs_X2, span_s_X2, min(dense_s, ring_s))
    if known is not None and known.makespan_s < best.makespan_s:
        best = known
    while tries > 0 and best.makespan_s > bound_s:
        draws_M3G = rng.random((min(tries, DRAWS), 3 * len(seconds_GG)))
        drawn = DenseSchedule(*_drawn(seconds_GG, draws_M3G, bound_s, best.makespan_s, dense_s, ring_s))
        best = min(best, drawn, key=lambda schedule: schedule.makespan_s)
        tries -= DRAWS
    return best


def relieved(seconds_GG: FloatArray, bound_s: float, known: DenseSchedule) -> DenseSchedule:
    """Searches dense schedules by squeaky-wheel optimisation; returns the shortest, or `known` if none is shorter.

    Each schedule gives a higher priority to the ports that ended late in the schedules before it.

    Args: as in `search`.

    Source: Joslin & Clements, "Squeaky wheel optimization", JAIR 10 (1999).
    """
    return min(known, DenseSchedule(*_relieved(seconds_GG, bound_s)), key=lambda schedule: schedule.makespan_s)


@njit(cache=True, nogil=True)
def _relieved(seconds_GG, bound_s):
    """The fields of the shortest DenseSchedule."""
    n = seconds_GG.shape[0]
    bias_s, end_s = np.zeros((2, 2 * n))
    best = dense(seconds_GG, bias_s, NO_CUTS, np.inf)
    for _ in range(RELIEFS):
        schedule = dense(seconds_GG, bias_s, NO_CUTS, np.inf)
        if schedule[2] < best[2]:
            best = schedule
        for row in range(len(schedule[0])):  # by start, and so by end at each port
            end_s[schedule[0][row, 0]] = end_s[n + schedule[0][row, 1]] = schedule[1][row, 1]
        bias_s += RELIEF * np.maximum(end_s - bound_s, 0.0)
    return best


@njit(cache=True, nogil=True)
def _plain(seconds_GG):
    """The shorter of the dense schedule and the ring that need no draws: its rows by start, and both makespans."""
    n = seconds_GG.shape[0]
    pairs_X2, span_s_X2, dense_s = dense(seconds_GG, np.zeros(2 * n), NO_CUTS, np.inf)
    around = ring(seconds_GG, np.arange(n), np.inf)
    if around[2] < dense_s:
        pairs_X2, span_s_X2, _ = _by_start(around)
    return pairs_X2, span_s_X2, dense_s, around[2]


@njit(cache=True, nogil=True)
def _drawn(seconds_GG, draws_M3G, bound_s, best_s, dense_s, ring_s):
    """The last of the drawn schedules that are shorter than best_s and all before them; infinitely long if there is none.

    Dense schedules are drawn unless the plain one was longer than best_s by HOPELESS, and rings likewise. A draw has a priority
    for each port and a number for each rank, by which rings are sorted.
    """
    n = seconds_GG.shape[0]
    first_s = best_s
    best = np.empty((0, 2), np.int64), np.empty((0, 2)), np.inf
    for number in range(len(draws_M3G)):
        if best_s <= bound_s:
            break
        draw_3G = draws_M3G[number]
        if dense_s <= first_s * HOPELESS:
            bias_s = (draw_3G[: 2 * n] - 0.5) * (AMPLITUDES[number % len(AMPLITUDES)] * bound_s)
            schedule = dense(seconds_GG, bias_s, NO_CUTS, best_s)
            if schedule[2] < best_s:
                best, best_s = schedule, schedule[2]
        if ring_s <= first_s * HOPELESS:
            schedule = ring(seconds_GG, np.argsort(draw_3G[2 * n :]), best_s)
            if schedule[2] < best_s:
                best, best_s = _by_start(schedule), schedule[2]
    return best


@njit(cache=True)
def _by_start(schedule):
    """The same schedule with its rows by start."""
    pairs_X2, span_s_X2, makespan_s = schedule
    by_start = np.argsort(span_s_X2[:, 0], kind="mergesort")
    return pairs_X2[by_start], span_s_X2[by_start], makespan_s


@njit(cache=True, nogil=True, fastmath=FAST)
def dense(seconds_GG, bias_s, cut_C4, limit_s):
    """Makes a dense schedule: of ports that become free, the one with most remaining load first takes its busiest free partner.

    Only pairs with a port that has just become free are examined: two ports that were both free before have no traffic for each
    other. Ports are numbered senders first. Sets of partners are bits, 32 to a word, so that the search for a partner touches
    only ports that are free and have traffic for this one.

    Args:
        seconds_GG: (G, G) float64, as in `search`.
        bias_s: (2 G,) float64, seconds added to the load of each port, which change the priorities; senders first.
        cut_C4: (C, 4) float64, up to MOST_CUTS transfers that are sent in two parts: source, destination, and the seconds of
            the first and of the second part.
        limit_s: the schedule is given up as soon as a port cannot end before limit_s; infinite: never.

    Returns:
        The fields of a DenseSchedule; the makespan is infinite if the schedule was given up.
    """
    n = seconds_GG.shape[0]
    load_s, todo, waits = _loads(seconds_GG, bias_s)
    begun_C = _add_cuts(seconds_GG, cut_C4, load_s, todo)
    free, fresh = np.zeros((2, waits.shape[1]), np.int64), np.zeros(2 * n, np.int64)  # free ports as bits; those just freed
    arrivals = 0
    for side in range(2):
        for i in range(n):
            arrivals = _release(side, i, n, todo, free, fresh, arrivals)
    heap_s, heap_p = np.full(2 * n + 2, np.inf), np.zeros(2 * n + 2, np.int64)  # ends, infinite beyond the last; their pairs
    pairs_X2, span_s_X2 = np.empty((todo.sum() // 2, 2), np.int64), np.empty((todo.sum() // 2, 2))
    ended = False  # whether the heap's first transfer has ended and may be replaced
    in_flight = row = 0
    now = 0.0
    while True:
        _busiest_first(load_s, fresh, arrivals)
        for k in range(arrivals):
            port = fresh[k]
            partner = _busiest_partner(load_s, waits, free, port, n)
            if partner < 0:
                continue
            src, dst = (port, partner) if port < n else (partner, port - n)
            _flip(waits, free, src, dst, n)
            took = _part(seconds_GG, cut_C4, begun_C, src, dst)
            load_s[src] -= took
            load_s[n + dst] -= took
            todo[src] -= 1
            todo[n + dst] -= 1
            end = now + took
            if end + max(load_s[src] - bias_s[src], load_s[n + dst] - bias_s[n + dst]) >= limit_s:
                return pairs_X2, span_s_X2, np.inf
            pairs_X2[row, 0], pairs_X2[row, 1], span_s_X2[row, 0], span_s_X2[row, 1] = src, dst, now, end
            row += 1
            if ended:
                _sink(heap_s, heap_p, end, src << 32 | dst)
                ended = False
            else:
                _rise(heap_s, heap_p, in_flight, end, src << 32 | dst)
                in_flight += 1
        if ended:
            in_flight -= 1
            _drop(heap_s, heap_p, in_flight)
        if in_flight == 0:
            return pairs_X2, span_s_X2, now
        now = heap_s[0]
        arrivals = 0
        ended = False
        while not ended:
            src, dst = heap_p[0] >> 32, heap_p[0] & 0xFFFFFFFF
            _wait_again(cut_C4, begun_C, waits, src, dst, n)
            arrivals = _release(0, src, n, todo, free, fresh, arrivals)
            arrivals = _release(1, dst, n, todo, free, fresh, arrivals)
            ended = min(heap_s[1], heap_s[2]) > now
            if not ended:
                in_flight -= 1
                _drop(heap_s, heap_p, in_flight)


@njit(cache=True, inline="always", fastmath=FAST)
def _loads(seconds_GG, bias_s):
    """The load of each port, how many transfers it has left, and the partners that it has yet to serve, as bits."""
    n = seconds_GG.shape[0]
    load_s = bias_s.copy()
    todo = np.zeros(2 * n, np.int64)
    waits = np.zeros((2 * n, (n + 31) // 32), np.int64)
    for i in range(n):
        for j in range(n):
            took = seconds_GG[i, j]
            if took > 0.0:
                waits[i, j >> 5] |= 1 << (j & 31)
                waits[n + j, i >> 5] |= 1 << (i & 31)
                load_s[i] += took
                load_s[n + j] += took
                todo[i] += 1
                todo[n + j] += 1
    return load_s, todo, waits


@njit(cache=True, inline="always", fastmath=FAST)
def _add_cuts(seconds_GG, cut_C4, load_s, todo):
    """Adds the second transfer of each pair that is cut, and the time that its two parts take longer than the whole.

    Returns how many parts of each cut have begun: none.
    """
    n = seconds_GG.shape[0]
    for cut in range(len(cut_C4)):
        i, j = int(cut_C4[cut, 0]), int(cut_C4[cut, 1])
        for port in (i, n + j):
            load_s[port] += cut_C4[cut, 2] + cut_C4[cut, 3] - seconds_GG[i, j]
            todo[port] += 1
    return np.zeros(len(cut_C4), np.int64)


@njit(cache=True, inline="always")
def _release(side, i, n, todo, free, fresh, arrivals):
    """Frees port i of a side (0: senders, 1: receivers) that has more to do; returns how many ports are fresh now."""
    if todo[side * n + i] > 0:
        free[side, i >> 5] |= 1 << (i & 31)
        fresh[arrivals] = side * n + i
        arrivals += 1
    return arrivals


@njit(cache=True, inline="always", fastmath=FAST)
def _busiest_first(load_s, fresh, arrivals):
    """Sorts the fresh ports by load: insertion sort for the few of an event, a library sort for the many at the start."""
    if arrivals > 32:
        fresh[:arrivals] = fresh[:arrivals][np.argsort(-load_s[fresh[:arrivals]], kind="mergesort")]
    else:
        for k in range(1, arrivals):
            port = fresh[k]
            at = k - 1
            while at >= 0 and load_s[fresh[at]] < load_s[port]:
                fresh[at + 1] = fresh[at]
                at -= 1
            fresh[at + 1] = port


@njit(cache=True, inline="always", fastmath=FAST)
def _busiest_partner(load_s, waits, free, port, n):
    """The free partner of a port with the largest load; -1 if there is none or the port is busy."""
    side = 1 if port >= n else 0
    i = port - side * n
    partner = -1
    if free[side, i >> 5] >> (i & 31) & 1 != 0:
        most = -np.inf
        others = n - side * n
        for word in range(free.shape[1]):
            bits = waits[port, word] & free[1 - side, word]
            while bits != 0:
                lowest = bits & -bits
                other = (word << 5) + BIT_INDEX[(lowest * DE_BRUIJN >> 27) & 31]
                load = load_s[others + other]
                partner = other if load > most else partner
                most = max(load, most)
                bits ^= lowest
    return partner


@njit(cache=True, inline="always")
def _flip(waits, free, src, dst, n):
    """Marks both ports as busy, and each as no longer a partner of the other."""
    free[0, src >> 5] ^= 1 << (src & 31)
    free[1, dst >> 5] ^= 1 << (dst & 31)
    waits[src, dst >> 5] ^= 1 << (dst & 31)
    waits[n + dst, src >> 5] ^= 1 << (src & 31)


@njit(cache=True, inline="always")
def _part(seconds_GG, cut_C4, begun_C, src, dst):
    """The duration of the pair's transfer, or of its next part, which begins now."""
    took = seconds_GG[src, dst]
    for cut in range(len(cut_C4)):
        if cut_C4[cut, 0] == src and cut_C4[cut, 1] == dst:
            took = cut_C4[cut, 2 + begun_C[cut]]
            begun_C[cut] += 1
    return took


@njit(cache=True, inline="always")
def _wait_again(cut_C4, begun_C, waits, src, dst, n):
    """If the first of two parts has ended, make both ports partners again for the second."""
    for cut in range(len(cut_C4)):
        if cut_C4[cut, 0] == src and cut_C4[cut, 1] == dst and begun_C[cut] == 1:
            waits[src, dst >> 5] |= 1 << (dst & 31)
            waits[n + dst, src >> 5] |= 1 << (src & 31)


# max_min_fair has another heap: it keeps the index of each row, so that a row can move when its rate changes. This heap
# only ever removes its first entry and need not keep such a table. heapq on tuples takes a quarter longer at 8 ranks, and twice
# as long at 64.
@njit(cache=True)
def _sink(heap_s, heap_p, end, row):
    """Replaces the heap's first entry by (end, row)."""
    at = 0
    child = 1
    while child < heap_s.shape[0]:
        child += heap_s[child + 1] < heap_s[child]
        if heap_s[child] >= end:
            break
        heap_s[at] = heap_s[child]
        heap_p[at] = heap_p[child]
        at = child
        child = 2 * at + 1
    heap_s[at] = end
    heap_p[at] = row


@njit(cache=True)
def _rise(heap_s, heap_p, at, end, row):
    """Adds (end, row) to a heap of `at` entries."""
    while at > 0 and heap_s[(at - 1) >> 1] > end:
        heap_s[at] = heap_s[(at - 1) >> 1]
        heap_p[at] = heap_p[(at - 1) >> 1]
        at = (at - 1) >> 1
    heap_s[at] = end
    heap_p[at] = row


@njit(cache=True)
def _drop(heap_s, heap_p, last):
    """Removes the heap's first entry; `last` is the index of its last."""
    end = heap_s[last]
    heap_s[last] = np.inf
    if last > 0:
        _sink(heap_s, heap_p, end, heap_p[last])


@njit(cache=True)
def ring(seconds_GG, ring_G, limit_s):
    """Makes a ring schedule: the i-th rank of the ring sends to the ranks i + 1, i + 2, ... of it, in this sequence.

    There are no barriers between the steps: a transfer starts when both of its ports have ended their previous transfer.

    Args:
        seconds_GG: (G, G) float64, as in `search`.
        ring_G: (G,) int64, the ranks in the sequence of the ring.
        limit_s: the schedule is given up once a port is busy until limit_s.

    Returns:
        The fields of a DenseSchedule, with rows sorted by step; the makespan is infinite if the schedule was given up.
    """
    n = seconds_GG.shape[0]
    free_s = np.zeros(2 * n)
    pairs_X2, span_s_X2 = np.empty((n * n, 2), np.int64), np.empty((n * n, 2))
    row = 0
    for step in range(1, n):
        for at in range(n):
            src, dst = ring_G[at], ring_G[(at + step) % n]
            if seconds_GG[src, dst] > 0.0:
                start_s = max(free_s[src], free_s[n + dst])
                free_s[src] = free_s[n + dst] = start_s + seconds_GG[src, dst]
                pairs_X2[row, 0], pairs_X2[row, 1] = src, dst
                span_s_X2[row, 0], span_s_X2[row, 1] = start_s, free_s[src]
                row += 1
                if free_s[src] >= limit_s:
                    return pairs_X2, span_s_X2, np.inf
    return pairs_X2[:row], span_s_X2[:row], free_s.max() if n else 0.0
