"""Coordinated ranks: processes, on this host and on others, whose work in each epoch a coordinator assigns.

The ranks agree at the lighthouse on the membership of an epoch (see `member`). A rank that dies, hangs or loses a peer ends the
epoch. A rank that joins waits until the coordinator ends the present epoch. The members of the next epoch send the coordinator
their states; when it has all states, it sends each member its work.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol

from aurora.elastic.control_channel import (
    EpochStart,
    Finish,
    Joined,
    MemberCrashed,
    MemberResult,
    Progress,
    Stop,
    Waits,
    run_member,
)
from aurora.elastic.hosts import Lead, ranks_at_lighthouse
from aurora.elastic.member import ABSENT_S
from aurora.elastic.processes import RankLoss
from aurora.errors import AuroraError, RankFailed

LOOK_S = 0.1  # at most, between two looks at processes
SETTLE_S = 0.5  # from the first rank that has joined an epoch: what its members have said before has come by then
MAX_IDLE_EPOCHS = 5  # of the same members and without progress, before the run is given up


class Coordinator(Protocol):
    """Interface that assigns the members' work in each epoch. An error raised by its methods ends the run."""

    @property
    def finished(self) -> bool:
        """True if all work is done."""

    @property
    def wants_new_epoch(self) -> bool:
        """True if the coordinator has a better assignment for the present members, for which they begin a new epoch."""

    def assign(self, epoch: int, states: Mapping[int, Any]) -> Mapping[int, Any]:
        """Returns the members' assignments in an epoch, by rank. `states` are the members' states, by rank."""

    def on_progress(self, rank: int, value: Any) -> bool:
        """Receives a progress value from a member. Returns True if it advances the whole work (an epoch without is idle)."""

    def on_lost(self, rank: int, reason: str) -> None:
        """Called when a rank is lost. `reason` is a part of a sentence, such as "it hangs"."""


@dataclass
class _JoinedEpoch:
    """An epoch that ranks have joined and that has not begun yet: some may still have to say so, or are lost."""

    number: int  # as members count
    members: tuple[int, ...]
    since_s: float  # since when, by time.monotonic
    states: dict[int, Any] = field(default_factory=dict)  # of the ranks that have said so


