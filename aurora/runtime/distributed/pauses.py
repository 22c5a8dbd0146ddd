"""Pauses of elastic steps at changes of membership, and what they are spent on."""

import time
from dataclasses import dataclass


@dataclass(frozen=True)
class Pause:
    """The time between two steps of an elastic run in which members were lost or joined, without the steps themselves.

    Attributes:
        at_s: when the member noticed that its epoch was over, in seconds since 1970.
        members: of the epoch that began.
        discarded_s: work since the last commit that was in vain, with waiting for the lost members.
        quorum_s: until the next epoch began.
        connections_s: until its members were connected.
        planning_s: until it was decided who holds what.
        moves_s: until the members held it.
    """

    at_s: float
    members: int
    discarded_s: float = 0.0
    quorum_s: float = 0.0
    connections_s: float = 0.0
    planning_s: float = 0.0
    moves_s: float = 0.0

    @property
    def seconds(self) -> float:
        """All parts together."""
        return self.discarded_s + self.quorum_s + self.connections_s + self.planning_s + self.moves_s

    def __str__(self) -> str:
        """One line."""
        parts = (
            f"{what} {seconds:.2f}"
            for what, seconds in (
                ("discarded work", self.discarded_s), ("quorum", self.quorum_s), ("connections", self.connections_s),
                ("planning", self.planning_s), ("moves", self.moves_s),
            )
        )  # fmt: skip
        return f"{self.seconds:.2f} s until {self.members} ranks went on: {', '.join(parts)}"


class PauseTimer:
    """Measures a member's pauses, part by part. Time before its first commit is none."""

    def __init__(self) -> None:
        self._parts: dict[str, float] = {}
        self._ended_s: float | None = None  # when the last epoch was over, since 1970
        self._committed, self._since_s = False, time.perf_counter()

    def add(self, part: str) -> None:
        """Counts the time since the last call of any method as this part of a pause, by its attribute of Pause."""
        now_s = time.perf_counter()
        self._parts[part] = self._parts.get(part, 0.0) + now_s - self._since_s
        self._since_s = now_s

    def epoch_over(self) -> None:
        """Takes note that the epoch is over; time since the last call was in vain."""
        self.add("discarded_s")
        self._ended_s = self._ended_s or time.time()

    def keep_work(self) -> None:
        """Takes note that the step at which the epoch ended counts: its time was not in vain."""
        self._parts["discarded_s"] = 0.0

    def commit(self, members: int) -> Pause | None:
        """Takes note of a commit. Returns the pause before the step, if there was one."""
        found = None
        if self._committed and self._ended_s is not None:
            found = Pause(self._ended_s, members, **self._parts)
        self._parts, self._ended_s, self._committed, self._since_s = {}, None, True, time.perf_counter()
        return found
