"""Elastic steps: work in steps, done by whoever is there; each step is committed by all members or by none."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any, Protocol

from aurora.errors import RankFailed
from aurora.runtime.distributed.commit_rule import NOTHING, MemberSteps, Settlement, Version, settle
from aurora.runtime.distributed.member import Epoch, Member
from aurora.runtime.distributed.pauses import Pause, PauseTimer


class StateLost(RankFailed):
    """The members of an epoch do not hold all of the state, so that they have to go back to the last checkpoint."""


class StepWork(Protocol):
    """What a member does in each step, and what it holds. Calls of `begin` and `prepare` are collective."""

    @property
    def step(self) -> int:
        """How many steps the state that is held has had; -1: none is held."""

    @property
    def steps(self) -> int:
        """How many steps there are."""

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
