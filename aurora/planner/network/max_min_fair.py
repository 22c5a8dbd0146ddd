"""Flows on shared ports and links, compiled: who may start, at which rate, and when each ends.

A flow is a row of an all-to-all's order. Rates are max-min fair; after a change only those of the flows that are connected to
it by shared resources are found anew. Without numba's JIT (NUMBA_DISABLE_JIT=1) the same code runs in plain Python.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from aurora.types.arrays import FloatArray, IntArray

SENDS, RECVS = 0, 1
TOGETHER = 1 + 1e-12  # flows that end within this factor of each other end at the same time
LEAST_GOODPUT = 0.1  # of a receiving port, however many flows meet there
HEAP, STAMP, DIRTY, DONE, LOGGED = range(5)  # of SharedResources.counter


class FlowRows(NamedTuple):
    """What is known of each row of the all-to-alls under way, (X,) each; next and prev (X, K) chain the rows of a resource."""

    src: IntArray
    dst: IntArray
    slot: IntArray
    size: IntArray
    sub_channels: IntArray
    most_Bps: FloatArray
    startup_s: FloatArray
    admitted: IntArray  # by how many of its two ends
    left: FloatArray
    since_s: FloatArray
    rate_Bps: FloatArray  # negative during start-up
    event_s: FloatArray  # when it leaves its start-up or ends
    start_s: FloatArray
    end_s: FloatArray
    place: IntArray  # in the heap of events
    stamp: IntArray
    next: IntArray
    prev: IntArray


class Queues(NamedTuple):
    """Per all-to-all, direction and rank, (slots, 2, G) int64: what lies between `at` and `stop` of row (2, X) still waits for
    one of the `room` lanes; undone: how many rows have not ended."""

    row: IntArray
    at: IntArray
    stop: IntArray
    room: IntArray
    undone: IntArray
    joined: IntArray


class SharedResources(NamedTuple):
    """Resources, (R,) each, and scratch. head: the first row on each; flows: how many there are."""

    room: FloatArray
    use: IntArray
    share: FloatArray
    head: IntArray
    flows: IntArray
    free: FloatArray
    load: FloatArray
    open: IntArray
    stamp: IntArray
    found: IntArray
    dirty: IntArray
    heap: IntArray  # (X,) rows by event_s
    rows: IntArray  # (X,) scratch
    done: IntArray  # (slots * G, 2) slot and rank
    counter: IntArray  # (5,) see HEAP
    now_s: FloatArray  # (1,)
    incast: FloatArray  # (1,) goodput lost for each flow beyond the first at a receiving port


class Log(NamedTuple):
    """The parts of rows that flowed at one rate, as they ended. carried: bytes of the row up to its end."""

    row: IntArray
    start_s: FloatArray
    end_s: FloatArray
    rate_Bps: FloatArray
    carried: FloatArray


@njit(cache=True)
def join(rows: FlowRows, queues: Queues, net: SharedResources, slot: int, rank: int) -> None:
    """`rank` takes part from now on."""
    queues.joined[slot, rank] = 1
    _admit(rows, queues, net, slot, SENDS, rank)
    _admit(rows, queues, net, slot, RECVS, rank)


@njit(cache=True, error_model="numpy")
def run(rows: FlowRows, queues: Queues, net: SharedResources, log: Log, logging: bool, until_s: float) -> bool:
    """On to until_s, or to where a rank is first done with an all-to-all; False where the log is too small to go on."""
    count = net.counter
    while True:
        if logging and count[LOGGED] + 2 * count[HEAP] > log.row.shape[0]:
            return False
        _share(rows, net, log, logging)
        if count[DONE] > 0:
            return True
        if count[HEAP] == 0 or rows.event_s[net.heap[0]] > until_s:
            if until_s < np.inf:
                net.now_s[0] = until_s
            return True
        now_s = max(rows.event_s[net.heap[0]], net.now_s[0])
        net.now_s[0] = now_s
        over = 0
        while count[HEAP] > 0 and rows.event_s[net.heap[0]] <= now_s * TOGETHER:
            row = net.heap[0]
            _take_out(rows, net, row)
            if rows.rate_Bps[row] < 0:
                _enter(rows, net, row)
            else:
                net.rows[over] = row
                over += 1
        for at in range(over):
            _leave(rows, net, log, logging, net.rows[at])
        for at in range(over):
            row = net.rows[at]
            slot = rows.slot[row]
            queues.room[slot, SENDS, rows.src[row]] += rows.sub_channels[row]
            queues.room[slot, RECVS, rows.dst[row]] += rows.sub_channels[row]
            for side, rank in ((SENDS, rows.src[row]), (RECVS, rows.dst[row])):
                queues.undone[slot, side, rank] -= 1
                if queues.undone[slot, SENDS, rank] == 0 and queues.undone[slot, RECVS, rank] == 0:
                    net.done[count[DONE], 0], net.done[count[DONE], 1] = slot, rank
                    count[DONE] += 1
        for at in range(over):
            row = net.rows[at]
            _admit(rows, queues, net, rows.slot[row], SENDS, rows.src[row])
            _admit(rows, queues, net, rows.slot[row], RECVS, rows.dst[row])


@njit(cache=True)
def _admit(rows, queues, net, slot, side, rank):
    """Admit rows for which there are sub-channels; those that both of their ends have admitted start."""
    at, stop = queues.at[slot, side, rank], queues.stop[slot, side, rank]
    while at < stop and rows.sub_channels[queues.row[side, at]] <= queues.room[slot, side, rank]:
        row = queues.row[side, at]
        queues.room[slot, side, rank] -= rows.sub_channels[row]
        rows.admitted[row] += 1
        if rows.admitted[row] == 2:
            rows.start_s[row] = net.now_s[0]
            if rows.startup_s[row] > 0:
                rows.rate_Bps[row] = -1.0
                rows.event_s[row] = net.now_s[0] + rows.startup_s[row]
                _put_in(rows, net, row)
            else:
                _enter(rows, net, row)
        at += 1
    queues.at[slot, side, rank] = at


@njit(cache=True, inline="always")
def _enter(rows, net, row):
    """The row takes part in the sharing from now on."""
    rows.rate_Bps[row] = 0.0
    rows.since_s[row] = net.now_s[0]
    rows.event_s[row] = np.inf
    _put_in(rows, net, row)
    src, dst = rows.src[row], rows.dst[row]
    for k in range(net.use.shape[2]):
        if net.share[src, dst, k] > 0:
            resource = net.use[src, dst, k]
            first = net.head[resource]
            rows.next[row, k], rows.prev[row, k] = first, -1
            if first >= 0:
                rows.prev[first, _index(rows, net, first, resource)] = row
            net.head[resource] = row
            net.flows[resource] += 1
            _mark(net, resource)


@njit(cache=True, inline="always")
def _leave(rows, net, log, logging, row):
    now_s = net.now_s[0]
    if logging:
        _log(net, log, row, rows.since_s[row], now_s, rows.rate_Bps[row], float(rows.size[row]))
    rows.left[row], rows.end_s[row] = 0.0, now_s
    src, dst = rows.src[row], rows.dst[row]
    for k in range(net.use.shape[2]):
        if net.share[src, dst, k] > 0:
            resource = net.use[src, dst, k]
            before, after = rows.prev[row, k], rows.next[row, k]
            if before >= 0:
                rows.next[before, _index(rows, net, before, resource)] = after
            else:
                net.head[resource] = after
            if after >= 0:
                rows.prev[after, _index(rows, net, after, resource)] = before
            net.flows[resource] -= 1
            _mark(net, resource)


@njit(cache=True, inline="always")
def _index(rows, net, row, resource):
    """Which of the row's resources this is."""
    src, dst = rows.src[row], rows.dst[row]
    k = 0
    while net.use[src, dst, k] != resource:
        k += 1
    return k


