"""Dense open-shop schedules: one message a pair, one partner at a time, found in microseconds. Compiled; buffers are reused.

For traffic that is nearly equal, where dense schedules are up to 15 % above the bound, ring schedules are tried too. Without
numba's JIT (NUMBA_DISABLE_JIT=1) the same code runs in plain Python, for debugging.
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
BIT_INDEX = np.zeros(32, dtype=np.int64)
BIT_INDEX[[((DE_BRUIJN << bit) >> 27) & 31 for bit in range(32)]] = np.arange(32)
SMALL = 12  # ranks; below this, a single priority can be far from the bound, and trying more is cheap
SMALL_TRIES = 64
AMPLITUDES = (0.1, 0.3, 1.0)  # of drawn priorities, as shares of the bound, in turn


def openshop(bytes_GG: IntArray, network: Network, *, rng: np.random.Generator, shop: "DenseShop | None" = None) -> Order:
    """Dense open shop: whenever a sender and a receiver are both free and have traffic for each other, it starts.

    One message a pair, one partner at a time, no splits, no barriers. Of the ports that become free, the one with the largest
    remaining load chooses first, and takes the free partner with the largest remaining load. Below SMALL ranks, SMALL_TRIES
    further priorities are drawn and the shortest schedule is kept. Like any dense schedule it is shorter than twice the
    one-to-one bound.

    Args:
        bytes_GG: (G, G) int64 with a zero diagonal, bytes from each rank to each other.
        network: port rates and start-ups.
        rng: for the drawn priorities.
        shop: buffers of G ranks to work in, for callers that order every batch; None: new ones.

    Source: Gonzalez & Sahni 1976.
    """
    n = len(bytes_GG)
    shop = DenseShop(n) if shop is None else shop
    tries = SMALL_TRIES if n < SMALL else 0
    shop.search(pair_seconds(bytes_GG, network), tries, one_to_one_bound(bytes_GG, network) * (1 + 1e-12), rng)
    planned_X2 = np.stack([shop.src_X[: shop.count], shop.dst_X[: shop.count]], axis=1)
    return Order("openshop", np.concatenate([planned_X2, silent_pairs(bytes_GG)]))


class DenseShop:
    """Buffers for dense open-shop schedules of `ranks` senders and receivers. One thread at a time.

    A schedule is dense when no sender and receiver that still have something for each other are ever both free.

    Attributes:
        ranks: number of senders, and of receivers.
        count: number of transfers of the last schedule made by `run`, `ring` or `search`; only rows [:count] below are valid.
        src_X: int64, sending ranks, by start.
        dst_X: int64, receiving ranks.
        start_s_X: float64, starts in seconds.
        end_s_X: float64, ends in seconds.
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
        self._identity = np.arange(ranks)
        self._scratch = (
            np.zeros(2 * ranks),  # remaining load of each port, senders first
            np.zeros(2 * ranks, dtype=np.int64),  # transfers left on each port
            np.zeros((2 * ranks, words), dtype=np.int64),  # the partners that a port has yet to serve, as bits
            np.zeros((2, words), dtype=np.int64),  # free senders, free receivers
            np.zeros(2 * ranks + 2),  # heap of ends, infinite beyond the last
            np.zeros(2 * ranks + 2, dtype=np.int64),  # the pairs that end then
            np.zeros(2 * ranks, dtype=np.int64),  # ports that have just become free
            np.zeros(MOST_CUTS, dtype=np.int64),  # parts of each cut that have begun
        )

    @property
    def buffer_bytes(self) -> int:
        """Bytes of all buffers."""
        outputs = (self.src_X, self.dst_X, self.start_s_X, self.end_s_X)
        return sum(array.nbytes for array in (*outputs, *self._scratch, self._plain, self._drawn, self._best))

    def run(
        self,
        seconds_GG: FloatArray,
        bias_s: FloatArray | None = None,
        cut_C2: IntArray = NO_CUT_C2,
        part_s_C2: FloatArray = NO_PART_S_C2,
    ) -> float:
        """Makes the schedule that serves the port with the largest remaining load first.

        Args:
            seconds_GG: (ranks, ranks) float64, how long each transfer takes alone; zero if there is none.
            bias_s: (2 * ranks,) float64, seconds added to the load of each port, senders first; None: zeros.
            cut_C2: (C, 2) int64, up to MOST_CUTS pairs whose transfers go in two parts, one after the other.
            part_s_C2: (C, 2) float64, seconds of the two parts.

        Returns:
            The makespan in seconds.
        """
        bias_s = self._plain if bias_s is None else bias_s
        outputs = (self.src_X, self.dst_X, self.start_s_X, self.end_s_X)
        self.count, makespan_s = _dense(seconds_GG, bias_s, cut_C2, part_s_C2, *outputs, *self._scratch)
        return float(makespan_s)

    def ring(self, seconds_GG: FloatArray, ring_G: IntArray) -> float:
        """Makes a ring schedule: each rank sends to the next rank of the ring, then to the next but one, and so on.

        There are no barriers between the steps: a transfer starts when both of its ports have ended the one before.

        Args:
            seconds_GG: as in `run`.
            ring_G: (ranks,) int64, the ranks in the sequence of the ring.

        Returns:
            The makespan in seconds.
        """
        outputs = (self.src_X, self.dst_X, self.start_s_X, self.end_s_X)
        self.count, makespan_s = _ring(seconds_GG, ring_G, *outputs, self._scratch[0])
        by_start = np.argsort(self.start_s_X[: self.count], kind="stable")
        for column in outputs:
            column[: self.count] = column[by_start]
        return float(makespan_s)

    def search(self, seconds_GG: FloatArray, tries: int, bound_s: float, rng: np.random.Generator) -> float:
        """Makes the shortest schedule found among dense ones and rings; stops as soon as one meets bound_s.

        Deterministic for the state of rng.

        Args:
            seconds_GG: as in `run`.
            tries: number of drawn priorities to try after the plain ones, and number of drawn rings.
            bound_s: a lower bound on the makespan, in seconds.
            rng: draws priorities and rings.

        Returns:
            The makespan in seconds.
        """
        makespan_s = found_s = self.run(seconds_GG)
        best, ring = self._plain, self._identity
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
            drawn_ring = rng.permutation(self.ranks)
            drawn_s = _ring_seconds(seconds_GG, drawn_ring, self._scratch[0])
            if drawn_s < ring_s:
                ring_s, ring = drawn_s, drawn_ring
        if ring_s < makespan_s:
            return self.ring(seconds_GG, ring)
        return found_s if found_s == makespan_s else self.run(seconds_GG, best)


