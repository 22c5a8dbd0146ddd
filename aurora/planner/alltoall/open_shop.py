"""One message a pair, one partner at a time, compiled: found in microseconds, into buffers that are allocated once.

Dense open shops, and rings for traffic that is nearly equal, where dense schedules are up to 15 % above the bound.

Without numba's JIT (NUMBA_DISABLE_JIT=1) the same code runs in plain Python, for debugging.
"""

import numpy as np
from numba import njit

from aurora.planner.alltoall.pairs import silent_pairs
from aurora.planner.network.lower_bounds import one_to_one_bound, pair_seconds
from aurora.types import Network, Order
from aurora.types.arrays import FloatArray, IntArray

MOST_CUTS = 4
NO_CUT_C2: IntArray = np.zeros((0, 2), dtype=np.int64)
NO_PART_S_C2: FloatArray = np.zeros((0, 2))
DE_BRUIJN = 0x077CB531  # times a power of two below 2^32: bits 27 to 31 differ for each
PLACE = np.zeros(32, dtype=np.int64)
PLACE[[((DE_BRUIJN << bit) >> 27) & 31 for bit in range(32)]] = np.arange(32)
SMALL = 12  # ranks; below this one priority alone can be far from the bound, and trying more is cheap
SMALL_TRIES = 64
AMPLITUDES = (0.1, 0.3, 1.0)  # of drawn priorities, as shares of the bound, in turn


def openshop(bytes_GG: IntArray, network: Network, *, rng: np.random.Generator, shop: "DenseShop | None" = None) -> Order:
    """Dense open shop, no splits, no barriers: when a sender and a receiver are both free and have traffic, it starts.

    Of the ports that become free the one with the largest remaining load chooses first, and takes the free partner with the
    largest. Below SMALL ranks SMALL_TRIES further priorities are drawn and the shortest schedule is kept. One message a pair,
    one partner at a time. Makespan below twice the one-to-one bound, as of any dense schedule. shop: buffers to work in, for
    who orders every batch. Source: Gonzalez & Sahni 1976.
    """
    n = len(bytes_GG)
    shop = DenseShop(n) if shop is None else shop
    tries = SMALL_TRIES if n < SMALL else 0
    shop.search(pair_seconds(bytes_GG, network), tries, one_to_one_bound(bytes_GG, network) * (1 + 1e-12), rng)
    planned_X2 = np.stack([shop.src_X[: shop.count], shop.dst_X[: shop.count]], axis=1)
    return Order("openshop", np.concatenate([planned_X2, silent_pairs(bytes_GG)]))


