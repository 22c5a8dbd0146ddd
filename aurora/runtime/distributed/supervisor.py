"""Supervisor of ranks: watches their processes, on this host and on others, and forms an epoch after each change of membership.

Only the supervisor decides on membership, so ranks have nothing to agree on. A change (a rank died, hangs, lost a peer, or has
joined) ends the epoch: every member is stopped, sends its MemberState, and gets its assignment for the next epoch. A rank that
dies in between is left out; one that stays silent is killed.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from aurora.errors import AuroraError, RankFailed
from aurora.runtime.distributed.control_channel import (
    HEARTBEAT_S,
    Finish,
    Heartbeat,
    MemberCrashed,
    MemberResult,
    MemberState,
    Progress,
    Stop,
    run_member,
)
from aurora.runtime.distributed.led_ranks import Lead, LedRanks
from aurora.runtime.distributed.membership import Membership
from aurora.runtime.distributed.rank_processes import RankProcesses
from aurora.runtime.distributed.signed_messages import StoreValue


class Coordinator(Protocol):
    """Decides what the members of each epoch do. Errors that its methods raise end the run."""

    @property
    def finished(self) -> bool:
        """Whether all work is done."""

    @property
    def wants_new_epoch(self) -> bool:
        """Whether the coordinator has a better assignment for the same members. The supervisor then begins a new epoch."""

    def assign(self, epoch: int, states: Mapping[int, Any]) -> Mapping[int, Any]:
        """Returns each member's assignment in an epoch, by rank; `states` are the values of the members' MemberStates."""

    def on_progress(self, rank: int, value: Any) -> bool:
        """Takes a value that a member sent during an epoch. Returns whether it advances the work as a whole."""

    def on_lost(self, rank: int, reason: str) -> None:
        """Takes note of a lost rank; `reason` is part of a sentence."""


class Supervisor:
    """Runs the picklable `target(rank_info, control, *args)` in `ranks` processes until the coordinator is finished.

    Args:
        target: what a rank runs; it takes part in epoch after epoch through `control`, its ControlChannel.
        ranks: how many processes to start.
        coordinator: decides what the members of each epoch do.
        args: further arguments of `target`.
        timeout_s: seconds that a rank waits for a peer; a rank that computes for longer without a pause is killed.
        hang_s: a rank that sends nothing for this many seconds, not even a heartbeat, or does not read a message, is killed.
        respawn: how many times each lost rank is restarted; it joins the next epoch when it is ready.
        watch: called for each epoch with (its number, the process id of every member by rank).
        lead: which ranks run on other hosts, and who may join; None: all run on this one.

    Attributes:
        address: with `lead`, host and port on which it listens, from `run` on; else None.
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
        self.address: tuple[str, int] | None = None
        self._timeout_s, self._hang_s = timeout_s, hang_s
        self._respawns_left = [respawn] * ranks
        self._membership = Membership()
        self._members = self._membership.members
        self._last_loss = ""

    def run(self) -> dict[int, Any]:
        """Runs epochs until the coordinator is finished, and ends all processes. Returns the result of each rank still there.

        Raises:
            RankFailed: if no rank is left, or epochs of the same members end without progress.
            AuroraError: the one that a rank or the coordinator raises; BadInput if the address of `lead` cannot be used.
        """
        self._processes = self._started_from()
        try:
            for rank in range(self._ranks):
                self._processes.start(rank)
            while not self._coordinator.finished:
                self._step()
            return self._collect_results()
        finally:
            self._processes.close(self._coordinator.finished)

    def _started_from(self) -> RankProcesses | LedRanks:
        """What starts, hears and kills the ranks."""
        args = (self._target, self._args)
        if self._lead is None:
            return RankProcesses(run_member, args, self._ranks, ("", 0), self._timeout_s)
        led = LedRanks(run_member, args, self._lead, self._timeout_s)
        self.address = led.address
        return led

    def _step(self) -> None:
        """Adopts new processes, handles messages, detects losses, and moves on to the next epoch where that is due."""
        for rank, started in self._processes.adopt_started():
            if isinstance(started, OSError):
                self._record_loss(rank, f"did not start: {started}")
            else:
                self._members[rank] = started
        for rank, message in self._processes.messages(HEARTBEAT_S):
            if message is None:
                self._lose(rank, self._members[rank].exit_reason())
            else:
                self._handle(rank, message)
        self._processes.clock.check(HEARTBEAT_S)
        for rank, reason in self._membership.hanging(self._hang_s):
            self._lose(rank, reason)
        if not self._members and not self._processes.starting:
            raise RankFailed(f"all ranks are lost; the last, {self._last_loss}")
        if self._epoch_is_due() and not self._coordinator.finished:
            self._membership.stop_epoch()
            if self._membership.ready(self._processes.starting):
                self._start_epoch()

    def _epoch_is_due(self) -> bool:
        """Whether an epoch is due: after a loss at once; for a new rank or better assignment once members have progressed."""
        membership = self._membership
        return membership.changed or (
            membership.progressed and (membership.joined or self._coordinator.wants_new_epoch)
        )  # fmt: skip

    def _handle(self, rank: int, message: Any) -> None:
        """Handles one message from a rank. Raises what the rank raised."""
        member = self._members[rank]
        member.last_heard_s = max(member.last_heard_s, member.clock())
        match message:
            case Heartbeat(busy_s):
                if busy_s > self._timeout_s:
                    self._lose(rank, f"was busy with one thing for {busy_s:.0f} s")
            case MemberState():
                self._membership.leave_epoch(rank, message)
                if message.lost is not None:
                    self._last_loss = f"rank {rank}: {message.lost}"
            case StoreValue(epoch):
                for other in self._members.values():
                    if other.serving and other is not member and epoch == self._membership.epoch:
                        other.send(message)
            case Progress(value):
                if self._coordinator.on_progress(rank, value):
                    self._membership.idle_epochs, self._membership.progressed = 0, True
            case MemberResult(AuroraError() as error):
                raise error
            case MemberResult(MemberCrashed(reason)):
                self._lose(rank, reason)
            case MemberResult():
                member.result = message

    def _lose(self, rank: int, reason: str) -> None:
        """Kills a rank and ends the epoch."""
        del self._members[rank]
        self._membership.changed = True
        self._processes.kill(rank)
        self._record_loss(rank, reason)

    def _record_loss(self, rank: int, reason: str) -> None:
        self._last_loss = f"rank {rank}: {reason}"
        self._coordinator.on_lost(rank, reason)
        if self._respawns_left[rank] > 0:
            self._respawns_left[rank] -= 1
            self._processes.start(rank)

    def _start_epoch(self) -> None:
        """Begins the next epoch with all ranks that wait."""
        if not self._coordinator.wants_new_epoch:
            self._membership.count_idle(self._last_loss)
        states = {rank: state.value for rank, state in self._membership.waiting().items()}
        self._membership.advance()
        epoch = self._membership.epoch
        assignments = self._coordinator.assign(epoch, states)
        if self._watch is not None:
            self._watch(epoch, {rank: self._members[rank].pid for rank in states})
        self._membership.start_epoch(assignments)

    def _collect_results(self) -> dict[int, Any]:
        """Stops all ranks and collects their results, for at most hang_s; ranks that crash meanwhile have none."""
        self._respawns_left = [0] * self._ranks
        for member in self._members.values():
            if member.serving:
                member.send(Stop())
        asked: set[int] = set()
        expected = {rank for rank, member in self._members.items() if member.serving or member.state is not None}
        clock = self._processes.clock
        deadline_s = clock() + self._hang_s
        while clock() < deadline_s:
            clock.check(HEARTBEAT_S)
            expected &= self._members.keys()
            for rank in sorted(expected - asked):
                if self._members[rank].state is not None:
                    self._members[rank].send(Finish())
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
