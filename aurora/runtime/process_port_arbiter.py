"""Port arbiter for models that run in separate processes and share the GPUs of one machine.

The state that the processes share is in `aurora.runtime.colocation_table`. A model that is alone there takes no lock.

GPU: one queue per GPU, the most urgent work first, of equally urgent work first come first served. A computation that was
overtaken MOST_OVERTAKEN times goes before all others.

Port: an all-to-all needs all of its ranks, so two ports must not be granted to different models that then wait for each other.
All ports therefore serve exchanges in one sequence. The first rank of a model that comes to the model's i-th exchange draws a
ticket for it. It begins, on the first GPU where it may, by taking the next position in the sequence. It may once

- all exchanges that have a position are over on this GPU, and
- no exchange with a ticket goes before it.

Which exchange with a ticket goes first is decided by fair queueing. Those of interactive models go before others, except one
that MOST_OVERTAKEN of them have overtaken. Among equals the exchange goes first that finishes first in virtual time, then the
one with the smallest ticket. In virtual time an exchange starts when the last begun exchange started, but not before the last
exchange of its own model finished; it finishes 1 / (the model's weight) later. On the other GPUs the exchange waits until all
exchanges with smaller positions are over there.

No deadlock: a position, once taken, stays, and is larger than all before, so every port serves exchanges by position. The
unfinished exchange with the smallest position waits for no other on any port. Its ranks have left all exchanges before it, or
will once they get their GPUs, which no rank keeps while it waits for others. If no exchange with a position is unfinished, the
first of those with a ticket may begin on the GPU of the rank that drew it. No model waits for one that has nothing to send. An
exchange that holds the port gives the next position to its model's next exchange when it is over on the first GPU. Before that
no other exchange can take that position, because it would have to wait there for this one to end.

Alternatives: a lock of rank 0 only, with the grant sent to the others, would cost a message per exchange; strict alternation
would wait for a model that is idle.

Turns: a process that has the GPU or the port, or is next, may leave it unused as long as it lives: it may be stopped, or wait
for a rank that is stopped. A turn that lasts longer than TURN_S is passed on: the others go on as if it were over. If the first
process comes back, two models use the GPU or the port at once; that costs time and changes no answer.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from aurora.algorithms.arbitration import MOST_OVERTAKEN, precedence
from aurora.errors import RankFailed
from aurora.runtime.colocation_table import DRAWN, GPU, MODELS, PORT, STARTED, ColocationTable
from aurora.runtime.port_arbiter import GatherNumber
from aurora.types import SlicePolicy
from aurora.types.program import INTERACTIVE_LEVEL

LOG = logging.getLogger("aurora.run")
TURN_S = 5.0  # how long others wait for one use of the GPU or the port
POLL_S = 0.02  # how long a waiting process sleeps before it looks whether the processes before it live
LOOK_S = 1.0  # how often a process that shares the table looks whether the others live
TIME_UNIT = 1 << 20  # virtual time of an exchange of a model of weight 1
NAMES = {GPU: "GPU", PORT: "port"}
Turn = tuple[int, int]  # a model's slot, and its ticket for the GPU or the number of its exchange


class ProcessPortArbiter:
    """PortArbiter of one model on one GPU, for models that run in separate processes.

    Every rank of the model creates one; all ranks must have created theirs before any is used.

    Args:
        folder: the folder shared with the other models' processes, which only this user can write to; see `colocation_folder`.
        gpu: number of the GPU on this machine.
        slot: the model's slot in the colocation table. Rank 0 passes None and gets a free slot; the other ranks pass that slot.
        finish: called before the GPU or the port is released to other models; must wait for the submitted GPU work.
        turn_s: seconds after which another model that holds the GPU or the port, or is next, is skipped.
        policy: how the model shares the GPUs and ports, the same on all of its ranks.

    Attributes:
        slot: the model's slot.

    Raises:
        BadInput: if no slot is left or the folder cannot be used.
    """

    def __init__(
        self,
        folder: Path,
        gpu: int,
        slot: int | None = None,
        finish: Callable[[], None] = lambda: None,
        turn_s: float = TURN_S,
        policy: SlicePolicy = SlicePolicy(),
    ) -> None:
        self._table = ColocationTable(folder, gpu, slot)
        self.slot, self._counters = self._table.slot, self._table.counters
        self._gpu, self._finish, self._turn_s = gpu, finish, turn_s
        self._interactive, self._slice_time = int(policy.interactive), max(1, TIME_UNIT // policy.weight)
        self._alone = self._table.own_bit  # what counters[MODELS] is if no other model is here and this one has not failed
        self._was_alone, self._level, self._look_s = True, 0, 0.0
        self._passed_on: dict[Turn, int] = {}  # by what is waited for and slot: which turn lasted too long
        self._failure: BaseException | None = None

    @property
    def exclusive(self) -> bool:
        """True if no other model shares these GPUs."""
        return self._counters[MODELS] == self._alone

    @property
    def joins(self) -> bool:
        """False: `join` is never needed, because a model takes part by drawing a ticket."""
        return False

    @property
    def most_ahead(self) -> int:
        """Largest number of exchanges that one rank may be ahead of another; see `PortArbiter.most_ahead`."""
        return DRAWN // 2

    # The GPU

    def start_compute(self, level: int = 0) -> None:
        """Waits for the GPU; see `PortArbiter.start_compute`."""
        table, slot = self._table, self.slot
        self._level = level = INTERACTIVE_LEVEL if self._interactive else level
        if self._counters[MODELS] == self._alone:
            table.ticket_M[slot] = table.has_M[slot] = 1  # this ticket is smaller than all that are drawn
            if self._counters[MODELS] == self._alone:
                self._was_alone = True
                return
        with table.lock:
            self._share()
            table.has_M[slot] = table.overtaken_M[slot] = 0
            table.ticket_M[slot], table.level_M[slot] = table.draw(), level
            first = self._try_gpu()
        if first is not None:
            self._wait(GPU, self._try_gpu)

    def yield_to_priority(self, on_yield: Callable[[], None]) -> bool:
        """Lets waiting work of a higher level run first; see `PortArbiter.yield_to_priority`."""
        table, slot = self._table, self.slot
        if self._counters[MODELS] == self._alone or not any(
            table.level_M[other] > self._level for other in table.others() if table.ticket_M[other] and not table.has_M[other]
        ):
            return False
        self._finish()
        on_yield()
        with table.lock:
            self._share()
            table.has_M[slot] = 0
            table.level_M[slot] = self._level
            waiting = table.waiting(GPU)
        table.wake(waiting)
        self._wait(GPU, self._try_gpu)
        return True

    def stop_compute(self) -> None:
        """Releases the GPU. If other models share it, first waits until the work submitted to it has finished."""
        table, slot = self._table, self.slot
        if self._counters[MODELS] == self._alone:
            table.has_M[slot] = table.ticket_M[slot] = 0
            if self._counters[MODELS] == self._alone:
                return
        self._finish()
        with table.lock:
            table.has_M[slot] = table.ticket_M[slot] = 0
            waiting = table.waiting(GPU)
        table.wake(waiting)

    def _try_gpu(self) -> Turn | None:
        """Takes the GPU, or returns the turn that comes first. Under the table's lock."""
        table, slot = self._table, self.slot
        ticket, mine, before = table.ticket_M[slot], self._precedence(slot), []
        for other in table.others():
            theirs = table.ticket_M[other]
            if theirs and table.here_M[other] and self._passed_on.get((GPU, other)) != theirs:
                key = self._precedence(other)
                if table.has_M[other] or key < mine:
                    before.append((not table.has_M[other], key, other, theirs))
        if before:
            *_, other, theirs = min(before)
            return other, theirs
        table.has_M[slot], table.overtaken_M[slot] = 1, 0
        for other in table.others():
            if not table.has_M[other] and 0 < table.ticket_M[other] < ticket:
                table.overtaken_M[other] += 1
        return None

    def _precedence(self, slot: int) -> tuple[bool, int, int]:
        table = self._table
        return precedence(table.level_M[slot], table.ticket_M[slot], table.overtaken_M[slot])

    # The port

    @contextmanager
    def exchange(self, hold_port: bool = False) -> Iterator[None]:
        """Context manager that grants this model the port; see `PortArbiter.exchange`."""
        self._begin_exchange()
        failed = True
        try:
            yield
            failed = False
        finally:
            self._end_exchange(hold_port, failed)

    def _begin_exchange(self) -> None:
        table, slot = self._table, self.slot
        number = table.done_M[slot]
        if self._counters[MODELS] == self._alone:
            table.entered_M[slot] = number + 1
            if self._counters[MODELS] == self._alone:
                self._was_alone = True
                return
        with table.lock:
            self._share()
            begun = table.begun_M[slot]
            assert begun - number <= DRAWN, "a rank fell behind"
            if number == begun and not table.wants_M[slot]:
                table.wants_M[slot], table.interactive_M[slot], table.late_M[slot] = table.draw(), self._interactive, 0
                start = max(self._counters[STARTED + self._interactive], table.finish_M[slot])
                table.next_finish_M[slot] = start + self._slice_time
            first = self._try_port()
        if first is not None:
            self._wait(PORT, self._try_port)

    def _try_port(self) -> Turn | None:
        """Takes the port, or returns the turn that comes first. Under the table's lock."""
        table, slot = self._table, self.slot
        number = table.done_M[slot]
        begins = number == table.begun_M[slot]
        mine = self._exchange_key(slot) if begins else (-1, table.position_MD[slot * DRAWN + number % DRAWN], 0)
        before = []
        for other in table.others():
            exchange = table.done_M[other]
            if not table.here_M[other] or self._passed_on.get((PORT, other)) == exchange:
                continue
            if exchange < table.begun_M[other]:
                key = (-1, table.position_MD[other * DRAWN + exchange % DRAWN], 0)
            elif table.wants_M[other]:
                key = self._exchange_key(other)
            else:
                continue
            if key < mine:
                before.append((key, other, exchange))
        if before:
            _, other, exchange = min(before)
            return other, exchange
        if begins:
            started = STARTED + self._interactive
            self._counters[started] = max(self._counters[started], table.next_finish_M[slot] - self._slice_time)
            table.finish_M[slot] = table.next_finish_M[slot]
            for other in table.others() if self._interactive else ():
                if 0 < table.wants_M[other] < table.wants_M[slot] and not table.interactive_M[other]:
                    table.late_M[other] += 1
            table.begin(slot, number)
        return None

    def _exchange_key(self, slot: int) -> tuple[int, int, int]:
        """Of exchanges that have not begun the smallest goes first; those that have begun have -1 and their position."""
        table = self._table
        if table.late_M[slot] >= MOST_OVERTAKEN:
            return 0, 0, table.wants_M[slot]
        return 1 if table.interactive_M[slot] else 2, table.next_finish_M[slot], table.wants_M[slot]

    def _end_exchange(self, hold_port: bool, failed: bool) -> None:
        table, slot = self._table, self.slot
        number = table.done_M[slot]
        if self._counters[MODELS] == self._alone:
            if hold_port and not failed:
                table.entered_M[slot] = number + 2  # who joins now lets the next exchange follow this one
            table.done_M[slot] = number + 1
            if self._counters[MODELS] == self._alone:
                return
        try:
            if not failed:
                self._finish()
        except BaseException:
            hold_port = False
            raise
        finally:
            with table.lock:
                table.done_M[slot] = number + 1
                if hold_port and not failed and table.begun_M[slot] == number + 1:
                    table.begin(slot, number + 1)  # the next exchange follows this one on every port
                waiting = table.waiting(PORT)
            table.wake(waiting)

    # Waiting

    def _share(self) -> None:
        """Readies the table for this model, which may have been alone until now. Under the table's lock.

        Raises:
            RankFailed: if `abort` was called.
        """
        self._check_failure()
        if self._was_alone:
            self._was_alone = False
            self._table.record_begun()
        now_s = time.monotonic()
        if now_s > self._look_s:
            self._look_s = now_s + LOOK_S
            self._table.remove_dead()

    def _wait(self, resource: int, attempt: Callable[[], Turn | None]) -> None:
        """Waits until no living process has a turn that comes first, and `attempt` succeeds under the table's lock."""
        table, before, since_s, look = self._table, None, 0.0, False
        while True:
            with table.lock:
                self._check_failure()
                turn = attempt()
                while turn is not None and look and table.bury_if_dead(turn[0]):
                    turn = attempt()
                table.waits_M[self.slot] = 0 if turn is None else resource
            if turn is None:
                return
            if turn != before:
                before, since_s = turn, time.monotonic()
            elif time.monotonic() - since_s > self._turn_s:
                self._pass_on(turn, resource)
                continue
            look = not table.wait_to_be_woken(POLL_S)

    def _pass_on(self, turn: Turn, resource: int) -> None:
        """Waits no longer for a turn, and says so if no process has said it of the model before."""
        slot, self._passed_on[resource, turn[0]] = turn
        with self._table.lock:
            said, self._table.slow_M[slot] = bool(self._table.slow_M[slot]), 1
        if not said:
            LOG.warning(
                "%s has had the %s of rank %d for more than %g s: the others go on, now and whenever it takes as long",
                self._table.holder(slot), NAMES[resource], self._gpu, self._turn_s,
            )  # fmt: skip

    def _check_failure(self) -> None:
        if self._failure is not None:
            raise RankFailed(f"stopped, because the other model on this rank failed: {self._failure}")

    def leave(self) -> None:
        """Ends this model's exchanges on this GPU and gives up its slot."""
        self._table.leave()

    def pause(self) -> None:
        """Does nothing: a model without work draws no ticket."""

    def join(self, gather: GatherNumber, first: bool, slices: int | None = None) -> None:
        """Does nothing; see `joins`."""

    def abort(self, error: BaseException) -> None:
        """Releases the GPU and the port after this model failed with `error`; its further waits raise RankFailed."""
        self._failure = self._failure or error
        self._alone = -1
        self._table.give_up()
