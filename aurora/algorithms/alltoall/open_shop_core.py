"""Dense open-shop schedules and rings, compiled by Cython; `open_shop` calls them and says what they are for.

Python calls `search`, with a Workspace that has all arrays. The functions below it only fill arrays, without the GIL.
"""

import cython
import numpy as np
from cython import cast, cclass, cfunc, declare, exceptval, final, nogil

if cython.compiled:
    from cython.cimports.aurora.algorithms.core_arrays import *
    from cython.cimports.aurora.algorithms.sorting_core import descending
else:
    from aurora.algorithms.core_arrays import *
    from aurora.algorithms.sorting_core import descending

DE_BRUIJN = declare(Int, 0x077CB531)  # times a power of two below 2^32: bits 27 to 31 differ for each
BIT_INDEX = declare(Ints1, np.argsort([((0x077CB531 << bit) >> 27) & 31 for bit in range(32)]))
LOW = declare(Int, 0xFFFFFFFF)  # the destination of a pair in the heap; the bits of a drawn number
HOPELESS = declare(Float, 1.1)  # dense schedules or rings are not drawn if the plain one is longer than this
AMPLITUDE = declare(Float, 0.25)  # of drawn priorities, as a share of the bound
INF = declare(Float, float("inf"))


@final
@cclass
class Workspace:
    """Arrays for the schedules of n ranks, made once; one thread at a time uses them.

    It has room for two schedules, the best one and one that is being made, and the state of the latter. Ports are numbered
    senders first. Sets of partners are bits, 32 to a word, so that the search for a partner touches only ports that are free
    and have traffic for this one.
    """

    n: Index
    words: Index
    pairs: object  # (2, X, 2) source and destination of each row of the two schedules
    pair: Ints3  # the same
    start_s: Floats2  # (2, X) when the rows of rings start
    count: Ints1  # (2,) their numbers of rows
    total_s: Floats1  # of all transfers of a port
    transfers: Ints1  # how many they are
    partners: Ints2  # with whom
    bias_s: Floats1  # added to the load of each port, which changes the priorities
    load_s: Floats1
    todo: Ints1  # transfers that a port has left
    waits: Ints2  # the partners that a port has yet to serve
    free: Ints2  # (2, words) free senders, free receivers
    fresh: Ints1  # ports that have just become free
    spare: Ints1  # for sorting them
    heap_s: Floats1  # ends of transfers, infinite beyond the last
    heap_p: Ints1  # their pairs
    ring_G: Ints1
    drawn: Int

    def __init__(self, n: Index):
        self.n, self.words, self.drawn = n, (n + 31) // 32, 1
        self.pair = self.pairs = np.empty((2, n * n, 2), np.int64)
        self.start_s, self.count = np.empty((2, n * n)), np.zeros(2, np.int64)
        self.total_s, self.bias_s, self.load_s = np.zeros((3, 2 * n))
        self.transfers, self.todo, self.fresh, self.spare = np.zeros((4, 2 * n), np.int64)
        self.partners, self.waits = np.zeros((2, 2 * n, self.words), np.int64)
        self.free = np.zeros((2, self.words), np.int64)
        self.heap_s, self.heap_p = np.zeros(2 * n + 2), np.zeros(2 * n + 2, np.int64)
        self.ring_G = np.arange(n)