@njit(cache=True, inline="always")
def _mark(net, resource):
    if net.stamp[resource] >= 0:
        net.stamp[resource] = -1
        net.dirty[net.counter[DIRTY]] = resource
        net.counter[DIRTY] += 1


@njit(cache=True, inline="always")
def _share(rows, net, log, logging):
    """Fair rates for whatever is connected to a resource that changed."""
    count = net.counter
    for at in range(count[DIRTY]):
        resource = net.dirty[at]
        if net.stamp[resource] < 0:
            count[STAMP] += 1
            resources, flows = _component(rows, net, resource, count[STAMP])
            if flows > 0:
                _fill(rows, net, log, logging, resources, flows)
    count[DIRTY] = 0


@njit(cache=True, inline="always")
def _component(rows, net, seed, stamp):
    """Into net.found and net.rows: the resources and rows connected to `seed`; gives how many of each."""
    net.stamp[seed] = stamp
    net.found[0] = seed
    resources, flows, at = 1, 0, 0
    while at < resources:
        resource = net.found[at]
        row = net.head[resource]
        while row >= 0:
            if rows.stamp[row] != stamp:
                rows.stamp[row] = stamp
                net.rows[flows] = row
                flows += 1
                src, dst = rows.src[row], rows.dst[row]
                for k in range(net.use.shape[2]):
                    other = net.use[src, dst, k]
                    if net.share[src, dst, k] > 0 and net.stamp[other] != stamp:
                        net.stamp[other] = stamp
                        net.found[resources] = other
                        resources += 1
            row = rows.next[row, _index(rows, net, row, resource)]
        at += 1
    return resources, flows