class DenseShop:
    """Dense open-shop schedules of `ranks` senders and receivers. One thread at a time.

    A schedule is dense when no sender and receiver that still have something for each other are ever both free. After `run`,
    `ring` or `search` the rows [:count] of src_X, dst_X (int64), start_s_X and end_s_X (float64) are the transfers by start.
    """

    def __init__(self, ranks: int) -> None:
        rows = ranks * ranks + MOST_CUTS
        words = (ranks + 31) // 32
        self.ranks = ranks
        self.count = 0
        self.src_X: IntArray = np.zeros(rows, dtype=np.int64)
        self.dst_X: IntArray = np.zeros(rows, dtype=np.int64)
        self.start_s_X: FloatArray = np.zeros(rows)
        self.end_s_X: FloatArray = np.zeros(rows)
        self._plain, self._drawn, self._best = np.zeros((3, 2 * ranks))
        self._seats = np.arange(ranks)
        self._scratch = (
            np.zeros(2 * ranks),  # remaining load of each port, senders first
            np.zeros(2 * ranks, dtype=np.int64),  # transfers left on each port
            np.zeros((2 * ranks, words), dtype=np.int64),  # whom a port waits for
            np.zeros((2, words), dtype=np.int64),  # free senders, free receivers
            np.zeros(2 * ranks + 2),  # heap of ends, infinite beyond the last
            np.zeros(2 * ranks + 2, dtype=np.int64),  # and of the rows that end
            np.zeros(2 * ranks, dtype=np.int64),  # ports that have just become free
            np.zeros(MOST_CUTS, dtype=np.int64),  # parts of each cut that have begun
        )

    @property
    def buffer_bytes(self) -> int:
        """What it holds in memory."""
        outputs = (self.src_X, self.dst_X, self.start_s_X, self.end_s_X)
        return sum(array.nbytes for array in (*outputs, *self._scratch, self._plain, self._drawn, self._best))

    def run(
        self,
        seconds_GG: FloatArray,
        favour: FloatArray | None = None,
        cut_C2: IntArray = NO_CUT_C2,
        part_s_C2: FloatArray = NO_PART_S_C2,
    ) -> float:
        """The makespan in seconds of the schedule that serves the port with the largest remaining load first.

        seconds_GG (ranks, ranks) float64: how long each transfer takes alone; zero means none. favour (2 ranks,) seconds:
        added to the load of each port, senders first. cut_C2 (C, 2) int64: up to MOST_CUTS pairs that go in two parts, not at
        once, of part_s_C2 (C, 2) seconds.
        """
        favour = self._plain if favour is None else favour
        outputs = (self.src_X, self.dst_X, self.start_s_X, self.end_s_X)
        self.count, makespan_s = _dense(seconds_GG, favour, cut_C2, part_s_C2, *outputs, *self._scratch)
        return float(makespan_s)

    def ring(self, seconds_GG: FloatArray, seat_G: IntArray) -> float:
        """The makespan when ranks sit in a ring as seat_G (ranks,) says, and send to the next, then the next but one, ...

        No barriers between the steps: a transfer starts when both of its ports are through with their last.
        """
        outputs = (self.src_X, self.dst_X, self.start_s_X, self.end_s_X)
        self.count, makespan_s = _ring(seconds_GG, seat_G, *outputs, self._scratch[0])
        by_start = np.argsort(self.start_s_X[: self.count], kind="stable")
        for column in outputs:
            column[: self.count] = column[by_start]
        return float(makespan_s)

    def search(self, seconds_GG: FloatArray, tries: int, bound_s: float, rng: np.random.Generator) -> float:
        """The shortest of `run`, `ring` and as many of both with drawn priorities and seats; stops at bound_s.

        Deterministic for rng.
        """
        makespan_s = found_s = self.run(seconds_GG)
        best, ring = self._plain, self._seats
        ring_s = _ring_seconds(seconds_GG, ring, self._scratch[0])
        for number in range(tries):
            if min(makespan_s, ring_s) <= bound_s:
                break
            amplitude_s = AMPLITUDES[number % len(AMPLITUDES)] * bound_s
            self._drawn[:] = (rng.random(2 * self.ranks) - 0.5) * amplitude_s
            drawn_s = found_s = self.run(seconds_GG, self._drawn)
            if drawn_s < makespan_s:
                self._best, self._drawn = self._drawn, self._best
                makespan_s, best = drawn_s, self._best
            seats = rng.permutation(self.ranks)
            drawn_s = _ring_seconds(seconds_GG, seats, self._scratch[0])
            if drawn_s < ring_s:
                ring_s, ring = drawn_s, seats
        if ring_s < makespan_s:
            return self.ring(seconds_GG, ring)
        return found_s if found_s == makespan_s else self.run(seconds_GG, best)


FAST = {"nnan", "nsz"}  # infinities stay


