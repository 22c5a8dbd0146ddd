"""Training runs with redundancy: this process holds the weights, and local ranks compute gradients of parts of each batch."""

from dataclasses import replace
from pathlib import Path

from aurora.runtime.distributed.aggregation_worker import Delay
from aurora.runtime.distributed.memory import Memory, MemoryTransport
from aurora.training.coded_gradients import CodedGradients
from aurora.training.elastic_launcher import Watch
from aurora.training.result import CommittedStep, TrainResult
from aurora.training.trainer import alike_ranks, load_trainer
from aurora.training.training_run import TrainingRun
from aurora.types import TrainOptions
from aurora.types.arrays import IntArray


def train_coded(
    path: str,
    samples_NT: IntArray,
    options: TrainOptions,
    output: Path,
    delay_s: Delay | None = None,
    watch: Watch = lambda step, pids: None,
) -> TrainResult:
    """Trains by `CodedGradients`, with redundancy 1 too.

    Args:
        path: the model's folder.
        samples_NT: (N, T) int64, the token ids of all samples.
        options, output: as in `aurora.train`.
        delay_s: as in `CodedGradients`.
        watch: called after each step with its number and the process id of every rank.

    Raises:
        BadInput, InfeasiblePlan, RankFailed: as `CodedGradients`.
    """
    trainer, about = load_trainer(path, "cpu", samples_NT, options)
    transport = MemoryTransport(Memory(1, options.timeout_s), 0)
    trainer.join(transport, alike_ranks(1))
    with CodedGradients(trainer, path, samples_NT, options, delay_s) as coded:

        def tell(step: CommittedStep) -> CommittedStep:
            watch(step.step, coded.pids)
            return replace(step, not_waited_for=coded.not_waited_for)

        run = TrainingRun(path, about, options, output)
        result = run.take_steps(trainer, coded.prepare, transport, options.ranks, "store", tell)
    return replace(result, remarks=result.remarks + tuple(coded.remarks), lost=tuple(coded.lost))