class CoordinatedRanks:
    """Runs the picklable `target(rank_info, control, *args)` in `ranks` processes until the coordinator is finished.

    Args:
        target: function that a rank runs; it joins one epoch after the other through `control`, its ControlChannel.
        ranks: number of processes to start.
        coordinator: assigns the members' work in each epoch.
        args: further arguments of `target`.
        timeout_s: seconds that a rank waits for a peer.
        hang_s: seconds without a heartbeat after which a rank is excluded from the next epoch and killed.
        respawn: how many times each lost rank is restarted; it joins the next epoch when it is ready.
        watch: called at the start of each epoch with (epoch number, {rank: process id} of its members).
        lead: which ranks run on other hosts, and which hosts may join; None: all ranks run on this host.
    """

    def __init__(
        self,
        target: Callable[..., None],
        ranks: int,
        coordinator: Coordinator,
        args: tuple[Any, ...],
        *,
        timeout_s: float,
        hang_s: float,
        respawn: int = 0,
        watch: Callable[[int, dict[int, int]], None] | None = None,
        lead: Lead | None = None,
    ) -> None:
        self._target, self._args, self._ranks = target, args, ranks
        self._coordinator, self._watch, self._lead = coordinator, watch, lead
        self._timeout_s, self._hang_s = timeout_s, hang_s
        self._respawns_left = [respawn] * ranks
        self._waiting: set[int] = set()  # ranks that wait for an epoch
        self._joined: _JoinedEpoch | None = None
        self._epoch, self._number = 0, 0  # the epoch in force, and its number here
        self._members: tuple[int, ...] = ()  # its ranks
        self._serving: set[int] = set()  # of them, those not lost since
        self._progressed = self._stopped = False  # whether the work has advanced in it, and whether it was ended here
        self._idle_epochs = 0  # how many epochs these processes have had since the work last advanced
        self._last_loss = ""
        self._results: dict[int, Any] = {}

    def run(self) -> dict[int, Any]:
        """Runs epochs until the coordinator is finished, then ends all processes. Returns surviving ranks' results, by rank.

        Raises:
            RankFailed: if no rank is left, or epochs of the same members end without progress.
            AuroraError: an error raised by a rank or the coordinator; BadInput if the address of `lead` cannot be used.
        """
        absent_s = ABSENT_S if self._lead is None else self._timeout_s  # hosts may take long to join
        args = (self._target, self._args, self._hang_s, absent_s)
        with ExitStack() as stack:
            self._processes = ranks_at_lighthouse(stack, run_member, args, self._ranks, self._timeout_s, self._lead)
            stack.callback(lambda: self._processes.close(self._coordinator.finished))
            for rank in range(self._ranks):
                self._processes.start(rank)
            while not self._coordinator.finished:
                self._step()
            return self._collect_results()

    def _step(self) -> None:
        """Handles events of ranks, and ends the epoch where a new one is due."""
        for rank, event in self._processes.events(LOOK_S):
            self._handle(rank, event)
        if not self._processes.running and not self._processes.starting:
            raise RankFailed(f"all ranks are lost; the last, {self._last_loss}")
        self._give_up_joined()
        joins = self._waiting - self._serving
        if (joins or self._coordinator.wants_new_epoch) and self._progressed:
            self._stop_epoch()

    def _give_up_joined(self) -> None:
        """Ends an epoch that cannot begin, because one of its members was lost as it joined."""
        joined = self._joined
        if joined is None or time.monotonic() - joined.since_s < SETTLE_S or self._waiting >= set(joined.members):
            return
        for rank in joined.states:
            self._processes.running[rank].send(Stop(joined.number))
        self._joined = None

    def _stop_epoch(self) -> None:
        """Ends the epoch in force, if it was not ended here before."""
        if not self._stopped:
            self._stopped = True
            for rank in self._serving:
                self._processes.running[rank].send(Stop(self._epoch))

    def _handle(self, rank: int, message: Any) -> None:
        """Handles one message or event of a rank. Raises what the rank raised."""
        match message:
            case RankLoss(reason):
                self._lose(rank, reason)
            case Waits(lost):
                self._waiting.add(rank)
                if lost is not None:
                    self._last_loss = f"rank {rank}: {lost}"
            case Joined(epoch, members, state) if epoch > self._epoch and not self._coordinator.finished:
                if self._joined is None or epoch > self._joined.number:
                    self._joined = _JoinedEpoch(epoch, members, time.monotonic())
                if epoch == self._joined.number:
                    self._joined.states[rank] = state
                    if self._joined.states.keys() == set(members):
                        self._start_epoch(self._joined)
            case Progress(epoch, value) if epoch == self._epoch:
                if self._coordinator.on_progress(rank, value):
                    self._idle_epochs, self._progressed = 0, True
            case MemberResult(AuroraError() as error):
                raise error
            case MemberResult(MemberCrashed(reason)):
                self._lose(rank, reason)
            case MemberResult(value):
                self._results[rank] = value

    def _lose(self, rank: int, reason: str) -> None:
        """Kills a rank, ends the epoch if it served in it, and starts it again if that is left."""
        self._waiting.discard(rank)
        if self._joined is not None:
            self._joined.states.pop(rank, None)
        if rank in self._serving:
            self._serving.discard(rank)
            self._stop_epoch()
        self._processes.kill(rank)
        self._last_loss = f"rank {rank}: {reason}"
        self._idle_epochs = 0  # the next members are not the same processes
        self._coordinator.on_lost(rank, reason)
        if self._respawns_left[rank] > 0:
            self._respawns_left[rank] -= 1
            self._processes.start(rank)

    def _start_epoch(self, joined: _JoinedEpoch) -> None:
        """Tells all members of the epoch that they have joined what to do in it."""
        self._joined = None
        self._epoch, states = joined.number, dict(sorted(joined.states.items()))
        self._stopped = True  # its members have left the one before
        for rank in self._serving - states.keys():
            self._lose(rank, "it hangs, or cannot be reached: the next epoch began without it")
        if not self._coordinator.wants_new_epoch:
            self._count_idle(tuple(states))
        self._number, self._members, self._progressed, self._stopped = self._number + 1, tuple(states), False, False
        self._serving = set(states)
        self._waiting -= self._serving
        assignments = self._coordinator.assign(self._number, states)
        if self._watch is not None:
            self._watch(self._number, {rank: self._processes.running[rank].pid for rank in states})
        for rank in states:
            self._processes.running[rank].send(EpochStart(self._epoch, self._number, self._members, assignments[rank]))

    def _count_idle(self, members: tuple[int, ...]) -> None:
        """Counts the epoch that ended if it was without progress. Raises RankFailed after too many of the same members."""
        self._idle_epochs += members == self._members
        if self._idle_epochs > MAX_IDLE_EPOCHS:
            raise RankFailed(f"nothing moved in {MAX_IDLE_EPOCHS} epochs; the last ended by {self._last_loss}")

    def _collect_results(self) -> dict[int, Any]:
        """Ends all ranks' work and collects their results, for at most hang_s; ranks that crash meanwhile have none."""
        self._respawns_left = [0] * self._ranks
        expected = self._serving | self._waiting
        for rank in expected:
            self._processes.running[rank].send(Finish())
        until_s = time.monotonic() + self._hang_s
        while time.monotonic() < until_s and expected & self._processes.running.keys() - self._results.keys():
            for rank, event in self._processes.events(LOOK_S):
                if not isinstance(event, RankLoss):
                    self._handle(rank, event)
                elif rank not in self._results:
                    expected.discard(rank)
        return {rank: self._results[rank] for rank in sorted(expected & self._results.keys())}
