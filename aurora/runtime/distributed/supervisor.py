"""Supervisor of local ranks: watches their processes, and forms an epoch after each change of membership.

The supervisor alone decides on membership, so ranks have nothing to agree on. A change (a rank died, hangs, lost a peer, or has
joined) ends the epoch: every member is stopped, sends its MemberState, and gets its assignment for the next epoch. A rank that
dies in between is left out; one that stays silent is killed.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from aurora.errors import AuroraError, RankFailed
from aurora.runtime.distributed.control_channel import (
    HEARTBEAT_S,
    EpochStart,
    Finish,
    Heartbeat,
    MemberCrashed,
    MemberResult,
    MemberState,
    Progress,
    Stop,
    run_member,
)
from aurora.runtime.distributed.launcher import hosted_store
from aurora.runtime.distributed.rank_processes import RankProcess, RankProcesses

MAX_IDLE_EPOCHS = 5  # of the same members and without progress, before the supervisor gives up


class Coordinator(Protocol):
    """Decides what the members of each epoch do. Errors that its methods raise end the run."""

    @property
    def finished(self) -> bool:
        """Whether all work is done."""

    @property
    def wants_new_epoch(self) -> bool:
        """Whether it has a better assignment for the same members, which takes an epoch of its own."""

    def assign(self, epoch: int, states: Mapping[int, Any]) -> Mapping[int, Any]:
        """Each member's assignment by rank, given the state that each of them sent."""

    def on_progress(self, rank: int, value: Any) -> bool:
        """Takes what a member sent during an epoch. Returns whether the work as a whole has advanced by it."""

    def on_lost(self, rank: int, reason: str) -> None:
        """Hears of each lost rank."""


@dataclass
class _Member:
    """What the supervisor knows of one running rank. state: set while it waits for an epoch; serving: it is in the current one;
    stop_sent: it was told that this one is over; result: its last message."""

    process: RankProcess
    state: MemberState | None = None
    serving: bool = False
    stop_sent: bool = False
    result: MemberResult | None = None


@dataclass
class _EpochState:
    """The current epoch, and what speaks for ending it.

    changed: membership is not what it was. joined: a new rank waits, until the members have progressed. idle_epochs: epochs of
    these members since the work last advanced.
    """

    number: int = 0
    members: tuple[int, ...] = ()
    changed: bool = True
    joined: bool = False
    progressed: bool = False
    idle_epochs: int = 0

    def count_idle(self, members: tuple[int, ...], reason: str) -> None:
        """Raises RankFailed when the same members have been through too many epochs without progress."""
        self.idle_epochs += members == self.members
        if self.idle_epochs > MAX_IDLE_EPOCHS:
            raise RankFailed(f"nothing moved in {MAX_IDLE_EPOCHS} epochs; the last ended by {reason}")

    def advance(self, members: tuple[int, ...]) -> None:
        self.number, self.members = self.number + 1, members
        self.changed = self.joined = self.progressed = False


