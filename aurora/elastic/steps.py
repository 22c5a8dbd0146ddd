"""Elastic steps: each step is computed by the members of an epoch, and committed by all of them or by none.

A member prepares a step: it computes everything that the step needs, without changing its state. Then the members vote. A
member that receives all votes commits the step. If a member is lost during the vote, some members may have committed, while
others do not know the outcome. But all have prepared the step, and keep it until they join the next epoch. There every member
reports which steps it has committed and prepared, and `settle` returns the same decision on all of them.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Protocol

import msgspec

from aurora.elastic.epoch_groups import Epoch
from aurora.elastic.member import Member
from aurora.errors import RankFailed


@dataclass(frozen=True, order=True)
class Version:
    """Version of the training state, of which each member holds a part. Parts are consistent if their versions are equal.

    Args:
        epoch: the epoch in which the last step was voted on; 0: the state at the start or from a checkpoint.
        step: number of steps that have been applied to the state.
    """

    epoch: int
    step: int


NOTHING = Version(0, -1)  # version of a member that holds no usable state


@dataclass(frozen=True)
class MemberSteps:
    """Versions that one member has committed and prepared.

    Args:
        committed: version of the state that the member holds.
        prepared: version of the state after the prepared step; None: no step is prepared.
        epoch: the last epoch whose settlement it has applied, or in which it has fetched its state; 0: none.
    """

    committed: Version
    prepared: Version | None = None
    epoch: int = 0

    def prepare(self) -> "MemberSteps":
        """Returns the MemberSteps after the next step has been prepared."""
        return MemberSteps(self.committed, Version(self.epoch, self.committed.step + 1), self.epoch)

    def commit(self) -> "MemberSteps":
        """Returns the MemberSteps after the prepared step has been committed."""
        assert self.prepared is not None
        return MemberSteps(self.prepared, None, self.epoch)


@dataclass(frozen=True)
class Settlement:
    """Decision on the state from which a new epoch continues, and on what each member must do to reach it.

    Args:
        version: version of the state to continue from; NOTHING: no member holds a usable state.
        commits: members that must commit their prepared step; all others discard theirs.
        stale: members that hold another state or none, and must fetch the state from other members.
    """

    version: Version
    commits: frozenset[str]
    stale: frozenset[str]

    def applied(self, epoch: int, name: str, steps: MemberSteps) -> MemberSteps:
        """Returns the MemberSteps of member `name` once it has applied this settlement at the start of `epoch`."""
        return MemberSteps(NOTHING) if name in self.stale else MemberSteps(self.version, None, epoch)


def settle(steps: Mapping[str, MemberSteps]) -> Settlement:
    """Returns the state from which a new epoch continues, given each member's committed and prepared versions, by name.

    Members that have applied the latest settlement agree on all steps committed before it; if one of them has committed a step,
    all of them have prepared it. A member that has not applied it has missed an epoch, and its later commits are void.
    """
    latest = max(state.epoch for state in steps.values())
    version = max(state.committed for state in steps.values() if state.epoch == latest)
    return Settlement(
        version,
        frozenset(name for name, state in steps.items() if state.committed != version and state.prepared == version),
        frozenset(name for name, state in steps.items() if version not in (state.committed, state.prepared)),
    )


@dataclass(frozen=True)
class Pause:
    """Pause between two committed steps of an elastic run, caused by a change of members, with its consecutive parts.

    The time of the steps themselves is not included.

    Attributes:
        at_s: time at which the member noticed the end of its epoch, in seconds since 1970.
        members: number of members of the new epoch.
        discarded_s: seconds of discarded work since the last commit, including waits for lost members.
        quorum_s: seconds until the new epoch began.
        connections_s: seconds to connect its members.
        planning_s: seconds to decide which member holds which experts.
        moves_s: seconds to move the experts to these members.
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
        """Sum of all parts, in seconds."""
        return self.discarded_s + self.quorum_s + self.connections_s + self.planning_s + self.moves_s

    def __str__(self) -> str:
        """One line."""
        parts = (
            f"{part} {seconds:.2f}"
            for part, seconds in (
                ("discarded work", self.discarded_s), ("quorum", self.quorum_s), ("connections", self.connections_s),
                ("planning", self.planning_s), ("moves", self.moves_s),
            )
        )  # fmt: skip
        return f"{self.seconds:.2f} s until {self.members} ranks went on: {', '.join(parts)}"