@njit(cache=True, fastmath=FAST)
def _dense(
    seconds_GG, favour, cut_C2, part_s_C2, src_X, dst_X, start_X, end_X,
    load_s, todo, waits, free, heap_s, heap_p, fresh, begun_C,
):  # fmt: skip
    """Whenever ports become free, the busiest of them first takes its busiest free partner. Gives (transfers, makespan).

    Only pairs with a port that has just become free need a look: of two that have both been free for a while nothing waits.
    Ports are numbered senders first; favour is added to a port's load. What follows it are DenseShop's buffers. Sets of
    partners are bits, 32 to a word, so that a look for a partner touches only those who are free and wait. The steps take
    arrays one by one: taking one out of a tuple counts a reference, which in all made a schedule a third slower.
    """
    n = seconds_GG.shape[0]
    _load(seconds_GG, favour, load_s, todo, waits)
    _load_cuts(seconds_GG, cut_C2, part_s_C2, begun_C, load_s, todo)
    arrivals = _free_all(todo, free, fresh)
    heap_s[:] = np.inf
    through = False  # whether the heap's first has ended and makes room
    flying = done = 0
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
            took = _part(seconds_GG, cut_C2, part_s_C2, begun_C, src, dst)
            load_s[src] -= took
            load_s[n + dst] -= took
            todo[src] -= 1
            todo[n + dst] -= 1
            end = now + took
            src_X[done], dst_X[done], start_X[done], end_X[done] = src, dst, now, end
            done += 1
            if through:
                _sink(heap_s, heap_p, end, src << 32 | dst)
                through = False
            else:
                _rise(heap_s, heap_p, flying, end, src << 32 | dst)
                flying += 1
        if through:
            flying -= 1
            _drop(heap_s, heap_p, flying)
        if flying == 0:
            return done, now
        now = heap_s[0]
        arrivals = 0
        through = False
        while not through:
            src, dst = heap_p[0] >> 32, heap_p[0] & 0xFFFFFFFF
            _wait_again(cut_C2, begun_C, waits, src, dst, n)
            arrivals = _free_ends(todo, free, fresh, arrivals, src, dst, n)
            through = min(heap_s[1], heap_s[2]) > now
            if not through:
                flying -= 1
                _drop(heap_s, heap_p, flying)


@njit(cache=True, inline="always", fastmath=FAST)
def _load(seconds_GG, favour, load_s, todo, waits):
    """Every transfer waits at both of its ports."""
    n = seconds_GG.shape[0]
    for port in range(2 * n):
        load_s[port] = favour[port]
        todo[port] = 0
        for word in range(waits.shape[1]):
            waits[port, word] = 0
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


@njit(cache=True, inline="always", fastmath=FAST)
def _load_cuts(seconds_GG, cut_C2, part_s_C2, begun_C, load_s, todo):
    """A pair that is cut has one transfer more, and takes as long as both of its parts."""
    n = seconds_GG.shape[0]
    for cut in range(len(cut_C2)):
        i, j = cut_C2[cut]
        longer = part_s_C2[cut, 0] + part_s_C2[cut, 1] - seconds_GG[i, j]
        load_s[i] += longer
        load_s[n + j] += longer
        todo[i] += 1
        todo[n + j] += 1
        begun_C[cut] = 0


@njit(cache=True, inline="always")
def _free_all(todo, free, fresh):
    """Into `free` and `fresh`: all ports that have something to do; gives how many."""
    n = todo.shape[0] // 2
    for word in range(free.shape[1]):
        free[0, word] = 0
        free[1, word] = 0
    arrivals = 0
    for port in range(2 * n):
        if todo[port] > 0:
            side = port // n
            i = port - side * n
            free[side, i >> 5] |= 1 << (i & 31)
            fresh[arrivals] = port
            arrivals += 1
    return arrivals


@njit(cache=True, inline="always", fastmath=FAST)
def _busiest_first(load_s, fresh, arrivals):
    """Insertion sort for the few of an event, a real sort for the many at the start."""
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
    """The free partner for which the port waits that has the largest load; -1 where there is none or the port is busy."""
    side = 1 if port >= n else 0
    i = port - side * n
    partner = -1
    if free[side, i >> 5] >> (i & 31) & 1 != 0:
        most = -np.inf
        others = n - side * n
        for word in range(free.shape[1]):
            found = waits[port, word] & free[1 - side, word]
            while found != 0:
                lowest = found & -found
                other = (word << 5) + PLACE[(lowest * DE_BRUIJN >> 27) & 31]
                load = load_s[others + other]
                partner = other if load > most else partner
                most = max(load, most)
                found ^= lowest
    return partner


