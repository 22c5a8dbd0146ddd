"""Coded gradients: several workers compute each part of a global batch; no step waits for one whose parts others have sent.

The master holds the weights and AdamW's state, sends the weights of each step to all workers, and sums what comes back. A
worker keeps no state: whatever it missed, it goes on with the weights of the newest step.
Source: BCC (arXiv:1710.09990).
"""

from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

from aurora.planner.gradient_codes import GradientCode, load_of, make_code
from aurora.runtime.distributed.aggregation_worker import Arguments, Delay
from aurora.runtime.distributed.coded_aggregation import CodedAggregator
from aurora.training.part_gradients import CHOSEN, LOSSES, STEP, WEIGHTS, PartGradients
from aurora.training.router_loss import router_loss_weight
from aurora.training.trainer import PreparedStep, Trainer
from aurora.types import AggregationResult, TrainOptions
from aurora.types.arrays import IntArray

NORMAL = ("used", "not needed", "not waited for")  # states of workers that say nothing bad


def code_of(options: TrainOptions) -> GradientCode:
    """Returns the code by which ranks share a batch of as many parts; BadInput or InfeasiblePlan if there is none."""
    ranks, scheme = options.ranks, options.scheme
    return make_code(
        scheme, ranks, ranks, load_of(scheme, ranks, ranks, options.redundancy), np.random.default_rng(options.seed)
    )


class CodedGradients:
    """Prepares the steps of the only rank of a training by worker processes. A context manager: none is left when it ends.

    Args:
        trainer: holds all experts.
        path: the model's folder.
        samples_NT: (N, T) int64, the token ids of all samples.
        options: `ranks` workers compute each part of a batch, of as many, `redundancy` times by `scheme`.
        delay_s: as in `CodedAggregator`: rehearses stragglers. With a load-balancing loss each step has two rounds.

    Attributes:
        not_waited_for: the workers that the last step did not wait for.
        remarks: a sentence for each worker that failed or sent what could not be used.
        lost: a sentence for each worker whose process ended.

    Raises:
        BadInput, InfeasiblePlan: if redundancy and scheme do not fit the ranks.
    """

    def __init__(
        self, trainer: Trainer, path: str, samples_NT: IntArray, options: TrainOptions, delay_s: Delay | None = None
    ) -> None:
        code, work = code_of(options), PartGradients(path, samples_NT, options, options.ranks)
        self._aggregator = CodedAggregator(work, [code], timeout_s=options.timeout_s, delay_s=delay_s, port=options.port)
        self._trainer = trainer
        self._experts = trainer.state.layers[0].count if router_loss_weight(trainer.model, options.router_loss) else 0
        self.not_waited_for: tuple[int, ...] = ()
        self.remarks: list[str] = []
        self.lost: list[str] = []

    def __enter__(self) -> Self:
        self._aggregator.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._aggregator.__exit__(*error)

    @property
    def pids(self) -> dict[int, int]:
        """The process id of each worker that was not lost."""
        return self._aggregator.pids

    def prepare(self) -> PreparedStep:
        """Prepares the trainer's next step; see `Trainer.prepare`.

        Raises:
            BadInput: if the gradient is not finite.
            RankFailed: if the workers that are left do not determine the gradient.
        """
        state = self._trainer.state
        arguments: dict[str, NDArray[np.generic]] = {STEP: np.array([state.steps]), WEIGHTS: state.weights_X.numpy()}
        slow = set[int]()
        if self._experts:
            arguments[CHOSEN] = self._sum(np.zeros(self._experts, dtype=np.int64), arguments, slow)
        like = np.zeros(len(arguments[WEIGHTS]) + LOSSES, dtype=arguments[WEIGHTS].dtype)
        total = self._sum(like, arguments, slow)
        self.not_waited_for = tuple(sorted(slow))
        loss, router_loss = total[-LOSSES:].tolist()
        return self._trainer.take_gradient(torch.from_numpy(total[:-LOSSES]), loss, router_loss)

    def _sum(self, like: NDArray[np.generic], arguments: Arguments, slow: set[int]) -> NDArray[np.generic]:
        """The sum over all parts. Notes what became of the workers; those that were not waited for are added to `slow`."""
        result: AggregationResult = self._aggregator.aggregate(like, arguments)
        step, lost = self._trainer.state.steps, self._aggregator.lost
        for report in result.reports:
            if report.state == "not waited for":
                slow.add(report.worker)
            elif report.worker in lost:
                if not any(said.startswith(f"rank {report.worker} ") for said in self.lost):
                    self.lost.append(f"rank {report.worker} was lost after {step} steps: {lost[report.worker]}")
            elif report.state not in NORMAL:
                self.remarks.append(f"rank {report.worker}, step {step}: {report.state}")
        return result.total