@cython.locals(dense_s=Float, ring_s=Float, best_s=Float, bound_s=Float, took_s=Float, first_s=Float)
def search(work: Workspace, seconds_GG: ConstFloats2, tries: Index, seed: Int, limit_s: Float):
    """Returns the shortest of the dense schedule and the ring that need no draws, and of drawn ones: pairs, makespan.

    The search ends at the bound. A drawn schedule is given up once it cannot be shorter than limit_s and all before it. Dense
    schedules are not drawn if the plain one took longer than the plain ring, or limit_s, by HOPELESS; nor are rings likewise. A
    draw has a priority for each port, and a ring.
    """
    n: Index = work.n
    best: Index = 0
    is_ring: cython.bint = False
    with nogil:
        bound_s = _sum_up(seconds_GG, work) * (1 + 1e-12)
        work.drawn = seed & LOW | 1
        for rank in range(n):
            work.ring_G[rank] = rank
        best_s = dense_s = _dense(seconds_GG, work, INF, 0)
        ring_s = _ring(seconds_GG, work, INF, 1) if best_s > bound_s else INF
        if ring_s < best_s:
            best_s, best, is_ring = ring_s, 1, True
        first_s = limit_s = min(best_s, limit_s)
        for _ in range(tries):
            if limit_s <= bound_s:
                break
            if dense_s <= first_s * HOPELESS:
                for port in range(2 * n):
                    work.bias_s[port] = (_draw(work) - 0.5) * (AMPLITUDE * bound_s)
                took_s = _dense(seconds_GG, work, limit_s, 1 - best)
                if took_s < INF:
                    best_s, limit_s, best, is_ring = took_s, took_s, 1 - best, False
            if ring_s <= first_s * HOPELESS:
                _shuffle(work)
                took_s = _ring(seconds_GG, work, limit_s, 1 - best)
                if took_s < INF:
                    best_s, limit_s, best, is_ring = took_s, took_s, 1 - best, True
    pairs_X2 = work.pairs[best, : work.count[best]].copy()
    if is_ring:
        pairs_X2 = pairs_X2[np.argsort(np.asarray(work.start_s)[best, : len(pairs_X2)], kind="stable")]
    return pairs_X2, best_s


@cfunc
@nogil
@exceptval(check=False)
def _draw(work: Workspace) -> Float:
    """A number from 0 to 1; source: Marsaglia, "Xorshift RNGs", Journal of Statistical Software 8 (2003)."""
    bits: Int = work.drawn
    bits ^= bits << 13 & LOW
    bits ^= bits >> 17
    bits ^= bits << 5 & LOW
    work.drawn = bits
    return bits / 4294967296.0


@cfunc
@nogil
@exceptval(check=False)
@cython.locals(other=Index, rank=Int)
def _shuffle(work: Workspace) -> cython.void:
    """Puts the ranks of the ring into a random sequence."""
    for at in range(work.n - 1, 0, -1):
        other = cast(Index, _draw(work) * (at + 1))
        rank = work.ring_G[at]
        work.ring_G[at], work.ring_G[other] = work.ring_G[other], rank


@cfunc
@nogil
@exceptval(check=False)
@cython.locals(took_s=Float, longest_s=Float)
def _sum_up(seconds_GG: ConstFloats2, work: Workspace) -> Float:
    """Sets the transfers, seconds and partners of each port, and takes away priorities; returns the most seconds of a port."""
    n: Index = work.n
    for port in range(2 * n):
        work.total_s[port] = work.bias_s[port] = 0.0
        work.transfers[port] = 0
        for word in range(work.words):
            work.partners[port, word] = 0
    for i in range(n):
        for j in range(n):
            took_s = seconds_GG[i, j]
            if took_s > 0.0:
                work.partners[i, j >> 5] |= cast(Int, 1) << (j & 31)
                work.partners[n + j, i >> 5] |= cast(Int, 1) << (i & 31)
                work.total_s[i] += took_s
                work.total_s[n + j] += took_s
                work.transfers[i] += 1
                work.transfers[n + j] += 1
    longest_s = 0.0
    for port in range(2 * n):
        longest_s = max(longest_s, work.total_s[port])
    return longest_s


