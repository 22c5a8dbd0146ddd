"""Membership: which ranks run, which of them serve in the current epoch, and whether the next epoch is due."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from aurora.errors import RankFailed
from aurora.runtime.distributed.control_channel import EpochStart, MemberResult, MemberState, Stop
from aurora.runtime.distributed.rank_processes import RankProcess

MAX_IDLE_EPOCHS = 5  # of the same members and without progress, before the supervisor gives up


@dataclass
class Member:
    """A running rank. state: what it sent, while it waits for an epoch. serving: it is in the current epoch. stop_sent: it has
    been sent Stop in this epoch. result: its last message."""

    process: RankProcess
    state: MemberState | None = None
    serving: bool = False
    stop_sent: bool = False
    result: MemberResult | None = None


@dataclass
class Membership:
    """The running ranks and the current epoch.

    members: by rank. epoch: its number, 0 before the first. epoch_ranks: who it began with. changed: a rank was lost or left
    the epoch. joined: a new rank waits. progressed: the work has advanced in this epoch. idle_epochs: of these ranks, since it
    last did.
    """

    members: dict[int, Member] = field(default_factory=dict)
    epoch: int = 0
    epoch_ranks: tuple[int, ...] = ()
    changed: bool = True
    joined: bool = False
    progressed: bool = False
    idle_epochs: int = 0

    def remove(self, rank: int) -> None:
        """A rank is lost, which ends the epoch."""
        del self.members[rank]
        self.changed = True

    def leave_epoch(self, rank: int, state: MemberState) -> None:
        """A rank waits for the next epoch: it has left the current one, or is new."""
        member = self.members[rank]
        if member.serving:
            self.changed = True
        else:
            self.joined = True
        member.state, member.serving = state, False
        member.process.last_heard_s = time.monotonic()

    def record_progress(self) -> None:
        """The work has advanced."""
        self.idle_epochs, self.progressed = 0, True

    def waiting(self) -> dict[int, MemberState]:
        """The states of the ranks that wait for an epoch, by rank, ascending."""
        return {rank: member.state for rank, member in sorted(self.members.items()) if member.state is not None}

    def silent(self, hang_s: float) -> Iterator[int]:
        """The ranks that have sent nothing for hang_s."""
        now_s = time.monotonic()
        for rank, member in list(self.members.items()):
            if now_s - member.process.last_heard_s > hang_s:
                yield rank

    def stop_epoch(self) -> None:
        """Sends Stop, once, to all who serve."""
        for member in self.members.values():
            if member.serving and not member.stop_sent:
                member.stop_sent = True
                member.process.send(Stop())

    def ready(self, starting: int) -> bool:
        """Whether the next epoch can begin: nobody serves, somebody waits; for the first one, all do, the `starting` too."""
        waiting = len(self.waiting())
        if self.epoch == 0 and waiting < len(self.members) + starting:
            return False
        return waiting > 0 and not any(member.serving for member in self.members.values())

    def count_idle(self, reason: str) -> None:
        """Before an epoch without better assignments. Raises RankFailed if the same ranks have had too many of them."""
        self.idle_epochs += tuple(self.waiting()) == self.epoch_ranks
        if self.idle_epochs > MAX_IDLE_EPOCHS:
            raise RankFailed(f"nothing moved in {MAX_IDLE_EPOCHS} epochs; the last ended by {reason}")

    def advance(self) -> None:
        """The next epoch's number and ranks: all that wait."""
        self.epoch, self.epoch_ranks = self.epoch + 1, tuple(self.waiting())
        self.changed = self.joined = self.progressed = False

    def start_epoch(self, assignments: Mapping[int, Any]) -> None:
        """Sends the epoch's ranks their assignments."""
        for rank in self.epoch_ranks:
            member = self.members[rank]
            member.state, member.serving, member.stop_sent = None, True, False
            member.process.send(EpochStart(self.epoch, self.epoch_ranks, assignments[rank]))
