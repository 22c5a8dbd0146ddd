"""Coded gradients: several workers compute each part of a global batch. A step does not wait for redundant stragglers.

The master holds the weights and AdamW's state, sends the weights of each step to all workers, and sums the gradients that they
return. A worker keeps no state between steps, so one that missed steps continues with the weights of the newest step.
Source: BCC (arXiv:1710.09990).
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.utils import vector_to_parameters

from aurora.algorithms.gradient_codes import GradientCode, load_of, make_code
from aurora.errors import BadInput, plural
from aurora.models.loading import MoeModel, expert_parameters, load_model
from aurora.runtime.transports.ordered import Memory, MemoryTransport
from aurora.training.coded_aggregation import NORMAL, NOT_WAITED_FOR, Arguments, Array, CodedAggregator, Delay
from aurora.training.data import GlobalBatches
from aurora.training.elastic_run import Watch
from aurora.training.loss import PartLoss, router_loss_weight, set_exact_kernels
from aurora.training.member_training import take_steps
from aurora.training.state import optimizer_dtype
from aurora.training.trainer import PreparedStep, Trainer, load_trainer
from aurora.training.training_run import CommittedStep, TrainResult
from aurora.types import TrainOptions
from aurora.types.arrays import IntArray

STEP, WEIGHTS, CHOSEN = "step", "weights", "chosen"  # names of a round's arguments
LOSSES = 2  # what follows the gradient in a worker's message: the loss and the load-balancing loss


def code_of(options: TrainOptions) -> GradientCode:
    """Returns the gradient code that assigns the parts of a global batch (one per rank) to the ranks.

    Raises BadInput or InfeasiblePlan if there is no code for this redundancy and scheme.
    """
    ranks = options.ranks
    load = load_of(ranks, ranks, options.redundancy)
    return make_code(options.scheme, ranks, ranks, load, np.random.default_rng(options.seed))


class CodedGradients:
    """Prepares training steps on one rank, the master, from gradients that worker processes compute.

    With a load-balancing loss each step has two rounds.

    Args:
        trainer: the master's trainer, which holds all experts.
        aggregator: sums PartGradients over the parts of a batch.
        router_loss: as in TrainOptions.

    Attributes:
        not_waited_for: the workers for which the last step did not wait.
        remarks: one sentence per worker that failed, or whose answer could not be used.
        lost: one sentence per worker whose process ended.
    """

    def __init__(self, trainer: Trainer, aggregator: CodedAggregator, router_loss: float | None) -> None:
        self._trainer, self._aggregator = trainer, aggregator
        self._experts = trainer.state.layers[0].count if router_loss_weight(trainer.model, router_loss) else 0
        self.not_waited_for: tuple[int, ...] = ()
        self.remarks: list[str] = []
        self.lost: list[str] = []

    def prepare(self) -> PreparedStep:
        """Prepares the trainer's next step; see `Trainer.prepare`.

        Raises:
            BadInput: if the gradient is not finite.
            RankFailed: if the remaining workers cannot determine the gradient.
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
        result = self._aggregator.aggregate(like, arguments)
        step, lost = self._trainer.state.steps, self._aggregator.lost
        for worker, state in enumerate(result.states):
            if state == NOT_WAITED_FOR:
                slow.add(worker)
            elif worker in lost:
                if not any(said.startswith(f"rank {worker} ") for said in self.lost):
                    self.lost.append(f"rank {worker} was lost after {plural(step, 'step')}: {lost[worker]}")
            elif state not in NORMAL:
                self.remarks.append(f"rank {worker}, step {step}: {state}")
        return result.total