FAST = {"nnan", "nsz"}  # infinities keep their meaning


@njit(cache=True, fastmath=FAST)
def _dense(
    seconds_GG, bias_s, cut_C2, part_s_C2, src_X, dst_X, start_X, end_X,
    load_s, todo, waits, free, heap_s, heap_p, fresh, begun_C,
):  # fmt: skip
    """Whenever ports become free, the busiest of them first takes its busiest free partner; returns (transfers, makespan).

    Only pairs with a port that has just become free are looked at: two ports that have both been free for a while have nothing
    for each other. Ports are numbered senders first; bias_s is added to a port's load. The arguments after it are DenseShop's
    buffers. Sets of partners are bits, 32 to a word, so that the search for a partner touches only ports that are free and have
    traffic for this one. The steps take arrays one by one: taking an array out of a tuple counts a reference, which in all made
    a schedule a third slower.
    """
    n = seconds_GG.shape[0]
    _load(seconds_GG, bias_s, load_s, todo, waits)
    _load_cuts(seconds_GG, cut_C2, part_s_C2, begun_C, load_s, todo)
    arrivals = _free_all(todo, free, fresh)
    heap_s[:] = np.inf
    ended = False  # whether the heap's first transfer has ended and may be replaced
    in_flight = done = 0
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
            return done, now
        now = heap_s[0]
        arrivals = 0
        ended = False
        while not ended:
            src, dst = heap_p[0] >> 32, heap_p[0] & 0xFFFFFFFF
            _wait_again(cut_C2, begun_C, waits, src, dst, n)
            arrivals = _free_ends(todo, free, fresh, arrivals, src, dst, n)
            ended = min(heap_s[1], heap_s[2]) > now
            if not ended:
                in_flight -= 1
                _drop(heap_s, heap_p, in_flight)


