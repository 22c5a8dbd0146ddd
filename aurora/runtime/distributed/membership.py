"""Membership: which ranks run, which of them serve in the current epoch, and whether the next epoch is due."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from aurora.errors import RankFailed
from aurora.runtime.distributed.control_channel import EpochStart, MemberState, Stop
from aurora.runtime.distributed.rank_processes import SupervisedRank

MAX_IDLE_EPOCHS = 5  # of the same members and without progress, before the supervisor gives up


@dataclass
class Membership:
    """The running ranks and the current epoch."""

    members: dict[int, SupervisedRank] = field(default_factory=dict)  # every running rank, by rank
    epoch: int = 0  # number of the current epoch, 0 before the first
    epoch_ranks: tuple[int, ...] = ()  # the ranks with which the epoch began
    changed: bool = True  # whether a rank was lost or left the epoch
    joined: bool = False  # whether a new rank waits
    progressed: bool = False  # whether the work has advanced in this epoch
    idle_epochs: int = 0  # how many epochs these ranks have had since the work last advanced

    def leave_epoch(self, rank: int, state: MemberState) -> None:
        """Records that a rank, which has left the current epoch or is new, waits for the next one."""
        member = self.members[rank]
        if member.serving:
            self.changed = True
        else:
            self.joined = True
        member.state, member.serving = state, False
        member.last_heard_s = member.clock()

    def waiting(self) -> dict[int, MemberState]:
        """Returns the state of each rank that waits for an epoch, by ascending rank."""
        return {rank: member.state for rank, member in sorted(self.members.items()) if member.state is not None}

    def hanging(self, hang_s: float) -> Iterator[tuple[int, str]]:
        """Yields (rank, how it hangs) of the ranks that have not sent or not read for hang_s seconds."""
        for rank, member in list(self.members.items()):
            if reason := member.hangs(hang_s):
                yield rank, reason

    def stop_epoch(self) -> None:
        """Sends Stop, once, to all ranks of the epoch."""
        for member in self.members.values():
            if member.serving and not member.stop_sent:
                member.stop_sent = True
                member.send(Stop())

    def ready(self, starting: int) -> bool:
        """Returns whether an epoch can begin: no rank serves and one waits; before the first, all ranks wait, none starts."""
        waiting = len(self.waiting())
        if self.epoch == 0 and waiting < len(self.members) + starting:
            return False
        return waiting > 0 and not any(member.serving for member in self.members.values())

    def count_idle(self, reason: str) -> None:
        """Counts an epoch that ended, for `reason`, without progress. Raises RankFailed after too many with the same ranks."""
        self.idle_epochs += tuple(self.waiting()) == self.epoch_ranks
        if self.idle_epochs > MAX_IDLE_EPOCHS:
            raise RankFailed(f"nothing moved in {MAX_IDLE_EPOCHS} epochs; the last ended by {reason}")

    def advance(self) -> None:
        """Moves on to the next epoch: takes its number, and all waiting ranks as its ranks."""
        self.epoch, self.epoch_ranks = self.epoch + 1, tuple(self.waiting())
        self.changed = self.joined = self.progressed = False

    def start_epoch(self, assignments: Mapping[int, Any]) -> None:
        """Sends each rank of the epoch its assignment (by rank)."""
        for rank in self.epoch_ranks:
            member = self.members[rank]
            member.state, member.serving, member.stop_sent = None, True, False
            member.send(EpochStart(self.epoch, self.epoch_ranks, assignments[rank]))
