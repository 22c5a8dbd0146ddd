"""Compiled core of the switch: which flows may start, their max-min fair rates with incast, and when each ends.

A flow is a row of an all-to-all's order. A resource is a port or a NIC, for one direction. After a change, only the
rates of flows that share resources with it, directly or through other flows, are computed again. Without numba's JIT
(NUMBA_DISABLE_JIT=1) the same code runs in plain Python.
"""

from typing import NamedTuple

import numpy as np

from aurora.types.arrays import FloatArray, IntArray
from aurora.types.compiled import njit

SENDS, RECVS = 0, 1
SAME_TIME = 1 + 1e-12  # flows that end within this factor of each other end at the same time
LEAST_GOODPUT = 0.1  # part of a receiving port's rate that incast leaves at least
UNDER_WAY, STAMP, DIRTY, DONE, LOGGED = range(5)  # indices into SharedResources.counter


class FlowRows(NamedTuple):
    """The rows (transfers) of all all-to-alls under way, as columns (X,); `next` and `prev` are (X, K)."""

    src: IntArray  # sending rank
    dst: IntArray  # receiving rank
    slot: IntArray  # the number of the row's all-to-all
    bytes: IntArray  # bytes of the row
    stage: IntArray  # the row's stage; 0 unless the all-to-all runs in stages
    tier: IntArray  # the row's tier in its order
    admitted: IntArray  # how many of the row's two ends have admitted it, 0 to 2
    stamp: IntArray  # the last connected component in which the row was found; negative once its rate is fixed there
    limit_Bps: FloatArray  # the rate that the row never exceeds; infinite if it has no limit
    startup_s: FloatArray  # seconds of start-up before bytes flow
    left_bytes: FloatArray  # bytes still to carry, as of since_s
    since_s: FloatArray  # since when the row has its present rate
    rate_Bps: FloatArray  # the present rate; negative during start-up
    start_s: FloatArray  # when the row started, before its start-up
    end_s: FloatArray  # when the row ended
    next: IntArray  # the next row on the k-th resource of the row, -1 if none
    prev: IntArray  # the row before on the k-th resource of the row, -1 if none


class PortQueues(NamedTuple):
    """The rows that each port has yet to admit, in order.

    Shapes are (slots, 2, G, T), by all-to-all, direction (SENDS, RECVS), rank and tier, unless said. An all-to-all of fewer
    tiers has no rows in the others.
    """

    row: IntArray  # (2, X), the rows by direction, all-to-all, rank and tier, each port's rows in their order
    at: IntArray  # index in `row` of the first row that the port has not admitted
    stop: IntArray  # index in `row` after the port's last row
    free: IntArray  # how many more transfers the port may have under way
    unfinished: IntArray  # (slots, 2, G), how many of the rank's rows have not ended
    stage: IntArray  # (slots, G), the stage that a rank is in
    under_way: IntArray  # (slots, G), how many rows a rank has admitted, as sender or receiver, that have not ended


class SharedResources(NamedTuple):
    """The resources of the network, the clock and scratch memory. Arrays are (R,), one entry per resource, unless said."""

    capacity_Bps: FloatArray  # bytes per second that the resource carries
    use: IntArray  # (G, G, K), the resources of each pair, as in Routes; -1 where there are fewer
    head: IntArray  # the first row on the resource, -1 if none
    flows: IntArray  # how many rows are on the resource
    unfixed: IntArray  # scratch, how many flows have no fixed rate yet
    stamp: IntArray  # the last connected component in which the resource was found; -1 if its flows changed since
    found: IntArray  # scratch, the resources of a component
    dirty: IntArray  # the resources whose flows changed since rates were last computed
    spare_Bps: FloatArray  # scratch, bytes per second that flows with fixed rates leave
    event_s: FloatArray  # (2 P,), when each row's start-up or the row itself ends, as a tournament tree of `set_event`
    rows: IntArray  # (X,), scratch, indices of rows
    done: IntArray  # (slots * G, 2), (all-to-all, rank) for each rank that has just finished an all-to-all
    counter: IntArray  # (5,), rows under way, the last stamp, the lengths of dirty, done and log, at the indices UNDER_WAY, ...
    now_s: FloatArray  # (1,), the present time
    incast: FloatArray  # (1,), part of its rate that a receiving port loses for each flow beyond the first


class RateLog(NamedTuple):
    """The parts of rows that flowed at one rate, in the order in which they ended."""

    row: IntArray
    start_s: FloatArray
    end_s: FloatArray
    rate_Bps: FloatArray
    carried_bytes: FloatArray  # bytes of the row carried up to end_s, earlier parts included


