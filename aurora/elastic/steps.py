"""Elastic steps: each step is done by the present members of an epoch, and committed by all of them or by none.

A member prepares a step: it computes everything that the step needs, and changes nothing. Then the members vote. A member that
gets all votes commits the step. If a member is lost during the vote, some may have committed, and others not know the outcome.
But all of them have prepared the step, and keep it prepared until they join the next epoch. There every member tells which
steps it has committed and prepared, and `settle` finds the same answer for all.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import msgspec

from aurora.elastic.member import Epoch, Member
from aurora.errors import RankFailed


@dataclass(frozen=True, order=True)
class Version:
    """Version of the state, of which each member holds a part. Parts of equal versions fit together; later ones are greater.

    Args:
        epoch: the epoch in which the last step was voted on; 0: the state with which training began.
        step: number of steps that the state has had.
    """

    epoch: int
    step: int


NOTHING = Version(0, -1)  # version of a member that holds no usable state


@dataclass(frozen=True)
class MemberSteps:
    """Steps that a member has committed and prepared.

    Args:
        committed: version of the state that it holds.
        prepared: version of the state after the step that it has prepared; None: it has prepared none.
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
    """State from which the members of a new epoch go on, and the members that must change theirs for it.

    Args:
        version: version of the state to go on from; NOTHING: no member holds a usable state.
        commits: the members that must commit their prepared step. All others discard theirs.
        stale: the members that hold another state or none, and must fetch this one.
    """

    version: Version
    commits: frozenset[str]
    stale: frozenset[str]

    def applied(self, epoch: int, name: str, steps: MemberSteps) -> MemberSteps:
        """Returns the MemberSteps of member `name` once it has applied this settlement at the start of `epoch`."""
        return MemberSteps(NOTHING) if name in self.stale else MemberSteps(self.version, None, epoch)


def settle(steps: Mapping[str, MemberSteps]) -> Settlement:
    """Decides from which state the members of a new epoch go on, from the steps that each has committed and prepared.

    Members that have applied the latest settlement agree on all steps committed before it. A member that has not applied it has
    missed an epoch, and its later commits are void. Among the former, a step that one member has committed, all have prepared.
    """
    latest = max(each.epoch for each in steps.values())
    version = max(each.committed for each in steps.values() if each.epoch == latest)
    return Settlement(
        version,
        frozenset(name for name, each in steps.items() if each.committed != version and each.prepared == version),
        frozenset(name for name, each in steps.items() if version not in (each.committed, each.prepared)),
    )


@dataclass(frozen=True)
class Pause:
    """Pause between two committed steps of an elastic run, because members were lost or joined, without the steps themselves.

    Each part begins when the one before it ends.

    Attributes:
        at_s: when the member noticed that its epoch was over, in seconds since 1970.
        members: number of members of the epoch that began.
        discarded_s: seconds of work since the last commit that was lost, waiting for lost members included.
        quorum_s: seconds until the next epoch began.
        connections_s: seconds until its members were connected.
        planning_s: seconds until it was decided which member holds which experts.
        moves_s: seconds until the members held them.
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
            f"{what} {seconds:.2f}"
            for what, seconds in (
                ("discarded work", self.discarded_s), ("quorum", self.quorum_s), ("connections", self.connections_s),
                ("planning", self.planning_s), ("moves", self.moves_s),
            )
        )  # fmt: skip
        return f"{self.seconds:.2f} s until {self.members} ranks went on: {', '.join(parts)}"


class PauseTimer:
    """Measures a member's pauses, part by part. Time before its first commit does not count."""

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
        """Notes that the epoch is over; the time since the last call was lost work."""
        self.add("discarded_s")
        self._ended_s = self._ended_s or time.time()

    def keep_work(self) -> None:
        """Notes that the step at which the epoch ended is committed after all, so that its time was no lost work."""
        self._parts["discarded_s"] = 0.0

    def commit(self, members: int) -> Pause | None:
        """Notes a commit in an epoch of `members` members. Returns the pause before the step; None: there was none."""
        found = None
        if self._committed and self._ended_s is not None:
            found = Pause(self._ended_s, members, **self._parts)
        self._parts, self._ended_s, self._committed, self._since_s = {}, None, True, time.perf_counter()
        return found


class StateLost(RankFailed):
    """Error that the members of an epoch do not hold all of the state, so they must go back to the last checkpoint."""


class StepWork(Protocol):
    """Interface of a member's work in each step, and of the state that it holds. `begin` and `prepare` are collective calls."""

    @property
    def step(self) -> int:
        """Number of steps that the held state has had; -1: no state is held."""

    @property
    def steps(self) -> int:
        """Number of steps of the whole run."""

    def restore(self) -> int:
        """Goes back to the last checkpoint, because no member holds a usable state. Returns its number of steps."""

    def begin(self, epoch: Epoch, settlement: Settlement, groups: list[Any]) -> None:
        """Moves state between members, so that together they hold all of it; those in `settlement.stale` hold none before.

        If the version is of epoch 0, parts that no member holds are read from the checkpoint of that step.

        Raises:
            StateLost: if parts are held by no member; raised on all members.
            RankFailed: if a member is lost. The state that was held before the call must then still be held.
        """

    def prepare(self) -> None:
        """Computes the next step without changing the state. Raises RankFailed if a member is lost."""

    def commit(self) -> None:
        """Performs the prepared step."""

    def discard(self) -> None:
        """Forgets the prepared step, if there is one."""


def run_elastic(member: Member, work: StepWork, on_pause: Callable[[Pause], None] = lambda pause: None) -> None:
    """Runs a member's steps until all are done, through all changes of membership.

    Args:
        member: takes part in the epochs.
        work: the work of each step.
        on_pause: called after the first step of an epoch, with the pause before it, if this member committed a step before.

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
            groups = member.connect(epoch)
            timer.add("connections_s")
            work.begin(epoch, settlement, groups)
            timer.add("moves_s")
            if member.name in settlement.stale:
                steps = MemberSteps(settlement.version, None, epoch.number)
            while not agreed:
                work.prepare()
                steps = steps.prepare()
                assert steps.prepared is not None
                agreed = member.vote(groups[0], leave=steps.prepared.step >= work.steps)
                steps = steps.commit()
                work.commit()
                if (pause := timer.commit(len(epoch.members))) is not None:
                    on_pause(pause)
        except RankFailed as error:
            if isinstance(error, StateLost):
                steps = MemberSteps(NOTHING, None, epoch.number)
            member.leave()
