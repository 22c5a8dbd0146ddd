"""Training run: its folder, to which one run at a time writes, and its steps, from the newest checkpoint to the final model.

`TrainingRun` runs the steps of a run with fixed ranks.
"""

import json
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import torch

from aurora.elastic.host_connection import this_version
from aurora.elastic.steps import Pause
from aurora.errors import BadInput
from aurora.io.files import open_locked
from aurora.models.hub import model_digest
from aurora.moe.transport import Transport
from aurora.training.checkpoint import (
    CheckpointWriter,
    check_same_training,
    export_model,
    newest_checkpoint,
    remove_newer,
    restore,
)
from aurora.training.trainer import PreparedStep, Trainer
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


def committed_step(prepared: PreparedStep, seconds: float, moved: int) -> CommittedStep:
    """Returns the CommittedStep of a prepared step; `moved`: number of experts that moved before it."""
    return CommittedStep(prepared.step, prepared.loss, prepared.router_loss, prepared.gradient_norm, seconds, moved)


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
    found = set()
    with suppress(OSError), file.open(encoding="utf-8", errors="replace") as log:
        for line in log:
            with suppress(ValueError, TypeError, KeyError, RecursionError, BadInput):
                found.add(whole_number(json.loads(line)["step"]))
    return found


@dataclass(frozen=True)
class TrainingRun:
    """Training run with fixed ranks, as one rank executes it: model, options and folder.

    Args:
        path: the model's folder.
        about: values that identify this training, for checkpoints.
        options, output: as in `aurora.train`.
    """

    path: str
    about: dict[str, Any]
    options: TrainOptions
    output: Path

    def take_steps(
        self,
        trainer: Trainer,
        prepare: Callable[[], PreparedStep],
        transport: Transport,
        ranks: int,
        transport_name: str,
        tell: Callable[[CommittedStep], CommittedStep] = lambda step: step,
    ) -> TrainResult:
        """Runs all steps (with `options.resume`, from the newest checkpoint), and writes the model. A collective call.

        Args:
            trainer: the trainer, after `join` and before `place`.
            prepare: prepares the trainer's next step.
            transport: the trainer's transport.
            ranks, transport_name: number of ranks and name of the transport, for the result.
            tell: called with each committed step; returns the step to be logged.

        Returns:
            The result, the same on all ranks except for seconds and remarks.
        """
        options, output, rank = self.options, self.output, transport.rank
        remarks = self._begin(trainer, transport)
        resumed, steps = trainer.state.steps, list[CommittedStep]()
        writer = CheckpointWriter(output / CHECKPOINTS, self.about)
        for step in range(resumed, options.steps):
            began_s = time.perf_counter()
            due = options.rebalance_every is not None and step % options.rebalance_every == 0 and step > resumed
            moved = trainer.rebalance() if due else 0
            prepared = prepare()
            trainer.commit(prepared)
            steps.append(tell(committed_step(prepared, time.perf_counter() - began_s, moved)))
            if rank == 0:
                remarks += log_step(output / LOG, steps[-1])
            every = options.checkpoint_every
            if step + 1 == options.steps or (every is not None and (step + 1) % every == 0):
                writer.save(trainer.state, trainer.placement, rank)
        writer.wait()
        export_model(trainer.state, trainer.placement, transport, self.path, options.dtype, output / MODEL)
        transport.gather(torch.zeros(1, dtype=torch.uint8))  # nobody leaves before the model is written
        min_replicas, tokens = options.min_replicas_among(ranks), options.batch * options.length
        told = tuple(remarks + writer.failures)
        return TrainResult(output / MODEL, ranks, transport_name, min_replicas, tokens, resumed, tuple(steps), told)

    def _begin(self, trainer: Trainer, transport: Transport) -> list[str]:
        """Places the experts, with the state of the newest checkpoint if wanted. Returns what was wrong with newer ones."""
        folder, resume = self.output / CHECKPOINTS, self.options.resume
        checkpoint, remarks = newest_checkpoint(folder) if resume else (None, [])
        steps_R = transport.gather(torch.tensor([0 if checkpoint is None else checkpoint.steps]))[:, 0].tolist()
        if len(set(steps_R)) > 1:
            raise BadInput(f"{folder}: expected the same checkpoints on all ranks, found those of steps {steps_R}")
        if checkpoint is not None:
            check_same_training(checkpoint, self.about)
        if resume and transport.rank == 0:  # no rank writes before all have placed their experts
            remove_newer(folder, 0 if checkpoint is None else checkpoint.steps)
        placement = trainer.planned()
        if checkpoint is not None:
            restore(trainer.state, checkpoint, [slots_G[transport.rank] for slots_G in placement.slots_LG])
        trainer.place(placement)
        return remarks