@njit(cache=True, allocates=False)
def join(rows: FlowRows, queues: PortQueues, net: SharedResources, slot: int, rank: int) -> None:
    """Adds a rank to the all-to-all with number `slot`; see `Switch.join`."""
    _enter_stage(rows, queues, slot, rank)
    _admit_all(rows, queues, net, slot, rank)


@njit(cache=True, allocates=False, nogil=True, error_model="numpy")
def run(rows: FlowRows, queues: PortQueues, net: SharedResources, log: RateLog, logging: bool, until_s: float) -> bool:
    """Advances the simulated time until a rank has ended an all-to-all, or to until_s; see `Switch.run`.

    Returns True if that time was reached; False if `log` was full, so that the caller must enlarge it and call again. `log` is
    filled only if `logging` is true.
    """
    count = net.counter
    while True:
        if logging and count[LOGGED] + 2 * count[UNDER_WAY] > log.row.shape[0]:
            return False
        _update_rates(rows, net, log, logging)
        if count[DONE] > 0:
            return True
        if net.event_s[1] == np.inf or net.event_s[1] > until_s:
            if until_s < np.inf:
                net.now_s[0] = until_s
            return True
        now_s = max(net.event_s[1], net.now_s[0])
        net.now_s[0] = now_s
        ended = 0
        while net.event_s[1] <= now_s * SAME_TIME:
            row = first_event(net.event_s)
            set_event(net.event_s, row, np.inf)
            if rows.rate_Bps[row] < 0:
                _enter(rows, net, row)
            else:
                net.rows[ended] = row
                ended += 1
        for at in range(ended):
            _leave(rows, net, log, logging, net.rows[at])
        for at in range(ended):
            row = net.rows[at]
            slot = rows.slot[row]
            queues.free[slot, SENDS, rows.src[row], rows.tier[row]] += 1
            queues.free[slot, RECVS, rows.dst[row], rows.tier[row]] += 1
            for side, rank in ((SENDS, rows.src[row]), (RECVS, rows.dst[row])):
                queues.under_way[slot, rank] -= 1
                queues.unfinished[slot, side, rank] -= 1
                if queues.unfinished[slot, SENDS, rank] == 0 and queues.unfinished[slot, RECVS, rank] == 0:
                    net.done[count[DONE], 0], net.done[count[DONE], 1] = slot, rank
                    count[DONE] += 1
        for at in range(ended):
            row = net.rows[at]
            slot = rows.slot[row]
            for freed, rank in ((SENDS, rows.src[row]), (RECVS, rows.dst[row])):
                if _enter_stage(rows, queues, slot, rank):
                    _admit_all(rows, queues, net, slot, rank)
                else:
                    _admit(rows, queues, net, slot, freed, rank, rows.tier[row])


@njit(cache=True, allocates=False, nogil=True, error_model="numpy")
def perform(
    rows: FlowRows, queues: PortQueues, net: SharedResources, log: RateLog, logging: bool, slot_S: IntArray, step_G: IntArray
) -> bool:
    """Advances the simulated time until every rank has run a sequence of all-to-alls, one after the other.

    Args:
        rows, queues, net, log, logging: as in `run`.
        slot_S: (S,) numbers of the all-to-alls, in sequence.
        step_G: (G,) how many of these each rank has ended, -1 before it joins the first; changed in place.

    Returns:
        True; False if `log` was full, as in `run`.
    """
    count = net.counter
    for rank in range(len(step_G)):
        if step_G[rank] < 0:
            _join_next(rows, queues, net, slot_S, step_G, rank)
    while count[UNDER_WAY] > 0:
        if not run(rows, queues, net, log, logging, np.inf):
            return False
        for at in range(count[DONE]):
            _join_next(rows, queues, net, slot_S, step_G, net.done[at, 1])
        count[DONE] = 0
    return True


@njit(cache=True, allocates=False)
def _join_next(rows, queues, net, slot_S, step_G, rank):
    """Lets a rank that has ended an all-to-all join the next one in which it has anything to send or receive."""
    step_G[rank] += 1
    while step_G[rank] < len(slot_S):
        slot = slot_S[step_G[rank]]
        join(rows, queues, net, slot, rank)
        if queues.unfinished[slot, SENDS, rank] > 0 or queues.unfinished[slot, RECVS, rank] > 0:
            return
        step_G[rank] += 1


