"""Quorum: decides, without input or output, when an epoch is over and which members the next one has.

A member serves in an epoch, or waits for the next. An epoch is over when one of its members is lost or has left it by itself.
The next one begins when no member serves.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class JoinEpoch:
    """Member to lighthouse: the member waits for an epoch, or still serves in one (when the lighthouse was restarted).

    Args:
        epoch: the last epoch that it was told of, 0 if none.
        members: the names of that epoch's members.
        serving: whether it still serves in that epoch.
        agreed: whether all members of that epoch leave it by agreement, so that nobody has to be stopped.
        data: what the members of the next epoch are told of it.
    """

    epoch: int = 0
    members: tuple[str, ...] = ()
    serving: bool = False
    agreed: bool = False
    data: Any = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "members", tuple(self.members))  # JSON has lists
        if not isinstance(self.epoch, int) or not all(isinstance(name, str) for name in self.members):
            raise TypeError("no epoch")


@dataclass(frozen=True)
class BeginEpoch:
    """Lighthouse to each member of an epoch: it begins.

    Args:
        epoch: its number, greater than that of any epoch that one of its members was told of.
        data: what each member said in JoinEpoch, by name; names ascend.
    """

    epoch: int
    data: dict[str, Any]


@dataclass(frozen=True)
class StopEpoch:
    """Lighthouse to a member: the epoch is over; the member leaves it at once."""

    epoch: int


@dataclass(frozen=True)
class LeaveEpoch:
    """Lighthouse to a member: others wait to join; all members leave the epoch, by agreement, after the step at hand."""

    epoch: int


class Quorum:
    """Forms epochs of the members that are there.

    Args:
        expected: how many members the first epoch waits for.
        min_members: no epoch has fewer members.
        absent_s: seconds to wait, after the last arrival, for members that should be there and are not: the first `expected`,
            or, when the lighthouse was restarted, those of the last epoch.
        number: returns the number of the next epoch, greater than the given one. A restarted lighthouse must not return a
            number that the one before it returned.
    """

    def __init__(self, expected: int, min_members: int, absent_s: float, number: Callable[[int], int]) -> None:
        self._expected, self._min_members, self._absent_s, self._number = expected, min_members, absent_s, number
        self._waiting: dict[str, JoinEpoch] = {}
        self._serving: dict[str, int] = {}  # the epoch in which each of the other members serves
        self._epoch = 0  # the newest epoch
        self._over = False  # whether a member of it was lost or has left it
        self._absent: set[str] = set()  # its members that this lighthouse has not heard of
        self._arrival_s = 0.0  # when a member last joined
        self._told: dict[str, tuple[StopEpoch | LeaveEpoch, float]] = {}  # what serving members were told last, and when

    @property
    def waiting(self) -> int:
        """How many members wait for an epoch."""
        return len(self._waiting)

    def serving(self, epoch: int) -> list[str]:
        """Returns the members that serve in an epoch."""
        return [name for name, number in self._serving.items() if number == epoch]

    def join(self, name: str, request: JoinEpoch, now_s: float) -> None:
        """Takes a member's request."""
        self._arrival_s = now_s
        if request.epoch > self._epoch:  # a lighthouse before this one formed it
            self._epoch, self._over, self._absent = request.epoch, False, set(request.members) - self._waiting.keys()
        self._absent.discard(name)
        self._told.pop(name, None)
        goes_on = request.epoch == self._epoch and (request.serving or request.agreed)
        if not goes_on and self._epoch in (self._serving.pop(name, None), request.epoch):
            self._over = True  # it has left the epoch, or was never told that it began
        if request.serving:
            self._serving[name] = request.epoch
        else:
            self._serving.pop(name, None)
            self._waiting[name] = request

    def lose(self, name: str) -> None:
        """Takes note that a member is lost."""
        self._absent.discard(name)
        self._waiting.pop(name, None)
        self._told.pop(name, None)
        if self._serving.pop(name, None) == self._epoch:
            self._over = True

    def due(self, now_s: float) -> list[tuple[str, BeginEpoch | StopEpoch | LeaveEpoch]]:
        """Returns what members have to be told now: pairs of a member's name and a message."""
        complete = now_s - self._arrival_s >= self._absent_s or not (
            self._absent or (self._epoch == 0 and len(self._waiting) < self._expected)
        )
        if self._serving:
            return self._endings(now_s, self._over or (complete and bool(self._absent)))
        if not complete or len(self._waiting) < self._min_members:
            return []
        self._epoch = self._number(self._epoch)
        begin = BeginEpoch(self._epoch, {name: self._waiting[name].data for name in sorted(self._waiting)})
        self._serving = dict.fromkeys(begin.data, self._epoch)
        self._over, self._waiting, self._absent = False, {}, set()
        return [(name, begin) for name in begin.data]

    def overdue(self, now_s: float, patience_s: float) -> list[str]:
        """Returns the members that were told to stop more than `patience_s` ago and still serve."""
        return [
            name for name, (told, since_s) in self._told.items() if isinstance(told, StopEpoch) and now_s - since_s > patience_s
        ]

    def _endings(self, now_s: float, over: bool) -> list[tuple[str, BeginEpoch | StopEpoch | LeaveEpoch]]:
        """What serving members have to be told: each of them once to leave, once to stop."""
        messages: list[tuple[str, BeginEpoch | StopEpoch | LeaveEpoch]] = []
        for name, epoch in self._serving.items():
            if over or epoch != self._epoch:
                message: StopEpoch | LeaveEpoch = StopEpoch(epoch)
            elif self._waiting:
                message = LeaveEpoch(epoch)
            else:
                continue
            if self._told.get(name, (None,))[0] != message:
                self._told[name] = message, now_s
                messages.append((name, message))
        return messages
