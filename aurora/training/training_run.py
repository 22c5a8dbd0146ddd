"""Training run: its folder, to which one run at a time writes, and the records of its steps."""

import json
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from aurora.elastic.host_connection import this_version
from aurora.elastic.steps import Pause, Version
from aurora.errors import BadInput
from aurora.io.files import open_locked
from aurora.models.hub import model_digest
from aurora.types import TrainOptions
from aurora.types.read_numbers import whole_number
from aurora.types.run_options import OF_EACH_HOST

MARK = ".run"  # in a run's folder while the run writes there


@contextmanager
def sole_run(output: Path) -> Iterator[str]:
    """Context manager that locks a run's folder. Yields a random mark, which is in a file of the folder meanwhile.

    Raises:
        BadInput: if another run holds the lock, or the folder cannot be written.
    """
    mark, path = secrets.token_hex(16), output / MARK
    with open_locked(path) as file:
        try:
            _write(file, mark, path)
            yield mark
        finally:
            path.unlink(missing_ok=True)


def _write(file: FileIO, mark: str, path: Path) -> None:
    try:
        file.truncate(0)
        file.write(mark.encode())
    except OSError as error:
        raise BadInput(f"{path}: cannot be written: {error.strerror}") from None


def has_mark(output: Path, mark: str) -> bool:
    """Returns True if the folder has this mark from `sole_run`; so two hosts detect that they share the folder."""
    try:
        return (output / MARK).read_text() == mark
    except (OSError, ValueError):
        return False


def shared_by_hosts(path: str) -> dict[str, str]:
    """Returns {description: value} of values that must be equal on all hosts: aurora's version and the model's digest.

    Args:
        path: the model's folder, or its name in the local hub cache.
    """
    return this_version() | {"`model`": model_digest(path)[:16]}


def leaders_options(options: TrainOptions) -> dict[str, Any]:
    """Returns, by name, the options that all hosts take from the leader."""
    return {name: value for name, value in asdict(options).items() if name not in OF_EACH_HOST}


MODEL, CHECKPOINTS, LOG = "model", "checkpoints", "log.jsonl"  # in a run's folder


@dataclass(frozen=True)
class CommittedStep:
    """Record of one committed step of a training run.

    Attributes:
        step: number of the step, from 0.
        loss: mean loss of the global batch's predicted tokens, before the step.
        router_loss: the load-balancing loss before weighting; zero if its weight is zero.
        gradient_norm: Euclidean norm of the gradient.
        seconds: seconds of the step on the first rank.
        moved: number of experts that moved between ranks before the step.
        pause: with `elastic`, the pause before the step, if ranks were lost or joined; else None.
        not_waited_for: with `redundancy`, the ranks for which the step did not wait.
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
        ranks: number of ranks. On the leader: largest number on all hosts at one time; on a joining host: its number of ranks.
        transport: name of the transport between ranks.
        min_replicas: least number of replicas of an expert.
        tokens: number of tokens of a global batch.
        resumed: number of steps of the checkpoint from which the run was resumed; 0: not resumed.
        steps: the steps of this run.
        remarks: one sentence per file that could not be used or written, and per unusable answer of a rank.
        lost: with `elastic` or `redundancy`, one sentence per lost rank; on the leader, for the ranks of all hosts, and one
            sentence per lost host.
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
        """The pauses before the steps of this run."""
        return tuple(step.pause for step in self.steps if step.pause is not None)

    @property
    def tokens_per_s(self) -> float:
        """Trained tokens per second of the steps' time; 0 without steps."""
        seconds = sum(step.seconds for step in self.steps)
        return self.tokens * len(self.steps) / seconds if self.steps else 0.0


@dataclass(frozen=True)
class FinalStep:
    """Step that all members know to be committed, and the version of the state after it; a message from member to launcher."""

    version: Version
    step: CommittedStep


class KeptSteps:
    """Collects what members report for the result of a run: final steps, remarks and losses of ranks.

    Of several reports of a step, the one of the latest epoch is kept; within an epoch, the one with a pause.

    Attributes:
        finals: the reports, by step.
        remarks, lost: as in TrainResult.
    """

    def __init__(self) -> None:
        self.finals: dict[int, FinalStep] = {}
        self.remarks: list[str] = []
        self.lost: list[str] = []

    def __len__(self) -> int:
        return len(self.finals)

    def take(self, final: FinalStep) -> tuple[bool, bool]:
        """Adds a report of a step. Returns (True if it changes the kept steps, True if it is the first report of its epoch)."""
        before = self.finals.get(final.step.step)
        repeated = before is not None and final.version <= before.version  # by another member: it may have joined after a pause
        new = before is None or not repeated or (final.step.pause is not None and before.step.pause is None)
        if new:
            self.finals[final.step.step] = final
        return new, not repeated

    def result(self, output: Path, options: TrainOptions, ranks: int) -> TrainResult:
        """Returns the TrainResult with these steps."""
        steps = tuple(self.finals[number].step for number in sorted(self.finals))
        return TrainResult(
            output / MODEL, ranks, options.transport, options.min_replicas_among(ranks), options.batch * options.length,
            min(self.finals, default=options.steps), steps, tuple(dict.fromkeys(self.remarks)), tuple(self.lost),
        )  # fmt: skip


def log_step(file: Path, step: CommittedStep) -> list[str]:
    """Appends a step to a run's log. Returns [] on success, else [sentence on the failure]; training continues."""
    try:
        with file.open("a", encoding="utf-8") as log:
            log.write(json.dumps(asdict(step)) + "\n")
    except OSError as error:
        return [f"{file}: steps were not logged: {error.strerror}"]
    return []


def logged_steps(file: Path) -> set[int]:
    """Returns the numbers of the steps in a run's log; empty if it cannot be read. Incomplete lines are ignored."""
    numbers = set()
    with suppress(OSError), file.open(encoding="utf-8", errors="replace") as log:
        for line in log:
            with suppress(ValueError, TypeError, KeyError, RecursionError, BadInput):
                numbers.add(whole_number(json.loads(line)["step"]))
    return numbers