@njit(cache=True, allocates=False, inline="always")
def _enter_stage(rows, queues, slot, rank):
    """Enters the rank's next stage if nothing of the present one is left; returns whether the stage changed."""
    if queues.under_way[slot, rank] > 0:
        return False
    stage = np.iinfo(np.int64).max
    for side in (SENDS, RECVS):
        for tier in range(queues.at.shape[3]):
            at = queues.at[slot, side, rank, tier]
            if at < queues.stop[slot, side, rank, tier]:
                stage = min(stage, rows.stage[queues.row[side, at]])
    changed = stage != queues.stage[slot, rank]
    queues.stage[slot, rank] = stage
    return changed


@njit(cache=True, allocates=False)
def _admit_all(rows, queues, net, slot, rank):
    """Admits the next rows of all ports of a rank."""
    for side in (SENDS, RECVS):
        for tier in range(queues.at.shape[3]):
            _admit(rows, queues, net, slot, side, rank, tier)


@njit(cache=True, allocates=False)
def _admit(rows, queues, net, slot, side, rank, tier):
    """Admits the next rows of a port's stage while more may be under way; a row starts once both ends have admitted it."""
    at, stop = queues.at[slot, side, rank, tier], queues.stop[slot, side, rank, tier]
    while at < stop:
        row = queues.row[side, at]
        if queues.free[slot, side, rank, tier] == 0 or rows.stage[row] > queues.stage[slot, rank]:
            break
        queues.under_way[slot, rank] += 1
        queues.free[slot, side, rank, tier] -= 1
        rows.admitted[row] += 1
        if rows.admitted[row] == 2:
            rows.start_s[row] = net.now_s[0]
            net.counter[UNDER_WAY] += 1
            if rows.startup_s[row] > 0:
                rows.rate_Bps[row] = -1.0
                set_event(net.event_s, row, net.now_s[0] + rows.startup_s[row])
            else:
                _enter(rows, net, row)
        at += 1
    queues.at[slot, side, rank, tier] = at


@njit(cache=True, allocates=False, inline="always")
def _enter(rows, net, row):
    """Adds the row to its resources: from now on it shares them."""
    rows.rate_Bps[row] = 0.0
    rows.since_s[row] = net.now_s[0]
    src, dst = rows.src[row], rows.dst[row]
    for k in range(net.use.shape[2]):
        resource = net.use[src, dst, k]
        if resource >= 0:
            first = net.head[resource]
            rows.next[row, k], rows.prev[row, k] = first, -1
            if first >= 0:
                rows.prev[first, _index(rows, net, first, resource)] = row
            net.head[resource] = row
            net.flows[resource] += 1
            _mark(net, resource)


@njit(cache=True, allocates=False, inline="always")
def _leave(rows, net, log, logging, row):
    """Ends the row and removes it from its resources."""
    now_s = net.now_s[0]
    if logging:
        _log(net, log, row, rows.since_s[row], now_s, rows.rate_Bps[row], float(rows.bytes[row]))
    rows.left_bytes[row], rows.end_s[row] = 0.0, now_s
    net.counter[UNDER_WAY] -= 1
    src, dst = rows.src[row], rows.dst[row]
    for k in range(net.use.shape[2]):
        resource = net.use[src, dst, k]
        if resource >= 0:
            before, after = rows.prev[row, k], rows.next[row, k]
            if before >= 0:
                rows.next[before, _index(rows, net, before, resource)] = after
            else:
                net.head[resource] = after
            if after >= 0:
                rows.prev[after, _index(rows, net, after, resource)] = before
            net.flows[resource] -= 1
            _mark(net, resource)


@njit(cache=True, allocates=False, inline="always")
def _index(rows, net, row, resource):
    """Returns k such that `resource` is the row's k-th."""
    src, dst = rows.src[row], rows.dst[row]
    k = 0
    while net.use[src, dst, k] != resource:
        k += 1
    return k


@njit(cache=True, allocates=False, inline="always")
def _mark(net, resource):
    """Notes that the flows of a resource changed."""
    if net.stamp[resource] >= 0:
        net.stamp[resource] = -1
        net.dirty[net.counter[DIRTY]] = resource
        net.counter[DIRTY] += 1


@njit(cache=True, allocates=False, inline="always")
def _update_rates(rows, net, log, logging):
    """Computes the rates of all flows that are connected to a resource that changed."""
    count = net.counter
    for at in range(count[DIRTY]):
        resource = net.dirty[at]
        if net.stamp[resource] < 0:
            count[STAMP] += 1
            resources, flows = _component(rows, net, resource, count[STAMP])
            if flows > 0:
                _fill(rows, net, log, logging, resources, flows)
    count[DIRTY] = 0