@cfunc
@nogil
@exceptval(check=False)
@cython.locals(src=Index, dst=Index, port=Index, partner=Index, took=Float, end=Float)
def _dense(seconds_GG: ConstFloats2, work: Workspace, limit_s: Float, at: Index) -> Float:
    """Fills a schedule of the two with a dense one; returns its makespan, infinite if a port cannot end before limit_s.

    Only pairs with a port that has just become free are examined: two ports that were both free before have no traffic for each
    other.
    """
    n: Index = work.n
    arrivals: Index = 0
    for i in range(2 * n):
        work.load_s[i] = work.total_s[i] + work.bias_s[i]
        work.todo[i] = work.transfers[i]
        for word in range(work.words):
            work.waits[i, word] = work.partners[i, word]
    for word in range(work.words):
        work.free[0, word] = work.free[1, word] = 0
    for i in range(2 * n):
        arrivals = _release(work, i, arrivals)
    for i in range(2 * n + 2):
        work.heap_s[i] = INF
    ended: cython.bint = False  # whether the heap's first transfer has ended and may be replaced
    in_flight: Index = 0
    now: Float = 0.0
    rows: Index = 0
    while True:
        _busiest_first(work, arrivals)
        for k in range(arrivals):
            port = work.fresh[k]
            partner = _busiest_partner(work, port)
            if partner < 0:
                continue
            src = port if port < n else partner
            dst = partner if port < n else port - n
            _flip(work, src, dst)
            took = seconds_GG[src, dst]
            work.load_s[src] -= took
            work.load_s[n + dst] -= took
            work.todo[src] -= 1
            work.todo[n + dst] -= 1
            end = now + took
            if end + max(work.load_s[src] - work.bias_s[src], work.load_s[n + dst] - work.bias_s[n + dst]) >= limit_s:
                return INF
            work.pair[at, rows, 0], work.pair[at, rows, 1] = src, dst
            rows += 1
            if ended:
                _sink(work, end, src << 32 | dst)
                ended = False
            else:
                _rise(work, in_flight, end, src << 32 | dst)
                in_flight += 1
        if ended:
            in_flight -= 1
            _drop(work, in_flight)
        if in_flight == 0:
            work.count[at] = rows
            return now
        now = work.heap_s[0]
        arrivals = 0
        ended = False
        while not ended:
            src, dst = work.heap_p[0] >> 32, work.heap_p[0] & LOW
            arrivals = _release(work, src, arrivals)
            arrivals = _release(work, n + dst, arrivals)
            ended = min(work.heap_s[1], work.heap_s[2]) > now
            if not ended:
                in_flight -= 1
                _drop(work, in_flight)


@cfunc
@nogil
@exceptval(check=False)
def _release(work: Workspace, port: Index, arrivals: Index) -> Index:
    """Frees a port that has more to do; returns how many ports are fresh now."""
    if work.todo[port] > 0:
        side: Index = 1 if port >= work.n else 0
        i: Index = port - side * work.n
        work.free[side, i >> 5] |= cast(Int, 1) << (i & 31)
        work.fresh[arrivals] = port
        arrivals += 1
    return arrivals


@cfunc
@nogil
@exceptval(check=False)
@cython.locals(at=Index, port=Int)
def _busiest_first(work: Workspace, arrivals: Index) -> cython.void:
    """Sorts the fresh ports by load: insertion sort for the few of an event, merge sort for the many at the start."""
    if arrivals > 32:
        descending(work.load_s, work.fresh, work.spare, arrivals)
        return
    for k in range(1, arrivals):
        port = work.fresh[k]
        at = k - 1
        while at >= 0 and work.load_s[work.fresh[at]] < work.load_s[port]:
            work.fresh[at + 1] = work.fresh[at]
            at -= 1
        work.fresh[at + 1] = port


@cfunc
@nogil
@exceptval(check=False)
@cython.locals(other=Index, bits=Int, lowest=Int, load=Float)
def _busiest_partner(work: Workspace, port: Index) -> Index:
    """The free partner of a port with the largest load; -1 if there is none or the port is busy."""
    n: Index = work.n
    side: Index = 1 if port >= n else 0
    i: Index = port - side * n
    partner: Index = -1
    if work.free[side, i >> 5] >> (i & 31) & 1 == 0:
        return partner
    most: Float = -INF
    others: Index = n - side * n
    for word in range(work.free.shape[1]):
        bits = work.waits[port, word] & work.free[1 - side, word]
        while bits != 0:
            lowest = bits & -bits
            other = (word << 5) + BIT_INDEX[(lowest * DE_BRUIJN >> 27) & 31]
            load = work.load_s[others + other]
            partner = other if load > most else partner  # without a branch, which nothing foretells
            most = larger(load, most)
            bits ^= lowest
    return partner


