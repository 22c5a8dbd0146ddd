"""Result of a training run, and the log of its steps."""

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from aurora.runtime.distributed.pauses import Pause
from aurora.training.trainer import PreparedStep

MODEL, CHECKPOINTS, LOG = "model", "checkpoints", "log.jsonl"  # in a run's folder


@dataclass(frozen=True)
class CommittedStep:
    """A step of a training run.

    Attributes:
        step: its number, from 0.
        loss: mean loss of the global batch's predicted tokens, before the step.
        router_loss: the load-balancing loss, not weighted; zero if it has no weight.
        gradient_norm: Euclidean norm of the gradient.
        seconds: how long it took on the first rank.
        moved: experts that moved between ranks before it.
        pause: with `elastic`, the pause before it, if ranks were lost or joined.
        not_waited_for: with `redundancy`, the ranks that it did not wait for.
    """

    step: int
    loss: float
    router_loss: float
    gradient_norm: float
    seconds: float
    moved: int
    pause: Pause | None = None
    not_waited_for: tuple[int, ...] = ()


@dataclass(frozen=True)
class TrainResult:
    """Result of a training run.

    Attributes:
        model: folder of the trained model.
        ranks: number of ranks; on a host that leads, the most of all hosts at once; on one that joins, its own.
        transport: how they exchanged tokens.
        min_replicas: replicas that each expert had at least.
        tokens: tokens of a global batch.
        resumed: how many steps the checkpoint had that the run went on from; 0: none.
        steps: the steps of this run.
        remarks: a sentence for each file that could not be used or written, and for what ranks sent that could not be used.
        lost: with `elastic` or `redundancy`, a sentence for each rank that was lost; on a host that leads, those of all hosts,
            and lost hosts.
    """

    model: Path
    ranks: int
    transport: str
    min_replicas: int
    tokens: int
    resumed: int
    steps: tuple[CommittedStep, ...]
    remarks: tuple[str, ...]
    lost: tuple[str, ...] = ()

    @property
    def pauses(self) -> tuple[Pause, ...]:
        """The pauses before its steps."""
        return tuple(step.pause for step in self.steps if step.pause is not None)

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of its steps; zero without any."""
        seconds = sum(step.seconds for step in self.steps)
        return self.tokens * len(self.steps) / seconds if self.steps else 0.0


def committed_step(prepared: PreparedStep, seconds: float, moved: int) -> CommittedStep:
    """Returns a step that was prepared as one that is committed."""
    return CommittedStep(prepared.step, prepared.loss, prepared.router_loss, prepared.gradient_norm, seconds, moved)


def log_step(file: Path, step: CommittedStep) -> list[str]:
    """Adds a step to a run's log. Returns a sentence if it cannot be written; training goes on."""
    try:
        with file.open("a", encoding="utf-8") as log:
            log.write(json.dumps(asdict(step)) + "\n")
    except OSError as error:
        return [f"{file}: steps were not logged: {error.strerror}"]
    return []


def logged_steps(file: Path) -> set[int]:
    """Returns the numbers of the steps in a run's log; none if it cannot be read. A line that is torn counts as none."""
    found = set()
    with suppress(OSError), file.open(encoding="utf-8", errors="replace") as log:
        for line in log:
            with suppress(ValueError, TypeError, KeyError):
                found.add(int(json.loads(line)["step"]))
    return found