@njit(cache=True, allocates=False, inline="always")
def _component(rows, net, seed, stamp):
    """Writes the resources and rows connected to `seed` to net.found and net.rows; returns how many there are of each."""
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
                    if other >= 0 and net.stamp[other] != stamp:
                        net.stamp[other] = stamp
                        net.found[resources] = other
                        resources += 1
            row = rows.next[row, _index(rows, net, row, resource)]
        at += 1
    return resources, flows


@njit(cache=True, allocates=False, inline="always")
def _fill(rows, net, log, logging, resources, flows):
    """Progressive filling: fix the flows of the tightest resource, then of the next; a fixed row's stamp is negative."""
    senders = net.use.shape[0]
    for at in range(resources):
        resource = net.found[at]
        net.spare_Bps[resource], net.unfixed[resource] = net.capacity_Bps[resource], net.flows[resource]
        if senders <= resource < 2 * senders:
            net.spare_Bps[resource] *= max(1 - net.incast[0] * (net.flows[resource] - 1), LEAST_GOODPUT)
    any_limited = False
    for at in range(flows):
        row = net.rows[at]
        any_limited |= rows.limit_Bps[row] < np.inf
    remaining = flows
    while remaining > 0:
        level, tightest = np.inf, -1
        for at in range(resources):
            resource = net.found[at]
            if net.unfixed[resource] > 0:
                rate_Bps = net.spare_Bps[resource] / net.unfixed[resource]
                if rate_Bps < level or (rate_Bps == level and resource < tightest):
                    level, tightest = rate_Bps, resource
        limited = 0
        if any_limited:
            for at in range(flows):
                row = net.rows[at]
                if rows.stamp[row] > 0 and rows.limit_Bps[row] <= level:
                    _fix(rows, net, log, logging, row, rows.limit_Bps[row])
                    limited += 1
        remaining -= limited
        if limited == 0:
            row = net.head[tightest]
            while row >= 0:
                if rows.stamp[row] > 0:
                    _fix(rows, net, log, logging, row, level)
                    remaining -= 1
                row = rows.next[row, _index(rows, net, row, tightest)]


@njit(cache=True, allocates=False, inline="always")
def _fix(rows, net, log, logging, row, rate_Bps):
    """Sets the row's rate from now on."""
    rows.stamp[row] = -rows.stamp[row]
    src, dst = rows.src[row], rows.dst[row]
    for k in range(net.use.shape[2]):
        resource = net.use[src, dst, k]
        if resource >= 0:
            net.spare_Bps[resource] = max(net.spare_Bps[resource] - rate_Bps, 0.0)
            net.unfixed[resource] -= 1
    old_Bps = rows.rate_Bps[row]
    if rate_Bps == old_Bps:
        return
    now_s = net.now_s[0]
    rows.left_bytes[row] -= old_Bps * (now_s - rows.since_s[row])
    if logging and old_Bps > 0:
        _log(net, log, row, rows.since_s[row], now_s, old_Bps, rows.bytes[row] - rows.left_bytes[row])
    rows.since_s[row], rows.rate_Bps[row] = now_s, rate_Bps
    set_event(net.event_s, row, now_s + max(rows.left_bytes[row], 0.0) / rate_Bps)


@njit(cache=True, allocates=False, inline="always")
def _log(net, log, row, start_s, end_s, rate_Bps, carried):
    """Appends one part of a row to the log."""
    at = net.counter[LOGGED]
    log.row[at], log.start_s[at], log.end_s[at], log.rate_Bps[at] = row, start_s, end_s, rate_Bps
    log.carried_bytes[at] = carried
    net.counter[LOGGED] = at + 1


@njit(cache=True, allocates=False)
def set_event(event_s: FloatArray, row: int, at_s: float) -> None:
    """Sets when a row's event is; infinity: it has none.

    Of 2 P times, the last P are those of rows; time i before is the earlier of times 2 i and 2 i + 1, so that time 1 is the
    earliest of all. P is a power of two.
    """
    at = len(event_s) // 2 + row
    event_s[at] = at_s
    while at > 1:
        at >>= 1
        earlier_s = min(event_s[2 * at], event_s[2 * at + 1])
        if event_s[at] == earlier_s:
            break
        event_s[at] = earlier_s


@njit(cache=True, allocates=False, inline="always")
def first_event(event_s):
    """The row with the earliest event; among equal times, the first."""
    at = 1
    while at < len(event_s) // 2:
        at *= 2
        if event_s[at] > event_s[1]:
            at += 1
    return at - len(event_s) // 2
