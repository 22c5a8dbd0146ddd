"""Messages between the launchers of a training run: that of the host that leads, and those of the hosts that join."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from aurora.runtime.distributed.commit_rule import Version
from aurora.runtime.distributed.elastic_steps import Pause
from aurora.training.training_run import CommittedStep


@dataclass(frozen=True)
class JoinTraining:
    """To the leader: a host wants to take part, or is connected anew.

    Args:
        host: its label in names and messages.
        ranks: how many ranks it starts.
        shared: what it has to have as the leader has it; see `shared_by_hosts`.
    """

    host: str
    ranks: int
    shared: dict[str, str]


@dataclass(frozen=True)
class Welcome:
    """To a host: it takes part.

    Args:
        mark: is in the run's folder, which all hosts share.
        options: of the leader, for all hosts; see `leaders_options`.
        text: digest of the samples that all hosts have; see `samples_digest`.
    """

    mark: str
    options: dict[str, Any]
    text: str


@dataclass(frozen=True)
class RunOver:
    """To a host: there is nothing to take part in. `reason` is why, empty if all steps are done."""

    reason: str


@dataclass(frozen=True)
class FinalStep:
    """Of a member: a step that all members know to be committed. A host tells the leader of the first of each."""

    version: Version
    step: CommittedStep


@dataclass(frozen=True)
class RankLost:
    """To the leader: a host has lost a rank; `sentence` says how."""

    sentence: str


@dataclass(frozen=True)
class HostDone:
    """To the leader, as a host's last message: none of its ranks is left."""

    remarks: tuple[str, ...]


RunMessage = JoinTraining | Welcome | RunOver | FinalStep | RankLost | HostDone


def pack(message: RunMessage) -> dict[str, Any]:
    """Returns a message as JSON values."""
    return {"kind": type(message).__name__} | asdict(message)


def unpack(data: Mapping[str, Any]) -> RunMessage:
    """Returns the message that `pack` made the values of.

    Raises:
        ValueError: if they are none.
    """
    match data:
        case {"kind": "JoinTraining", "host": str(host), "ranks": int(ranks), "shared": dict(shared)} if ranks > 0:
            return JoinTraining(host, ranks, shared)
        case {"kind": "Welcome", "mark": str(mark), "options": dict(options), "text": str(text)}:
            return Welcome(mark, options, text)
        case {"kind": "RunOver", "reason": str(reason)}:
            return RunOver(reason)
        case {"kind": "RankLost", "sentence": str(sentence)}:
            return RankLost(sentence)
        case {"kind": "HostDone", "remarks": [*remarks]} if all(isinstance(each, str) for each in remarks):
            return HostDone(tuple(remarks))
        case {"kind": "FinalStep", "version": {"epoch": int(epoch), "step": int(number)}, "step": dict(step)}:
            return FinalStep(Version(epoch, number), _step(step))
    raise ValueError("no message of this version")


def _step(values: dict[str, Any]) -> CommittedStep:
    """The step of its values. Elastic steps wait for all ranks."""
    found = values.get("pause")
    try:
        step = CommittedStep(**values | {"pause": None if found is None else Pause(**found), "not_waited_for": ()})
    except TypeError:
        raise ValueError("no step of this version") from None
    numbers = [value for name, value in values.items() if name not in ("pause", "not_waited_for")]
    if not all(isinstance(value, int | float) for value in (*numbers, *(found or {}).values())) or not isinstance(
        step.step, int
    ):
        raise ValueError("no step of this version")
    return step
