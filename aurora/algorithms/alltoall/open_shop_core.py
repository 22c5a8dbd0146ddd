"""Dense open-shop schedules and rings, compiled by Cython; `open_shop` calls them and says what they are for.

Python calls `plain`, `drawn`, `relieved`, `dense_of` and `ring_of`, with a Workspace that has all arrays. The functions
below them only fill arrays, without the GIL.
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
LOW = declare(Int, 0xFFFFFFFF)  # the destination of a pair in the heap
HOPELESS = declare(Float, 1.1)  # dense schedules or rings are not drawn if the plain one is longer than this
RELIEFS = declare(cython.int, 30)  # schedules that `relieved` makes
RELIEF = declare(Float, 0.3)  # of a port's seconds beyond the bound, which are added to its priority
INF = declare(Float, float("inf"))


@final
@cclass
class ScheduleRows:
    """A schedule: rows by start. (X, 2) source and destination, (X, 2) start and end in seconds; X is how many there are."""

    pair: Ints2
    span_s: Floats2
    count: Index

    def __init__(self, rows: Index):
        self.pair, self.span_s, self.count = np.empty((rows, 2), np.int64), np.empty((rows, 2)), 0

    def arrays(self):
        """Returns copies of the rows."""
        return np.asarray(self.pair)[: self.count].copy(), np.asarray(self.span_s)[: self.count].copy()


@final
@cclass
class Ports:
    """The state of a dense schedule that is being made; ports are numbered senders first.

    Sets of partners are bits, 32 to a word, so that the search for a partner touches only ports that are free and have traffic
    for this one.
    """

    n: Index
    bias_s: Floats1  # added to the load of each port, which changes the priorities
    load_s: Floats1
    todo: Ints1  # transfers that a port has left
    waits: Ints2  # the partners that a port has yet to serve
    free: Ints2  # (2, words) free senders, free receivers
    fresh: Ints1  # ports that have just become free
    spare: Ints1  # for sorting them
    heap_s: Floats1  # ends of transfers, infinite beyond the last
    heap_p: Ints1  # their pairs
    begun_C: Ints1  # parts of each cut that have begun
    cuts: Index
    cut_C4: Floats2  # (cuts or more, 4) transfers in two parts: source, destination, seconds of either part

    def __init__(self, n: Index, most_cuts: Index):
        self.n = n
        self.bias_s, self.load_s = np.zeros(2 * n), np.zeros(2 * n)
        self.todo, self.fresh, self.spare = np.zeros(2 * n, np.int64), np.zeros(2 * n, np.int64), np.zeros(2 * n, np.int64)
        self.waits, self.free = np.zeros((2 * n, (n + 31) // 32), np.int64), np.zeros((2, (n + 31) // 32), np.int64)
        self.heap_s, self.heap_p = np.zeros(2 * n + 2), np.zeros(2 * n + 2, np.int64)
        self.cuts, self.cut_C4, self.begun_C = 0, np.zeros((most_cuts, 4)), np.zeros(most_cuts, np.int64)


@final
@cclass
class Workspace:
    """Arrays for the schedules of n ranks with up to most_cuts cuts, made once; one thread at a time uses them."""

    ports: Ports
    best: ScheduleRows
    rows: ScheduleRows
    ring_G: Ints1
    end_s: Floats1

    def __init__(self, n: Index, most_cuts: Index):
        self.ports = Ports(n, most_cuts)
        self.best, self.rows = ScheduleRows(n * n + most_cuts), ScheduleRows(n * n + most_cuts)
        self.ring_G, self.end_s = np.arange(n), np.zeros(2 * n)


@cython.locals(dense_s=Float, ring_s=Float)
def plain(work: Workspace, seconds_GG: ConstFloats2):
    """Returns the shorter of the dense schedule and the ring that need no draws: pairs, spans, and both makespans."""
    ports, best, around = work.ports, work.best, work.rows
    _begin(work)
    with nogil:
        dense_s = dense(seconds_GG, ports, INF, best)
        ring_s = ring(seconds_GG, work.ring_G, ports.load_s, INF, around)
    pairs_X2, span_s_X2 = _by_start(around) if ring_s < dense_s else best.arrays()
    return pairs_X2, span_s_X2, dense_s, ring_s


@cython.locals(took_s=Float, amplitude=Float)
def drawn(
    work: Workspace,
    seconds_GG: ConstFloats2,
    draws_M3G: ConstFloats2,
    bound_s: Float,
    best_s: Float,
    dense_s: Float,
    ring_s: Float,
):
    """Returns the last of the drawn schedules that are shorter than best_s and all before them; infinitely long if none is.

    Dense schedules are drawn unless the plain one took longer than best_s by HOPELESS, and rings likewise. A draw has a
    priority for each port and a number for each rank, by which rings are sorted.
    """
    n: Index = seconds_GG.shape[0]
    ports, best, rows = work.ports, work.best, work.rows
    ring_MG: Ints2 = np.argsort(np.asarray(draws_M3G)[:, 2 * n :], axis=1)
    first_s: Float = best_s
    found_s: Float = INF
    is_ring: cython.bint = False
    best.count = 0
    _begin(work)
    with nogil:
        for number in range(draws_M3G.shape[0]):
            if best_s <= bound_s:
                break
            if dense_s <= first_s * HOPELESS:
                amplitude = 0.1 if number % 3 == 0 else 0.3 if number % 3 == 1 else 1.0
                for port in range(2 * n):
                    ports.bias_s[port] = (draws_M3G[number, port] - 0.5) * (amplitude * bound_s)
                took_s = dense(seconds_GG, ports, best_s, rows)
                if took_s < best_s:
                    best_s, found_s, is_ring = took_s, took_s, False
                    _copy(rows, best)
            if ring_s <= first_s * HOPELESS:
                took_s = ring(seconds_GG, ring_MG[number], ports.load_s, best_s, rows)
                if took_s < best_s:
                    best_s, found_s, is_ring = took_s, took_s, True
                    _copy(rows, best)
    pairs_X2, span_s_X2 = _by_start(best) if is_ring else best.arrays()
    return pairs_X2, span_s_X2, found_s


@cython.locals(best_s=Float, took_s=Float)
def relieved(work: Workspace, seconds_GG: ConstFloats2, bound_s: Float):
    """Returns the shortest schedule of squeaky-wheel optimisation: pairs, spans, makespan."""
    n: Index = seconds_GG.shape[0]
    ports, best, rows, end_s = work.ports, work.best, work.rows, work.end_s
    _begin(work)
    end_s[:] = 0.0
    with nogil:
        best_s = dense(seconds_GG, ports, INF, best)
        for _ in range(RELIEFS):
            took_s = dense(seconds_GG, ports, INF, rows)
            if took_s < best_s:
                best_s = took_s
                _copy(rows, best)
            for row in range(rows.count):  # by start, and so by end at each port
                end_s[rows.pair[row, 0]] = end_s[n + rows.pair[row, 1]] = rows.span_s[row, 1]
            for port in range(2 * n):
                ports.bias_s[port] += RELIEF * max(end_s[port] - bound_s, 0.0)
    pairs_X2, span_s_X2 = best.arrays()
    return pairs_X2, span_s_X2, best_s


@cython.locals(took_s=Float)
def dense_of(work: Workspace, seconds_GG: ConstFloats2, bias_s: ConstFloats1, cut_C4: ConstFloats2, limit_s: Float):
    """Returns a dense schedule: pairs, spans, makespan. See `open_shop.dense`."""
    ports, rows = work.ports, work.rows
    ports.bias_s[:] = bias_s
    ports.cuts = cut_C4.shape[0]
    ports.cut_C4[: ports.cuts] = cut_C4
    with nogil:
        took_s = dense(seconds_GG, ports, limit_s, rows)
    pairs_X2, span_s_X2 = rows.arrays()
    return pairs_X2, span_s_X2, took_s


@cython.locals(took_s=Float)
def ring_of(work: Workspace, seconds_GG: ConstFloats2, ring_G: ConstInts1, limit_s: Float):
    """Returns a ring schedule, its rows by step: pairs, spans, makespan. See `open_shop.ring`."""
    with nogil:
        took_s = ring(seconds_GG, ring_G, work.ports.load_s, limit_s, work.rows)
    pairs_X2, span_s_X2 = work.rows.arrays()
    return pairs_X2, span_s_X2, took_s


def _by_start(rows: ScheduleRows):
    pairs_X2, span_s_X2 = rows.arrays()
    by_start = np.argsort(span_s_X2[:, 0], kind="stable")
    return pairs_X2[by_start], span_s_X2[by_start]


@cfunc
@nogil
@exceptval(check=False)
def _begin(work: Workspace) -> cython.void:
    """Takes away priorities and cuts of earlier schedules."""
    work.ports.bias_s[:] = 0.0
    work.ports.cuts = 0


@cfunc
@nogil
@exceptval(check=False)
def _copy(rows: ScheduleRows, to: ScheduleRows) -> cython.void:
    to.count = rows.count
    for row in range(rows.count):
        to.pair[row, 0], to.pair[row, 1] = rows.pair[row, 0], rows.pair[row, 1]
        to.span_s[row, 0], to.span_s[row, 1] = rows.span_s[row, 0], rows.span_s[row, 1]


@cfunc
@nogil
@exceptval(check=False)
@cython.locals(src=Index, dst=Index, port=Index, partner=Index, took=Float, end=Float)
def dense(seconds_GG: ConstFloats2, ports: Ports, limit_s: Float, rows: ScheduleRows) -> Float:
    """Fills `rows` with a dense schedule, and returns its makespan; infinite if a port cannot end before limit_s.

    Only pairs with a port that has just become free are examined: two ports that were both free before have no traffic for each
    other.
    """
    n: Index = ports.n
    _load(seconds_GG, ports)
    _add_cuts(seconds_GG, ports)
    arrivals: Index = 0
    for i in range(2 * n):
        arrivals = _release(ports, i, arrivals)
    for i in range(2 * n + 2):
        ports.heap_s[i] = INF
    ended: cython.bint = False  # whether the heap's first transfer has ended and may be replaced
    in_flight: Index = 0
    now: Float = 0.0
    rows.count = 0
    while True:
        _busiest_first(ports, arrivals)
        for k in range(arrivals):
            port = ports.fresh[k]
            partner = _busiest_partner(ports, port)
            if partner < 0:
                continue
            if port < n:
                src, dst = port, partner
            else:
                src, dst = partner, port - n
            _flip(ports, src, dst)
            took = _part(seconds_GG, ports, src, dst)
            ports.load_s[src] -= took
            ports.load_s[n + dst] -= took
            ports.todo[src] -= 1
            ports.todo[n + dst] -= 1
            end = now + took
            if end + max(ports.load_s[src] - ports.bias_s[src], ports.load_s[n + dst] - ports.bias_s[n + dst]) >= limit_s:
                return INF
            rows.pair[rows.count, 0], rows.pair[rows.count, 1] = src, dst
            rows.span_s[rows.count, 0], rows.span_s[rows.count, 1] = now, end
            rows.count += 1
            if ended:
                _sink(ports, end, src << 32 | dst)
                ended = False
            else:
                _rise(ports, in_flight, end, src << 32 | dst)
                in_flight += 1
        if ended:
            in_flight -= 1
            _drop(ports, in_flight)
        if in_flight == 0:
            return now
        now = ports.heap_s[0]
        arrivals = 0
        ended = False
        while not ended:
            src, dst = ports.heap_p[0] >> 32, ports.heap_p[0] & LOW
            _wait_again(ports, src, dst)
            arrivals = _release(ports, src, arrivals)
            arrivals = _release(ports, n + dst, arrivals)
            ended = min(ports.heap_s[1], ports.heap_s[2]) > now
            if not ended:
                in_flight -= 1
                _drop(ports, in_flight)


@cfunc
@nogil
@exceptval(check=False)
def _load(seconds_GG: ConstFloats2, ports: Ports) -> cython.void:
    """Sets the load of each port, how many transfers it has left, and its partners."""
    n = ports.n
    ports.load_s[:] = ports.bias_s
    ports.todo[:] = 0
    ports.waits[:, :] = 0
    ports.free[:, :] = 0
    for i in range(n):
        for j in range(n):
            took = seconds_GG[i, j]
            if took > 0.0:
                ports.waits[i, j >> 5] |= cast(Int, 1) << (j & 31)
                ports.waits[n + j, i >> 5] |= cast(Int, 1) << (i & 31)
                ports.load_s[i] += took
                ports.load_s[n + j] += took
                ports.todo[i] += 1
                ports.todo[n + j] += 1


@cfunc
@nogil
@exceptval(check=False)
def _add_cuts(seconds_GG: ConstFloats2, ports: Ports) -> cython.void:
    """Adds the second transfer of each pair that is cut, and the time that its two parts take longer than the whole."""
    for cut in range(ports.cuts):
        i, j = cast(Index, ports.cut_C4[cut, 0]), cast(Index, ports.cut_C4[cut, 1])
        more = ports.cut_C4[cut, 2] + ports.cut_C4[cut, 3] - seconds_GG[i, j]
        ports.load_s[i] += more
        ports.load_s[ports.n + j] += more
        ports.todo[i] += 1
        ports.todo[ports.n + j] += 1
        ports.begun_C[cut] = 0


@cfunc
@nogil
@exceptval(check=False)
def _release(ports: Ports, port: Index, arrivals: Index) -> Index:
    """Frees a port that has more to do; returns how many ports are fresh now."""
    if ports.todo[port] > 0:
        side: Index = 1 if port >= ports.n else 0
        i: Index = port - side * ports.n
        ports.free[side, i >> 5] |= cast(Int, 1) << (i & 31)
        ports.fresh[arrivals] = port
        arrivals += 1
    return arrivals


@cfunc
@nogil
@exceptval(check=False)
@cython.locals(at=Index, port=Int)
def _busiest_first(ports: Ports, arrivals: Index) -> cython.void:
    """Sorts the fresh ports by load: insertion sort for the few of an event, merge sort for the many at the start."""
    if arrivals > 32:
        descending(ports.load_s, ports.fresh, ports.spare, arrivals)
        return
    for k in range(1, arrivals):
        port = ports.fresh[k]
        at = k - 1
        while at >= 0 and ports.load_s[ports.fresh[at]] < ports.load_s[port]:
            ports.fresh[at + 1] = ports.fresh[at]
            at -= 1
        ports.fresh[at + 1] = port


@cfunc
@nogil
@exceptval(check=False)
@cython.locals(other=Index, bits=Int, lowest=Int, load=Float)
def _busiest_partner(ports: Ports, port: Index) -> Index:
    """The free partner of a port with the largest load; -1 if there is none or the port is busy."""
    n: Index = ports.n
    side: Index = 1 if port >= n else 0
    i: Index = port - side * n
    partner: Index = -1
    if ports.free[side, i >> 5] >> (i & 31) & 1 == 0:
        return partner
    most: Float = -INF
    others: Index = n - side * n
    for word in range(ports.free.shape[1]):
        bits = ports.waits[port, word] & ports.free[1 - side, word]
        while bits != 0:
            lowest = bits & -bits
            other = (word << 5) + BIT_INDEX[(lowest * DE_BRUIJN >> 27) & 31]
            load = ports.load_s[others + other]
            if load > most:
                partner, most = other, load
            bits ^= lowest
    return partner


@cfunc
@nogil
@exceptval(check=False)
def _flip(ports: Ports, src: Index, dst: Index) -> cython.void:
    """Marks both ports as busy, and each as no longer a partner of the other."""
    src_bit, dst_bit = cast(Int, 1) << (src & 31), cast(Int, 1) << (dst & 31)
    ports.free[0, src >> 5] ^= src_bit
    ports.free[1, dst >> 5] ^= dst_bit
    ports.waits[src, dst >> 5] ^= dst_bit
    ports.waits[ports.n + dst, src >> 5] ^= src_bit


@cfunc
@nogil
@exceptval(check=False)
def _part(seconds_GG: ConstFloats2, ports: Ports, src: Index, dst: Index) -> Float:
    """The duration of the pair's transfer, or of its next part, which begins now."""
    took = seconds_GG[src, dst]
    for cut in range(ports.cuts):
        if ports.cut_C4[cut, 0] == src and ports.cut_C4[cut, 1] == dst:
            took = ports.cut_C4[cut, 2 + ports.begun_C[cut]]
            ports.begun_C[cut] += 1
    return took