class PauseTimer:
    """Measures the parts of a member's pauses. Time before its first commit does not count."""

    def __init__(self) -> None:
        self._parts: dict[str, float] = {}
        self._ended_s: float | None = None  # when the last epoch was over, since 1970
        self._committed, self._since_s = False, time.perf_counter()

    def add(self, part: str) -> None:
        """Adds the time since the last call of any method to a part of the pause; `part` is an attribute of Pause."""
        now_s = time.perf_counter()
        self._parts[part] = self._parts.get(part, 0.0) + now_s - self._since_s
        self._since_s = now_s

    def epoch_over(self) -> None:
        """Records that the epoch is over; the time since the last call counts as discarded work."""
        self.add("discarded_s")
        self._ended_s = self._ended_s or time.time()

    def keep_work(self) -> None:
        """Records that the step during which the epoch ended is committed after all, so no work was discarded."""
        self._parts["discarded_s"] = 0.0

    def commit(self, members: int) -> Pause | None:
        """Records a commit in an epoch of `members` members. Returns the pause before the step, or None if there was none."""
        pause = None
        if self._committed and self._ended_s is not None:
            pause = Pause(self._ended_s, members, **self._parts)
        self._parts, self._ended_s, self._committed, self._since_s = {}, None, True, time.perf_counter()
        return pause


class StateLost(RankFailed):
    """Exception raised if the members of an epoch together lack part of the state, so they must restore a checkpoint."""


class StepWork(Protocol):
    """Interface of the computation and the state of one member. `begin` and `prepare` are collective calls."""

    @property
    def step(self) -> int:
        """Number of steps that have been applied to the held state; -1: no state is held."""

    @property
    def steps(self) -> int:
        """Total number of steps of the run."""

    def restore(self) -> int:
        """Restores the last checkpoint, when no member holds a usable state. Returns the checkpoint's number of steps."""

    def begin(self, epoch: Epoch, settlement: Settlement) -> None:
        """Moves state between members, so that together they hold all of it; members in `settlement.stale` start with none.

        If the version's epoch is 0, parts that no member holds are read from the checkpoint of that step.

        Raises:
            StateLost: on all members, if no member holds some part.
            RankFailed: if a member is lost. The member must then still hold the state that it held before the call.
        """

    def prepare(self) -> None:
        """Computes the next step without changing the state. Raises RankFailed if a member is lost."""

    def commit(self) -> None:
        """Applies the prepared step to the state."""

    def discard(self) -> None:
        """Drops the prepared step, if there is one."""


def run_elastic(member: Member, work: StepWork, on_pause: Callable[[Pause], None] = lambda pause: None) -> None:
    """Runs one member's steps until all steps of the run are committed, across all changes of membership.

    Args:
        member: joins the epochs.
        work: the computation and the state of this member.
        on_pause: called after the first step of an epoch with the pause before it, if this member had committed a step before.

    Raises:
        RankFailed: if no epoch begins in time.
    """
    steps, agreed, timer = MemberSteps(Version(0, work.step)), False, PauseTimer()
    while True:
        timer.epoch_over()
        epoch = member.join(asdict(steps), agreed)
        timer.add("quorum_s")
        settlement = settle({name: msgspec.convert(data, MemberSteps) for name, data in epoch.data.items()})
        if member.name in settlement.commits:
            work.commit()
            timer.keep_work()
        else:
            work.discard()
        steps, agreed = settlement.applied(epoch.number, member.name, steps), False
        if settlement.version == NOTHING:
            steps = MemberSteps(Version(0, work.restore()), None, epoch.number)
            settlement = replace(settlement, version=steps.committed, stale=frozenset())
            timer.add("moves_s")
        if settlement.version.step >= work.steps:
            return
        try:
            member.connect(epoch)
            timer.add("connections_s")
            work.begin(epoch, settlement)
            timer.add("moves_s")
            if member.name in settlement.stale:
                steps = MemberSteps(settlement.version, None, epoch.number)
            while not agreed:
                work.prepare()
                steps = steps.prepare()
                assert steps.prepared is not None
                agreed = member.vote(leave=steps.prepared.step >= work.steps)
                steps = steps.commit()
                work.commit()
                if (pause := timer.commit(len(epoch.members))) is not None:
                    on_pause(pause)
        except RankFailed as error:
            if isinstance(error, StateLost):
                steps = MemberSteps(NOTHING, None, epoch.number)
            member.leave()
