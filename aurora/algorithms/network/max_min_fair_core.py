"""Compiled core of the switch: which flows may start, their max-min fair rates with incast, and when each ends.

A flow is a row of an all-to-all's order. A resource is a port or a NIC, for one direction; a row uses one of each kind at most:
0 its sending port, 1 its receiving port and, between servers, 2 the NIC that sends and 3 the one that receives. After a change,
only the rates of flows that share resources with it, directly or through other flows, are computed again.

Python calls `join` and `run` with a SwitchState, which holds all arrays; max_min_fair_core.pxd says what is in them.
The functions below them only fill arrays, without the GIL.
"""

import cython
import numpy as np
from cython import cast, cclass, cfunc, declare, exceptval, final, nogil

if cython.compiled:
    from cython.cimports.aurora.algorithms.core_arrays import *
else:
    from aurora.algorithms.core_arrays import *

SAME_TIME = declare(Float, 1 + 1e-12)  # flows that end within this factor of each other end at the same time
LEAST_GOODPUT = declare(Float, 0.1)  # part of a receiving port's rate that incast leaves at least
LAST_STAGE = declare(Int, 2**63 - 1)
INF = declare(Float, float("inf"))


def _dtype(several, whole, real):
    """NumPy's type of a struct in max_min_fair_core.pxd, by names: members of several integers, of one, and of one float."""
    integers = [*((name, np.int64, length) for name, length in several.items()), *((name, np.int64) for name in whole.split())]
    return np.dtype(integers + [(name, np.float64) for name in real.split()])


ROW = _dtype(
    {"rank": 2, "use": 4, "next": 4, "prev": 4},
    "slot bytes stage tier admitted stamp",
    "limit_Bps startup_s left_bytes since_s rate_Bps start_s end_s",
)
QUEUE = _dtype({}, "at stop free", "")
MEMBER = _dtype({"unfinished": 2}, "stage under_way", "")
RESOURCE = _dtype({}, "kind head flows stamp unfixed found dirty", "capacity_Bps spare_Bps")
PART = _dtype({}, "row", "start_s end_s rate_Bps carried_bytes")