@njit(cache=True, inline="always")
def _fill(rows, net, log, logging, resources, flows):
    """Progressive filling: the tightest resource fixes its flows, and so on. A fixed row's stamp is negative."""
    senders = net.use.shape[0]
    for at in range(resources):
        resource = net.found[at]
        net.free[resource], net.load[resource], net.open[resource] = net.room[resource], 0.0, net.flows[resource]
        if senders <= resource < 2 * senders:
            net.free[resource] *= max(1 - net.incast[0] * (net.flows[resource] - 1), LEAST_GOODPUT)
    held = False
    for at in range(flows):
        row = net.rows[at]
        held |= rows.most_Bps[row] < np.inf
        for k in range(net.use.shape[2]):
            net.load[net.use[rows.src[row], rows.dst[row], k]] += net.share[rows.src[row], rows.dst[row], k]
    left, changed = flows, 0
    before = net.counter[HEAP] // 8
    while left > 0:
        level, tightest = np.inf, -1
        for at in range(resources):
            resource = net.found[at]
            if net.open[resource] > 0:
                own = net.free[resource] / net.load[resource]
                if own < level or (own == level and resource < tightest):
                    level, tightest = own, resource
        slow = 0
        if held:
            for at in range(flows):
                row = net.rows[at]
                if rows.stamp[row] > 0 and rows.most_Bps[row] <= level:
                    changed += _fix(rows, net, log, logging, row, rows.most_Bps[row], changed < before)
                    slow += 1
        left -= slow
        if slow == 0:
            row = net.head[tightest]
            while row >= 0:
                if rows.stamp[row] > 0:
                    changed += _fix(rows, net, log, logging, row, level, changed < before)
                    left -= 1
                row = rows.next[row, _index(rows, net, row, tightest)]
    if changed > before:
        for at in range(net.counter[HEAP] // 2 - 1, -1, -1):
            _sift_down(rows, net, at)


@njit(cache=True, inline="always")
def _fix(rows, net, log, logging, row, rate_Bps, sift):
    """The row's rate from now on; gives whether that is news. sift: keep the heap in order at once."""
    rows.stamp[row] = -rows.stamp[row]
    src, dst = rows.src[row], rows.dst[row]
    for k in range(net.use.shape[2]):
        share = net.share[src, dst, k]
        if share > 0:
            resource = net.use[src, dst, k]
            net.free[resource] = max(net.free[resource] - share * rate_Bps, 0.0)
            net.load[resource] -= share
            net.open[resource] -= 1
    old_Bps = rows.rate_Bps[row]
    if rate_Bps == old_Bps:
        return 0
    now_s = net.now_s[0]
    rows.left[row] -= old_Bps * (now_s - rows.since_s[row])
    if logging and old_Bps > 0:
        _log(net, log, row, rows.since_s[row], now_s, old_Bps, rows.size[row] - rows.left[row])
    rows.since_s[row], rows.rate_Bps[row] = now_s, rate_Bps
    rows.event_s[row] = now_s + max(rows.left[row], 0.0) / rate_Bps
    if sift:
        _sift_up(rows, net, rows.place[row])
        _sift_down(rows, net, rows.place[row])
    return 1


@njit(cache=True, inline="always")
def _log(net, log, row, start_s, end_s, rate_Bps, carried):
    at = net.counter[LOGGED]
    log.row[at], log.start_s[at], log.end_s[at], log.rate_Bps[at], log.carried[at] = row, start_s, end_s, rate_Bps, carried
    net.counter[LOGGED] = at + 1


@njit(cache=True, inline="always")
def _before(rows, one, other):
    return rows.event_s[one] < rows.event_s[other] or (rows.event_s[one] == rows.event_s[other] and one < other)


@njit(cache=True, inline="always")
def _put_in(rows, net, row):
    at = net.counter[HEAP]
    net.counter[HEAP] = at + 1
    net.heap[at], rows.place[row] = row, at
    _sift_up(rows, net, at)


@njit(cache=True, inline="always")
def _take_out(rows, net, row):
    net.counter[HEAP] -= 1
    last, at = net.heap[net.counter[HEAP]], rows.place[row]
    if last != row:
        net.heap[at], rows.place[last] = last, at
        _sift_up(rows, net, at)
        _sift_down(rows, net, rows.place[last])


@njit(cache=True)
def _sift_up(rows, net, at):
    row = net.heap[at]
    while at > 0 and _before(rows, row, net.heap[(at - 1) // 2]):
        above = net.heap[(at - 1) // 2]
        net.heap[at], rows.place[above] = above, at
        at = (at - 1) // 2
    net.heap[at], rows.place[row] = row, at


@njit(cache=True)
def _sift_down(rows, net, at):
    row, end = net.heap[at], net.counter[HEAP]
    while 2 * at + 1 < end:
        below = 2 * at + 1
        if below + 1 < end and _before(rows, net.heap[below + 1], net.heap[below]):
            below += 1
        if not _before(rows, net.heap[below], row):
            break
        moved = net.heap[below]
        net.heap[at], rows.place[moved] = moved, at
        at = below
    net.heap[at], rows.place[row] = row, at
