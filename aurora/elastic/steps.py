"""Elastic steps: work in steps, done by whoever is there; each step is committed by all members of an epoch or by none.

A member prepares a step: it computes everything that the step needs, and changes nothing. Then the members vote. Who sees that
all have prepared the step commits it. If a member is lost during the vote, some may have committed and others may not know. All
of them have prepared the step, though, and keep what they prepared until they join the next epoch. There everyone says what it
has committed and prepared, and `settle` gives the same answer to all.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from aurora.elastic.member import Epoch, Member
from aurora.errors import RankFailed


@dataclass(frozen=True, order=True)
class Version:
    """Version of the state that a member holds its part of. Parts of equal versions fit together; later ones are greater.

    Args:
        epoch: the epoch in which the last step was voted on; 0: the state that training began with.
        step: how many steps are done.
    """

    epoch: int
    step: int


NOTHING = Version(0, -1)  # version of a member that holds no usable state


@dataclass(frozen=True)
class MemberSteps:
    """Steps that a member has committed and prepared.

    Args:
        committed: the state that it holds.
        prepared: the state that it would hold after the step that it has prepared; None: it has prepared none.
        epoch: the last epoch whose settlement it has applied, or in which it has fetched its state; 0: none.
    """

    committed: Version
    prepared: Version | None = None
    epoch: int = 0

    def prepare(self) -> "MemberSteps":
        """Returns what holds after the next step is prepared."""
        return MemberSteps(self.committed, Version(self.epoch, self.committed.step + 1), self.epoch)

    def commit(self) -> "MemberSteps":
        """Returns what holds after the prepared step is committed."""
        assert self.prepared is not None
        return MemberSteps(self.prepared, None, self.epoch)


@dataclass(frozen=True)
class Settlement:
    """State that the members of a new epoch go on from, and who has to change.

    Args:
        version: the state to go on from; NOTHING: no member holds a usable state.
        commits: the members that have to commit the step that they have prepared. All others discard theirs.
        stale: the members that hold another state or none, and have to fetch this one.
    """

    version: Version
    commits: frozenset[str]
    stale: frozenset[str]

    def applied(self, epoch: int, name: str, steps: MemberSteps) -> MemberSteps:
        """Returns what member `name` holds once it has committed or discarded its prepared step at the start of `epoch`."""
        return MemberSteps(NOTHING) if name in self.stale else MemberSteps(self.version, None, epoch)


def settle(steps: Mapping[str, MemberSteps]) -> Settlement:
    """Returns what the members of a new epoch go on from, by what each of them has committed and prepared.

    Members that have applied the latest settlement agree on what was committed before it: whoever has not, has missed an epoch,
    and what it has committed since is void. Among the former, what one has committed all have prepared.
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


class StateLost(RankFailed):
    """The members of an epoch do not hold all of the state, so that they have to go back to the last checkpoint."""


class StepWork(Protocol):
    """Work of a member in each step, and the state that it holds. Calls of `begin` and `prepare` are collective."""

    @property
    def step(self) -> int:
        """Number of steps that the held state has had; -1: none is held."""

    @property
    def steps(self) -> int:
        """Number of steps."""

    def restore(self) -> int:
        """Goes back to the last checkpoint, as all members do when none holds a usable state. Returns its number of steps."""

    def begin(self, epoch: Epoch, settlement: Settlement, groups: list[Any]) -> None:
        """Moves state, so that the epoch's members hold all of it; those in `settlement.stale` hold none before.

        In a version of epoch 0 what nobody holds is in the checkpoint of that step.

        Raises:
            StateLost: if the members do not hold all of it; on all members alike.
            RankFailed: if a member is lost, here and in `prepare`. What was held before the call must still be there then.
        """

    def prepare(self) -> None:
        """Computes what the next step changes, and changes nothing."""

    def commit(self) -> None:
        """Performs the prepared step."""

    def discard(self) -> None:
        """Forgets the prepared step, if there is one."""


def run_elastic(member: Member, work: StepWork, on_pause: Callable[[Pause], None] = lambda pause: None) -> None:
    """Runs steps until all are done, through all changes of membership.

    Args:
        member: takes part in the epochs.
        work: what to do in each step.
        on_pause: called after the first step of an epoch, if this member has committed one before it.

    Raises:
        RankFailed: if no epoch begins in time.
    """
    steps, agreed, timer = MemberSteps(Version(0, work.step)), False, PauseTimer()
    while True:
        timer.epoch_over()
        epoch = member.join(asdict(steps), agreed)
        timer.add("quorum_s")
        settlement = settle({name: parse_steps(data) for name, data in epoch.data.items()})
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


def parse_steps(data: Mapping[str, Any]) -> MemberSteps:
    """Returns what `asdict` made a dict of."""
    prepared = data["prepared"]
    return MemberSteps(
        Version(**data["committed"]), None if prepared is None else Version(**prepared), data["epoch"]
    )  # fmt: skip