class PartGradients:
    """Function that a worker calls for one part of a step's global batch; picklable before the first call.

    With a load-balancing loss, the first round of a step returns (E,) int64, how often the part's tokens chose each expert. The
    second round gets the sum of these counts over the batch as the argument CHOSEN, and returns (X + LOSSES,): the part's
    gradient of all weights, and the part's losses.

    Args:
        path: the model's folder.
        samples_NT: (N, T) int64, the token ids of all samples.
        options: options of the training.
        parts: number of parts of a global batch.
    """

    def __init__(self, path: str, samples_NT: IntArray, options: TrainOptions, parts: int) -> None:
        self._path, self._samples_NT, self._options, self._parts = path, samples_NT, options, parts
        self._dtype = optimizer_dtype(options)
        self._step, self._begun = -1, dict[int, PartLoss]()  # by part, what still needs a backward pass

    @cached_property
    def _model(self) -> MoeModel:
        """The model with all experts, without an optimizer."""
        model = load_model(self._path, "cpu", self._dtype)
        model.model.requires_grad_()
        set_exact_kernels(model, self._options)
        return model

    @cached_property
    def _batches(self) -> GlobalBatches:
        return GlobalBatches(self._samples_NT, self._options.batch, self._options.seed)

    @cached_property
    def _parameters(self) -> list[nn.Parameter]:
        return list(_in_sequence(self._model))

    def __call__(self, part: int, arguments: Arguments) -> Array:
        step = int(arguments[STEP][0])
        if step != self._step:
            self._step, self._begun = step, {}
            weights_X = torch.from_numpy(arguments[WEIGHTS]).to(getattr(torch, self._options.dtype))
            vector_to_parameters(weights_X, self._parameters)
        forward = self._begun.pop(part, None)
        if forward is None:
            tokens_BT = torch.from_numpy(self._batches.of(step, part, self._parts))
            forward = PartLoss(self._model, tokens_BT, self._options, self._batches)
        if CHOSEN not in arguments and forward.chosen_E is not None:
            self._begun[part] = forward
            return forward.chosen_E.numpy()
        chosen_E = torch.from_numpy(arguments[CHOSEN]) if CHOSEN in arguments else None
        losses = torch.tensor(forward.backward(chosen_E), dtype=self._dtype)
        gradients = [torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        message = torch.cat([*(gradient.reshape(-1).to(self._dtype) for gradient in gradients), losses])
        if not message.isfinite().all():
            raise BadInput(f"step {step}: expected a finite loss and gradient; try a smaller `learning_rate`")
        return message.numpy()


def _in_sequence(model: MoeModel) -> Iterator[nn.Parameter]:
    """All parameters in the sequence of `TrainState.parameters`: those outside experts first."""
    experts = [parameter for layer in model.layers for _, parameter in expert_parameters(layer.experts)]
    of_experts = {id(parameter) for parameter in experts}
    yield from (parameter for parameter in model.model.parameters() if id(parameter) not in of_experts)
    yield from experts


def train_coded(
    path: str,
    samples_NT: IntArray,
    options: TrainOptions,
    output: Path,
    delay_s: Delay | None = None,
    watch: Watch = lambda step, pids: None,
) -> TrainResult:
    """Trains a model with `CodedGradients` worker processes, and returns the result; works also with redundancy 1.

    Args:
        path: the model's folder.
        samples_NT: (N, T) int64, the token ids of all samples.
        options, output: as in `aurora.train`.
        delay_s: as in `CodedAggregator`, to simulate stragglers.
        watch: called after each step with (step number, {rank: process id}).

    Raises:
        BadInput, InfeasiblePlan: if redundancy and scheme do not fit the ranks.
        RankFailed: if the remaining workers cannot determine a gradient.
    """
    loaded = load_trainer(path, "cpu", samples_NT, options)
    transport = MemoryTransport(Memory(1, options.timeout_s), 0)
    work = PartGradients(path, samples_NT, options, options.ranks)
    with CodedAggregator(work, code_of(options), timeout_s=options.timeout_s, delay_s=delay_s) as aggregator:
        coded = CodedGradients(loaded[0], aggregator, options.router_loss)

        def tell(step: CommittedStep) -> CommittedStep:
            watch(step.step, aggregator.pids)
            return replace(step, not_waited_for=coded.not_waited_for)

        result = take_steps(lambda: loaded, path, options, output, transport, ["master"], coded.prepare, tell)
    return replace(
        result, ranks=options.ranks, transport="pipes", min_replicas=options.min_replicas_among(options.ranks),
        remarks=result.remarks + tuple(coded.remarks), lost=tuple(coded.lost),
    )  # fmt: skip