class Supervisor:
    """Keeps `ranks` processes at `target(rank_info, control, *args)` until the coordinator is finished.

    Args:
        target: what a rank runs; it takes part in epoch after epoch by its ControlChannel.
        ranks: how many processes to start.
        coordinator: decides what the members of each epoch do.
        args: further arguments of `target`, picklable.
        timeout_s: a rank that computes for longer without a pause is killed; also how long ranks wait for a peer.
        hang_s: a rank that sends nothing for so long, not even a heartbeat, is killed.
        respawn: how many times each lost rank is started anew; it joins the next epoch when it is ready.
        port: of the store where ranks meet, on loopback; 0: any free one.
        watch: called with each epoch's number and the process id of every member, by rank.
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
        port: int = 0,
        watch: Callable[[int, dict[int, int]], None] | None = None,
    ) -> None:
        self._target, self._args, self._ranks, self._port = target, args, ranks, port
        self._coordinator, self._watch = coordinator, watch
        self._timeout_s, self._hang_s = timeout_s, hang_s
        self._respawns_left = [respawn] * ranks
        self._members: dict[int, _Member] = {}
        self._epoch = _EpochState()
        self._last_loss = ""

    def run(self) -> dict[int, Any]:
        """Runs epochs until the coordinator is finished. No process is left on return, nor when it raises.

        Returns: the result of each rank that is left, by rank.
        Raises: RankFailed: if no rank is left, or epochs of the same members end without progress. AuroraError: what a rank or
            the coordinator raises.
        """
        with hosted_store(self._port) as store:
            self._processes = RankProcesses(run_member, (self._target, self._args), self._ranks, store, self._timeout_s)
            try:
                for rank in range(self._ranks):
                    self._processes.start(rank)
                while not self._coordinator.finished:
                    self._step()
                return self._collect_results()
            finally:
                self._processes.close()

    def _step(self) -> None:
        """Adopts new processes, handles messages, detects losses, and moves on to the next epoch where that is due."""
        for rank, started in self._processes.adopt_started():
            if isinstance(started, OSError):
                self._record_loss(rank, f"did not start: {started}")
            else:
                self._members[rank] = _Member(started)
        for rank, message in self._processes.messages(HEARTBEAT_S):
            if message is None:
                self._lose(rank, self._members[rank].process.exit_reason())
            else:
                self._handle(rank, message)
        self._lose_silent()
        if not self._members and not self._processes.starting:
            raise RankFailed(f"all ranks are lost; the last, {self._last_loss}")
        improvable = self._epoch.progressed and (self._epoch.joined or self._coordinator.wants_new_epoch)
        if (self._epoch.changed or improvable) and not self._coordinator.finished:
            self._stop_members()
            if self._ready():
                self._start_epoch()

    def _handle(self, rank: int, message: Any) -> None:
        """One message from a rank. Raises what the rank raised."""
        member = self._members[rank]
        member.process.last_heard_s = max(member.process.last_heard_s, time.monotonic())
        match message:
            case Heartbeat(busy_s):
                if busy_s > self._timeout_s:
                    self._lose(rank, f"was busy with one thing for {busy_s:.0f} s")
            case MemberState():
                self._on_member_state(rank, message)
            case Progress(value):
                if self._coordinator.on_progress(rank, value):
                    self._epoch.idle_epochs, self._epoch.progressed = 0, True
            case MemberResult(AuroraError() as error):
                raise error
            case MemberResult(MemberCrashed(reason)):
                self._lose(rank, reason)
            case MemberResult():
                member.result = message

    def _on_member_state(self, rank: int, state: MemberState) -> None:
        """A rank has left the epoch, or is new."""
        member = self._members[rank]
        if member.serving:
            self._epoch.changed = True
        else:
            self._epoch.joined = True
        member.state, member.serving = state, False
        member.process.last_heard_s = time.monotonic()
        if state.lost is not None:
            self._last_loss = f"rank {rank}: {state.lost}"

    def _lose_silent(self) -> None:
        """Kills ranks that have sent nothing for hang_s."""
        now_s = time.monotonic()
        for rank, member in list(self._members.items()):
            if now_s - member.process.last_heard_s > self._hang_s:
                self._lose(rank, f"said nothing for {self._hang_s:g} s")

    def _lose(self, rank: int, reason: str) -> None:
        """Kills a rank and ends the epoch."""
        del self._members[rank]
        self._processes.kill(rank)
        self._epoch.changed = True
        self._record_loss(rank, reason)

    def _record_loss(self, rank: int, reason: str) -> None:
        self._last_loss = f"rank {rank}: {reason}"
        self._coordinator.on_lost(rank, reason)
        if self._respawns_left[rank] > 0:
            self._respawns_left[rank] -= 1
            self._processes.start(rank)

    def _stop_members(self) -> None:
        """Tells those who serve, once, that the epoch is over."""
        for member in self._members.values():
            if member.serving and not member.stop_sent:
                member.stop_sent = True
                member.process.send(Stop())

    def _waiting(self) -> dict[int, MemberState]:
        """The states of the ranks that wait for an epoch, by rank, ascending."""
        return {rank: member.state for rank, member in sorted(self._members.items()) if member.state is not None}

    def _ready(self) -> bool:
        """Whether the next epoch can begin: no rank serves, some wait; for the first one, all of them do."""
        waiting = len(self._waiting())
        if self._epoch.number == 0 and waiting < len(self._members) + self._processes.starting:
            return False
        return waiting > 0 and not any(member.serving for member in self._members.values())

    def _start_epoch(self) -> None:
        """Begins the next epoch with all ranks that wait."""
        waiting = self._waiting()
        members = tuple(waiting)
        if not self._coordinator.wants_new_epoch:
            self._epoch.count_idle(members, self._last_loss)
        self._epoch.advance(members)
        assignments = self._coordinator.assign(self._epoch.number, {rank: state.value for rank, state in waiting.items()})
        if self._watch is not None:
            self._watch(self._epoch.number, {rank: self._members[rank].process.pid for rank in members})
        for rank in members:
            member = self._members[rank]
            member.state, member.serving, member.stop_sent = None, True, False
            member.process.send(EpochStart(self._epoch.number, members, assignments[rank]))

    def _collect_results(self) -> dict[int, Any]:
        """Stops all ranks and collects their results, for at most hang_s; ranks that crash meanwhile have none."""
        self._respawns_left = [0] * self._ranks
        for member in self._members.values():
            if member.serving:
                member.process.send(Stop())
        asked: set[int] = set()
        expected = {rank for rank, member in self._members.items() if member.serving or member.state is not None}
        deadline_s = time.monotonic() + self._hang_s
        while time.monotonic() < deadline_s:
            expected &= self._members.keys()
            for rank in sorted(expected - asked):
                if self._members[rank].state is not None:
                    self._members[rank].process.send(Finish())
                    asked.add(rank)
            if all(self._members[rank].result is not None for rank in expected):
                break
            for rank, message in self._processes.messages(HEARTBEAT_S):
                if message is not None:
                    self._handle(rank, message)
                elif self._members[rank].result is None:
                    expected.discard(rank)
        results = {rank: self._members[rank].result for rank in sorted(expected & self._members.keys())}
        return {rank: result.value for rank, result in results.items() if result is not None}
