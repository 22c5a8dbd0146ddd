"""Training run: its folder, to which one run at a time writes, and the records of its steps."""

import json
import secrets
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from filelock import ReadWriteLock, Timeout

from aurora.elastic.steps import Pause, Version
from aurora.errors import BadInput
from aurora.io.files import read_text, write_text
from aurora.training.checkpoint import STEP, begun_checkpoints
from aurora.types import TrainOptions
from aurora.types.read_numbers import whole_number

MARK, LOCK = ".run", ".run.lock"  # in a run's folder: the run's mark, and the file that is locked while the run writes there
FIRST_S = 2.0  # at most, until the first host of a run shares its lock


@contextmanager
def sole_run(output: Path) -> Iterator[None]:
    """Context manager that locks a run's folder.

    Raises:
        BadInput: if another run holds the lock, or the folder cannot be written.
    """
    with _locked(output):
        yield


@contextmanager
def shared_run(output: Path, lighthouse: str, resume: bool) -> Iterator[str]:
    """Context manager that locks the folder of a run over several hosts, which share the lock.

    The first host leaves a random mark in the folder; by this mark, hosts detect that they share the folder.

    Args:
        output: the folder.
        lighthouse: address of the run's lighthouse, which tells it from other runs.
        resume: True: the first host may find checkpoints in the folder.

    Yields:
        The mark.

    Raises:
        BadInput: if another run holds the lock, the folder cannot be written, or the first host finds checkpoints.
    """
    path = output / MARK
    with suppress(_Locked), _locked(output):  # no host of this run is there: it is the first
        check_begun(output, resume)
        if not path.exists() or _lighthouse(path) != lighthouse:
            write_text(path, f"{lighthouse} {secrets.token_hex(8)}")
    with _locked(output, shared=True, timeout_s=FIRST_S):
        if (found := _lighthouse(path)) != lighthouse:
            raise BadInput(f"{path}: a run at the lighthouse {found} writes it, expected {lighthouse}")
        yield read_text(path)


def _lighthouse(mark: Path) -> str:
    """The address of the lighthouse in a mark."""
    return read_text(mark).partition(" ")[0]


class _Locked(BadInput):
    """Another run holds the lock."""


@contextmanager
def _locked(output: Path, shared: bool = False, timeout_s: float = 0.0) -> Iterator[None]:
    """Context manager that holds the lock of a run's folder. Raises _Locked, or BadInput if the folder cannot be written."""
    try:
        lock = ReadWriteLock(output / LOCK, is_singleton=False)
        (lock.acquire_read if shared else lock.acquire_write)(timeout_s)
    except Timeout:
        raise _Locked(f"{output / MARK}: another run writes it") from None
    except (OSError, sqlite3.Error) as error:
        raise BadInput(f"{output / LOCK}: cannot be written: {error}") from None
    try:
        yield
    finally:
        lock.release()
        lock.close()


def check_begun(output: Path, resume: bool) -> None:
    """Raises BadInput if a run's folder has checkpoints and the run is not to be resumed, or a model that no run wrote."""
    begun = begun_checkpoints(output / CHECKPOINTS)
    if begun and not resume:
        raise BadInput(f"{begun[-1][1]}: is of an earlier run: expected `resume`, which goes on from it, or another folder")
    others = [path for path in (output / CHECKPOINTS).glob("step-*") if not STEP.match(path.name)]
    if others and not begun:
        raise BadInput(f"{others[0]}: expected a name such as step-00000100-of-4, as checkpoints of this version have")
    if not begun and (output / MODEL).exists():
        raise BadInput(f"{output / MODEL}: is of no run that can be resumed, and would be replaced: expected another folder")


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
        ranks: largest number of ranks at one time, those of other hosts included.
        transport: name of the transport between ranks.
        min_replicas: least number of replicas of an expert.
        tokens: number of tokens of a global batch.
        resumed: number of steps of the checkpoint from which the run was resumed; 0: not resumed.
        steps: the steps of this run.
        remarks: one sentence per file that could not be used or written, and per unusable answer of a rank.
        lost: with `elastic` or `redundancy`, one sentence per lost rank of this host.
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
    """Step that all members know to be committed; a message from member to launcher.

    Args:
        version: version of the state after the step.
        step: its record.
        ranks: number of members when it was reported.
        logs: True: the launcher of this member writes the run's log.
    """

    version: Version
    step: CommittedStep
    ranks: int = 1
    logs: bool = True


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
        """Returns the TrainResult with these steps. `ranks`: the number of ranks if there are no steps."""
        ranks = max((final.ranks for final in self.finals.values()), default=ranks)
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