@cfunc
@nogil
@exceptval(check=False)
def _wait_again(ports: Ports, src: Index, dst: Index) -> cython.void:
    """If the first of two parts has ended, makes both ports partners again for the second."""
    for cut in range(ports.cuts):
        if ports.cut_C4[cut, 0] == src and ports.cut_C4[cut, 1] == dst and ports.begun_C[cut] == 1:
            ports.waits[src, dst >> 5] |= cast(Int, 1) << (dst & 31)
            ports.waits[ports.n + dst, src >> 5] |= cast(Int, 1) << (src & 31)


@cfunc
@nogil
@exceptval(check=False)
def _sink(ports: Ports, end: Float, pair: Int) -> cython.void:
    """Replaces the heap's first entry by (end, pair)."""
    at: Index = 0
    child: Index = 1
    while child < ports.heap_s.shape[0]:
        if ports.heap_s[child + 1] < ports.heap_s[child]:
            child += 1
        if ports.heap_s[child] >= end:
            break
        ports.heap_s[at] = ports.heap_s[child]
        ports.heap_p[at] = ports.heap_p[child]
        at = child
        child = 2 * at + 1
    ports.heap_s[at] = end
    ports.heap_p[at] = pair


@cfunc
@nogil
@exceptval(check=False)
def _rise(ports: Ports, at: Index, end: Float, pair: Int) -> cython.void:
    """Adds (end, pair) to a heap of `at` entries."""
    while at > 0 and ports.heap_s[(at - 1) >> 1] > end:
        ports.heap_s[at] = ports.heap_s[(at - 1) >> 1]
        ports.heap_p[at] = ports.heap_p[(at - 1) >> 1]
        at = (at - 1) >> 1
    ports.heap_s[at] = end
    ports.heap_p[at] = pair