@final
@cclass
class SwitchState:
    """The rows, queues and resources of a switch, its clock, which starts at zero, and its counts.

    Args:
        resources: (R,) RESOURCE, all that rows can use.
        kinds: how many kinds of resources there are: 2, or 4 with NICs.
        incast: part of its rate that a receiving port loses for each flow beyond the first.
        logging: whether the log is kept.
    """

    def __init__(self, resources, kinds: Index, incast: Float, logging: cython.bint):
        self.resources = resources if cython.compiled else resources.view(np.recarray)
        self.kinds, self.incast, self.logging = kinds, incast, logging
        self.last_stamp = self.dirty = self.under_way = self.ended = self.logged = 0
        self.now_s = 0.0

    def hold(self, rows, turns, queues, members, done, event_s, log) -> None:
        """Takes larger arrays, with all that the ones before held.

        Args:
            rows: (X,) ROW.
            turns: (3, X) int64, the rows by side, all-to-all, rank and tier, in the sequence in which each port admits them;
                and scratch.
            queues: (slots, 2, G, T) QUEUE, by all-to-all, side, rank and tier. An all-to-all of fewer tiers has no rows in
                the others.
            members: (slots, G) MEMBER.
            done: (slots * G, 2) int64, all-to-all and rank for each rank that has just finished an all-to-all.
            event_s: (2 P,) float64, a tournament tree of `_set_event`: its last P are when each row's start-up or the row
                itself ends, and the others are set here.
            log: PART of rows, in the sequence in which they ended; empty if it is not kept.
        """
        if not cython.compiled:
            rows, queues, members, log = (array.view(np.recarray) for array in (rows, queues, members, log))
        self.rows, self.turns, self.queues, self.members, self.done = rows, turns, queues, members, done
        self.event_s, self.log = event_s, log
        at: Index
        for at in range(self.event_s.shape[0] // 2 - 1, 0, -1):
            self.event_s[at] = min(self.event_s[2 * at], self.event_s[2 * at + 1])


def join(state: SwitchState, slot: Index, rank: Index):
    """Adds a rank to the all-to-all with number `slot`; returns whether it has something to send or receive."""
    with nogil:
        _join(state, slot, rank)
    return _is_unfinished(state, slot, rank)


@cython.locals(reached=cython.bint)
def run(state: SwitchState, until_s: Float):
    """Advances the simulated time until a rank has ended an all-to-all, or to until_s.

    Returns the all-to-all and the rank for each such end; None if the log was full, so that the caller must enlarge it and
    call again.
    """
    with nogil:
        reached = _run(state, until_s)
    if not reached:
        return None
    ended, state.ended = state.ended, 0
    return [(int(state.done[at, 0]), int(state.done[at, 1])) for at in range(ended)]


@cfunc
@nogil
@exceptval(check=False)
def _is_unfinished(state: SwitchState, slot: Index, rank: Index) -> cython.bint:
    """Returns whether a rank has rows of the all-to-all that have not ended."""
    return state.members[slot, rank].unfinished[0] > 0 or state.members[slot, rank].unfinished[1] > 0


@cfunc
@nogil
@exceptval(check=False)
def _join(state: SwitchState, slot: Index, rank: Index) -> cython.void:
    _enter_stage(state, slot, rank)
    _admit_all(state, slot, rank)


@cfunc
@nogil
@exceptval(check=False)
@cython.locals(now_s=Float, ended=Index, row=Index)
def _run(state: SwitchState, until_s: Float) -> cython.bint:
    """Runs as `run` does; returns False if the log was full."""
    while True:
        if state.logging and state.logged + 2 * state.under_way > state.log.shape[0]:
            return False
        _update_rates(state)
        if state.ended > 0:
            return True
        if state.event_s[1] == INF or state.event_s[1] > until_s:
            if until_s < INF:
                state.now_s = until_s
            return True
        now_s = state.now_s = max(state.event_s[1], state.now_s)
        ended = 0
        while state.event_s[1] <= now_s * SAME_TIME:
            row = _first_event(state)
            _set_event(state, row, INF)
            if state.rows[row].rate_Bps < 0:
                _enter(state, row)
            else:
                state.turns[2, ended] = row
                ended += 1
        for at in range(ended):
            _leave(state, state.turns[2, at])
        for at in range(ended):
            _finish(state, state.turns[2, at])
        for at in range(ended):
            row = state.turns[2, at]
            for side in range(2):
                slot, rank = state.rows[row].slot, state.rows[row].rank[side]
                if _enter_stage(state, slot, rank):
                    _admit_all(state, slot, rank)
                else:
                    _admit(state, slot, side, rank, state.rows[row].tier)


@cfunc
@nogil
@exceptval(check=False)
def _finish(state: SwitchState, row: Index) -> cython.void:
    """Frees the ports of a row that has ended, for the next ones, and notes whose last row it was."""
    slot, tier = state.rows[row].slot, state.rows[row].tier
    for side in range(2):
        rank = state.rows[row].rank[side]
        state.queues[slot, side, rank, tier].free += 1
        state.members[slot, rank].under_way -= 1
        state.members[slot, rank].unfinished[side] -= 1
        if not _is_unfinished(state, slot, rank):
            state.done[state.ended, 0], state.done[state.ended, 1] = slot, rank
            state.ended += 1


@cfunc
@nogil
@exceptval(check=False)
def _enter_stage(state: SwitchState, slot: Index, rank: Index) -> cython.bint:
    """Enters the rank's next stage if nothing of the present one is left; returns whether the stage changed."""
    if state.members[slot, rank].under_way > 0:
        return False
    stage: Int = LAST_STAGE
    for side in range(2):
        for tier in range(state.queues.shape[3]):
            at = state.queues[slot, side, rank, tier].at
            if at < state.queues[slot, side, rank, tier].stop:
                stage = min(stage, state.rows[state.turns[side, at]].stage)
    changed: cython.bint = stage != state.members[slot, rank].stage
    state.members[slot, rank].stage = stage
    return changed


@cfunc
@nogil
@exceptval(check=False)
def _admit_all(state: SwitchState, slot: Index, rank: Index) -> cython.void:
    """Admits the next rows of all ports of a rank."""
    for side in range(2):
        for tier in range(state.queues.shape[3]):
            _admit(state, slot, side, rank, tier)


@cfunc
@nogil
@exceptval(check=False)
def _admit(state: SwitchState, slot: Index, side: Index, rank: Index, tier: Index) -> cython.void:
    """Admits the next rows of a port's stage while more may be under way; a row starts once both ends have admitted it."""
    at, stop = state.queues[slot, side, rank, tier].at, state.queues[slot, side, rank, tier].stop
    while at < stop:
        row = state.turns[side, at]
        if state.queues[slot, side, rank, tier].free == 0 or state.rows[row].stage > state.members[slot, rank].stage:
            break
        state.members[slot, rank].under_way += 1
        state.queues[slot, side, rank, tier].free -= 1
        state.rows[row].admitted += 1
        if state.rows[row].admitted == 2:
            state.rows[row].start_s = state.now_s
            state.under_way += 1
            if state.rows[row].startup_s > 0:
                state.rows[row].rate_Bps = -1.0
                _set_event(state, row, state.now_s + state.rows[row].startup_s)
            else:
                _enter(state, row)
        at += 1
    state.queues[slot, side, rank, tier].at = at


@cfunc
@nogil
@exceptval(check=False)
def _enter(state: SwitchState, row: Index) -> cython.void:
    """Adds the row to its resources: from now on it shares them."""
    state.rows[row].rate_Bps = 0.0
    state.rows[row].since_s = state.now_s
    for kind in range(state.kinds):
        resource = state.rows[row].use[kind]
        if resource >= 0:
            first = state.resources[resource].head
            state.rows[row].next[kind], state.rows[row].prev[kind] = first, -1
            if first >= 0:
                state.rows[first].prev[kind] = row
            state.resources[resource].head = row
            state.resources[resource].flows += 1
            _mark(state, resource)


@cfunc
@nogil
@exceptval(check=False)
def _leave(state: SwitchState, row: Index) -> cython.void:
    """Ends the row and removes it from its resources."""
    if state.logging:
        _log(state, row, cast(Float, state.rows[row].bytes))
    state.rows[row].left_bytes, state.rows[row].end_s = 0.0, state.now_s
    state.under_way -= 1
    for kind in range(state.kinds):
        resource = state.rows[row].use[kind]
        if resource >= 0:
            before, after = state.rows[row].prev[kind], state.rows[row].next[kind]
            if before >= 0:
                state.rows[before].next[kind] = after
            else:
                state.resources[resource].head = after
            if after >= 0:
                state.rows[after].prev[kind] = before
            state.resources[resource].flows -= 1
            _mark(state, resource)


@cfunc
@nogil
@exceptval(check=False)
def _mark(state: SwitchState, resource: Index) -> cython.void:
    """Notes that the flows of a resource changed."""
    if state.resources[resource].stamp >= 0:
        state.resources[resource].stamp = -1
        state.resources[state.dirty].dirty = resource
        state.dirty += 1


@cfunc
@nogil
@exceptval(check=False)
def _update_rates(state: SwitchState) -> cython.void:
    """Computes the rates of all flows that are connected to a resource that changed."""
    for at in range(state.dirty):
        resource = state.resources[at].dirty
        if state.resources[resource].stamp < 0:
            state.last_stamp += 1
            _fill(state, resource)
    state.dirty = 0


@cfunc
@nogil
@exceptval(check=False)
@cython.locals(found=Index, flows=Index, level=Float, rate_Bps=Float, tightest=Index, kind=Index, row=Index, before=Index)
def _fill(state: SwitchState, seed: Index) -> cython.void:
    """Progressive filling of all that is connected to a resource: fixes the flows of the tightest resource, then of the next.

    A fixed row's stamp is negative.
    """
    found, flows = _component(state, seed)
    left: Index = flows
    any_limited: cython.bint = False
    for at in range(flows):
        any_limited = any_limited or state.rows[state.turns[2, at]].limit_Bps < INF
    while left > 0:
        level, tightest = INF, -1
        for at in range(found):
            resource = state.resources[at].found
            if state.resources[resource].unfixed > 0:
                rate_Bps = state.resources[resource].spare_Bps / state.resources[resource].unfixed
                if rate_Bps < level or (rate_Bps == level and resource < tightest):
                    level, tightest = rate_Bps, resource
        before = left
        if any_limited:
            for at in range(flows):
                row = state.turns[2, at]
                if state.rows[row].stamp > 0 and state.rows[row].limit_Bps <= level:
                    _fix(state, row, state.rows[row].limit_Bps)
                    left -= 1
        if left == before:
            kind, row = state.resources[tightest].kind, state.resources[tightest].head
            while row >= 0:
                if state.rows[row].stamp > 0:
                    _fix(state, row, level)
                    left -= 1
                row = state.rows[row].next[kind]


@cfunc
@nogil
@exceptval(check=False)
def _component(state: SwitchState, seed: Index) -> tuple[Index, Index]:
    """Finds the resources and rows that are connected to `seed`, in Resource.found and turns[2]; returns how many of each."""
    found: Index = _find(state, seed, 0)
    flows: Index = 0
    at: Index = 0
    while at < found:
        kind, row = state.resources[state.resources[at].found].kind, state.resources[state.resources[at].found].head
        while row >= 0:
            if state.rows[row].stamp != state.last_stamp:
                state.rows[row].stamp = state.last_stamp
                state.turns[2, flows] = row
                flows += 1
                for other in range(state.kinds):
                    resource = state.rows[row].use[other]
                    if resource >= 0 and state.resources[resource].stamp != state.last_stamp:
                        found = _find(state, resource, found)
            row = state.rows[row].next[kind]
        at += 1
    return found, flows


@cfunc
@nogil
@exceptval(check=False)
def _find(state: SwitchState, resource: Index, found: Index) -> Index:
    """Adds a resource, with all that it carries to spare, to those of a component; returns how many there are now."""
    flows = state.resources[resource].flows
    state.resources[found].found, state.resources[resource].stamp = resource, state.last_stamp
    state.resources[resource].spare_Bps, state.resources[resource].unfixed = state.resources[resource].capacity_Bps, flows
    if state.resources[resource].kind == 1:
        state.resources[resource].spare_Bps *= max(1 - state.incast * (flows - 1), LEAST_GOODPUT)
    return found + 1


@cfunc
@nogil
@exceptval(check=False)
def _fix(state: SwitchState, row: Index, rate_Bps: Float) -> cython.void:
    """Sets the row's rate from now on."""
    state.rows[row].stamp = -state.rows[row].stamp
    for kind in range(state.kinds):
        resource = state.rows[row].use[kind]
        if resource >= 0:
            state.resources[resource].spare_Bps = max(state.resources[resource].spare_Bps - rate_Bps, 0.0)
            state.resources[resource].unfixed -= 1
    old_Bps = state.rows[row].rate_Bps
    if rate_Bps == old_Bps:
        return
    state.rows[row].left_bytes -= old_Bps * (state.now_s - state.rows[row].since_s)
    if state.logging and old_Bps > 0:
        _log(state, row, state.rows[row].bytes - state.rows[row].left_bytes)
    state.rows[row].since_s, state.rows[row].rate_Bps = state.now_s, rate_Bps
    _set_event(state, row, state.now_s + max(state.rows[row].left_bytes, 0.0) / rate_Bps)


@cfunc
@nogil
@exceptval(check=False)
def _log(state: SwitchState, row: Index, carried_bytes: Float) -> cython.void:
    """Appends the part of a row that ends now to the log."""
    at = state.logged
    state.log[at].row, state.log[at].carried_bytes = row, carried_bytes
    state.log[at].start_s, state.log[at].end_s = state.rows[row].since_s, state.now_s
    state.log[at].rate_Bps = state.rows[row].rate_Bps
    state.logged += 1


@cfunc
@nogil
@exceptval(check=False)
def _set_event(state: SwitchState, row: Index, at_s: Float) -> cython.void:
    """Sets when a row's event is; infinity: it has none.

    Of 2 P times, the last P are those of rows; time i before is the earlier of times 2 i and 2 i + 1, so that time 1 is the
    earliest of all. P is a power of two.
    """
    at: Index = state.event_s.shape[0] // 2 + row
    state.event_s[at] = at_s
    while at > 1:
        at >>= 1
        earlier_s = min(state.event_s[2 * at], state.event_s[2 * at + 1])
        if state.event_s[at] == earlier_s:
            break
        state.event_s[at] = earlier_s


@cfunc
@nogil
@exceptval(check=False)
def _first_event(state: SwitchState) -> Index:
    """The row with the earliest event; among equal times, the first."""
    places: Index = state.event_s.shape[0] // 2
    at: Index = 1
    while at < places:
        at *= 2
        if state.event_s[at] > state.event_s[1]:
            at += 1
    return at - places
