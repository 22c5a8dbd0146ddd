"""Commit rule of elastic training: a step is committed by all members of an epoch or by none, whoever is lost and whenever.

A member prepares a step: it computes everything that the step needs, and changes nothing. Then the members vote. Who sees that
all have prepared the step commits it. If a member is lost during the vote, some may have committed and others may not know. All
of them have prepared the step, though, and keep what they prepared until they join the next epoch. There everyone says what it
has committed and prepared, and `settle` gives the same answer to all.
"""

from collections.abc import Mapping
from dataclasses import dataclass


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