@cfunc
@nogil
@exceptval(check=False)
def _drop(ports: Ports, last: Index) -> cython.void:
    """Removes the heap's first entry; `last` is the index of its last."""
    end = ports.heap_s[last]
    ports.heap_s[last] = INF
    if last > 0:
        _sink(ports, end, ports.heap_p[last])


@cfunc
@nogil
@exceptval(check=False)
@cython.locals(src=Index, dst=Index, start_s=Float, end_s=Float)
def ring(seconds_GG: ConstFloats2, ring_G: ConstInts1, free_s: Floats1, limit_s: Float, rows: ScheduleRows) -> Float:
    """Fills `rows` with a ring schedule, by step; returns its makespan, infinite once a port is busy until limit_s.

    The i-th rank of the ring sends to the ranks i + 1, i + 2, ... of it, in this sequence. free_s is working memory.
    """
    n: Index = seconds_GG.shape[0]
    most_s: Float = 0.0
    free_s[:] = 0.0
    rows.count = 0
    for step in range(1, n):
        for at in range(n):
            src, dst = ring_G[at], ring_G[(at + step) % n]
            took = seconds_GG[src, dst]
            if took > 0.0:
                start_s = max(free_s[src], free_s[n + dst])
                end_s = start_s + took
                free_s[src] = free_s[n + dst] = end_s
                rows.pair[rows.count, 0], rows.pair[rows.count, 1] = src, dst
                rows.span_s[rows.count, 0], rows.span_s[rows.count, 1] = start_s, end_s
                rows.count += 1
                most_s = max(most_s, end_s)
                if end_s >= limit_s:
                    return INF
    return most_s