@njit(cache=True, inline="always")
def _flip(waits, free, src, dst, n):
    """Both were free and waited for each other, and do so no more."""
    free[0, src >> 5] ^= 1 << (src & 31)
    free[1, dst >> 5] ^= 1 << (dst & 31)
    waits[src, dst >> 5] ^= 1 << (dst & 31)
    waits[n + dst, src >> 5] ^= 1 << (src & 31)


@njit(cache=True, inline="always")
def _part(seconds_GG, cut_C2, part_s_C2, begun_C, src, dst):
    """How long the pair's transfer takes, or its next part, which begins."""
    took = seconds_GG[src, dst]
    for cut in range(len(cut_C2)):
        if cut_C2[cut, 0] == src and cut_C2[cut, 1] == dst:
            took = part_s_C2[cut, begun_C[cut]]
            begun_C[cut] += 1
    return took


@njit(cache=True, inline="always")
def _wait_again(cut_C2, begun_C, waits, src, dst, n):
    """Where the first of two parts has ended, both ports wait for the second."""
    for cut in range(len(cut_C2)):
        if cut_C2[cut, 0] == src and cut_C2[cut, 1] == dst and begun_C[cut] == 1:
            waits[src, dst >> 5] |= 1 << (dst & 31)
            waits[n + dst, src >> 5] |= 1 << (src & 31)


@njit(cache=True, inline="always")
def _free_ends(todo, free, fresh, arrivals, src, dst, n):
    """Both ports are free again, where they have more to do; gives how many ports are fresh now."""
    if todo[src] > 0:
        free[0, src >> 5] |= 1 << (src & 31)
        fresh[arrivals] = src
        arrivals += 1
    if todo[n + dst] > 0:
        free[1, dst >> 5] |= 1 << (dst & 31)
        fresh[arrivals] = n + dst
        arrivals += 1
    return arrivals


# Not max_min_fair's heap: that one finds rows by number to move them when their rate changes, for a table of places that this
# one, which only ever takes its first away, would have to keep up to date.
@njit(cache=True)
def _sink(heap_s, heap_p, end, row):
    """Puts (end, row) in the place of the heap's first."""
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
    """Adds (end, row) to a heap of `at`."""
    while at > 0 and heap_s[(at - 1) >> 1] > end:
        heap_s[at] = heap_s[(at - 1) >> 1]
        heap_p[at] = heap_p[(at - 1) >> 1]
        at = (at - 1) >> 1
    heap_s[at] = end
    heap_p[at] = row


@njit(cache=True)
def _drop(heap_s, heap_p, last):
    """Takes away the heap's first; `last` is the place of its last."""
    end = heap_s[last]
    heap_s[last] = np.inf
    if last > 0:
        _sink(heap_s, heap_p, end, heap_p[last])


@njit(cache=True)
def _ring(seconds_GG, seat_G, src_X, dst_X, start_X, end_X, free_s):
    """Step by step around the ring, each transfer as early as its ports allow. Gives (transfers, makespan)."""
    n = seconds_GG.shape[0]
    free_s[:] = 0.0
    done = 0
    makespan_s = 0.0
    for step in range(1, n):
        for at in range(n):
            src, dst = seat_G[at], seat_G[(at + step) % n]
            if seconds_GG[src, dst] > 0.0:
                src_X[done] = src
                dst_X[done] = dst
                start_X[done] = max(free_s[src], free_s[n + dst])
                end_X[done] = start_X[done] + seconds_GG[src, dst]
                free_s[src] = free_s[n + dst] = end_X[done]
                makespan_s = max(makespan_s, end_X[done])
                done += 1
    return done, makespan_s


@njit(cache=True)
def _ring_seconds(seconds_GG, seat_G, free_s):
    """The makespan of `_ring` alone, for the search."""
    n = seconds_GG.shape[0]
    free_s[:] = 0.0
    makespan_s = 0.0
    for step in range(1, n):
        for at in range(n):
            src, dst = seat_G[at], seat_G[(at + step) % n]
            took = seconds_GG[src, dst]
            if took > 0.0:
                end_s = max(free_s[src], free_s[n + dst]) + took
                free_s[src] = free_s[n + dst] = end_s
                makespan_s = max(makespan_s, end_s)
    return makespan_s