@njit(cache=True, inline="always", fastmath=FAST)
def _load(seconds_GG, bias_s, load_s, todo, waits):
    """Sets up the load, the number of transfers and the partners of each port."""
    n = seconds_GG.shape[0]
    for port in range(2 * n):
        load_s[port] = bias_s[port]
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
    """Adds the second transfer of each pair that is cut, and the time that its two parts take longer than the whole."""
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
    """Writes all ports that have transfers to `free` and `fresh`; returns how many there are."""
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
            found = waits[port, word] & free[1 - side, word]
            while found != 0:
                lowest = found & -found
                other = (word << 5) + BIT_INDEX[(lowest * DE_BRUIJN >> 27) & 31]
                load = load_s[others + other]
                partner = other if load > most else partner
                most = max(load, most)
                found ^= lowest
    return partner


@njit(cache=True, inline="always")
def _flip(waits, free, src, dst, n):
    """Marks both ports as busy, and each as no longer a partner of the other."""
    free[0, src >> 5] ^= 1 << (src & 31)
    free[1, dst >> 5] ^= 1 << (dst & 31)
    waits[src, dst >> 5] ^= 1 << (dst & 31)
    waits[n + dst, src >> 5] ^= 1 << (src & 31)


@njit(cache=True, inline="always")
def _part(seconds_GG, cut_C2, part_s_C2, begun_C, src, dst):
    """The duration of the pair's transfer, or of its next part, which begins now."""
    took = seconds_GG[src, dst]
    for cut in range(len(cut_C2)):
        if cut_C2[cut, 0] == src and cut_C2[cut, 1] == dst:
            took = part_s_C2[cut, begun_C[cut]]
            begun_C[cut] += 1
    return took


@njit(cache=True, inline="always")
def _wait_again(cut_C2, begun_C, waits, src, dst, n):
    """If the first of two parts has ended, make both ports partners again for the second."""
    for cut in range(len(cut_C2)):
        if cut_C2[cut, 0] == src and cut_C2[cut, 1] == dst and begun_C[cut] == 1:
            waits[src, dst >> 5] |= 1 << (dst & 31)
            waits[n + dst, src >> 5] |= 1 << (src & 31)


@njit(cache=True, inline="always")
def _free_ends(todo, free, fresh, arrivals, src, dst, n):
    """Frees both ports that have more to do; returns how many ports are fresh now."""
    if todo[src] > 0:
        free[0, src >> 5] |= 1 << (src & 31)
        fresh[arrivals] = src
        arrivals += 1
    if todo[n + dst] > 0:
        free[1, dst >> 5] |= 1 << (dst & 31)
        fresh[arrivals] = n + dst
        arrivals += 1
    return arrivals


# max_min_fair has another heap: it keeps the index of each row, so that a row can move when its rate changes. This heap
# only ever removes its first entry and need not keep such a table.
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
def _ring(seconds_GG, ring_G, src_X, dst_X, start_X, end_X, free_s):
    """Times the ring step by step, each transfer as early as its ports allow; returns (transfers, makespan)."""
    n = seconds_GG.shape[0]
    free_s[:] = 0.0
    done = 0
    makespan_s = 0.0
    for step in range(1, n):
        for at in range(n):
            src, dst = ring_G[at], ring_G[(at + step) % n]
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
def _ring_seconds(seconds_GG, ring_G, free_s):
    """The makespan of `_ring` alone, for the search."""
    n = seconds_GG.shape[0]
    free_s[:] = 0.0
    makespan_s = 0.0
    for step in range(1, n):
        for at in range(n):
            src, dst = ring_G[at], ring_G[(at + step) % n]
            took = seconds_GG[src, dst]
            if took > 0.0:
                end_s = max(free_s[src], free_s[n + dst]) + took
                free_s[src] = free_s[n + dst] = end_s
                makespan_s = max(makespan_s, end_s)
    return makespan_s