@cfunc
@nogil
@exceptval(check=False)
def _flip(work: Workspace, src: Index, dst: Index) -> cython.void:
    """Marks both ports as busy, and each as no longer a partner of the other."""
    src_bit, dst_bit = cast(Int, 1) << (src & 31), cast(Int, 1) << (dst & 31)
    work.free[0, src >> 5] ^= src_bit
    work.free[1, dst >> 5] ^= dst_bit
    work.waits[src, dst >> 5] ^= dst_bit
    work.waits[work.n + dst, src >> 5] ^= src_bit


@cfunc
@nogil
@exceptval(check=False)
def _sink(work: Workspace, end: Float, pair: Int) -> cython.void:
    """Replaces the heap's first entry by (end, pair)."""
    at: Index = 0
    child: Index = 1
    while child < work.heap_s.shape[0]:
        child += 1 if work.heap_s[child + 1] < work.heap_s[child] else 0
        if work.heap_s[child] >= end:
            break
        work.heap_s[at] = work.heap_s[child]
        work.heap_p[at] = work.heap_p[child]
        at = child
        child = 2 * at + 1
    work.heap_s[at] = end
    work.heap_p[at] = pair


@cfunc
@nogil
@exceptval(check=False)
def _rise(work: Workspace, at: Index, end: Float, pair: Int) -> cython.void:
    """Adds (end, pair) to a heap of `at` entries."""
    while at > 0 and work.heap_s[(at - 1) >> 1] > end:
        work.heap_s[at] = work.heap_s[(at - 1) >> 1]
        work.heap_p[at] = work.heap_p[(at - 1) >> 1]
        at = (at - 1) >> 1
    work.heap_s[at] = end
    work.heap_p[at] = pair


@cfunc
@nogil
@exceptval(check=False)
def _drop(work: Workspace, last: Index) -> cython.void:
    """Removes the heap's first entry; `last` is the index of its last."""
    end = work.heap_s[last]
    work.heap_s[last] = INF
    if last > 0:
        _sink(work, end, work.heap_p[last])


@cfunc
@nogil
@exceptval(check=False)
@cython.locals(src=Index, dst=Index, took_s=Float, start_s=Float, end_s=Float)
def _ring(seconds_GG: ConstFloats2, work: Workspace, limit_s: Float, at: Index) -> Float:
    """Fills a schedule of the two with a ring, by step; returns its makespan, infinite once a port is busy until limit_s.

    The i-th rank of the ring sends to the ranks i + 1, i + 2, ... of it, in this sequence. There are no barriers between the
    steps: a transfer starts when both of its ports have ended their previous transfer.
    """
    n: Index = work.n
    rows: Index = 0
    most_s: Float = 0.0
    for port in range(2 * n):
        work.load_s[port] = 0.0  # when the port is free
    for step in range(1, n):
        for i in range(n):
            src, dst = work.ring_G[i], work.ring_G[(i + step) % n]
            took_s = seconds_GG[src, dst]
            if took_s > 0.0:
                start_s = max(work.load_s[src], work.load_s[n + dst])
                end_s = start_s + took_s
                work.load_s[src] = work.load_s[n + dst] = end_s
                work.pair[at, rows, 0], work.pair[at, rows, 1] = src, dst
                work.start_s[at, rows] = start_s
                rows += 1
                most_s = max(most_s, end_s)
                if end_s >= limit_s:
                    return INF
    work.count[at] = rows
    return most_s
