"""Gradients of parts of a global batch, computed by workers that keep no state: they are sent the weights of each step."""

from collections.abc import Iterator

import torch
from torch import nn

from aurora.errors import BadInput
from aurora.models.loading import MoeModel, expert_parameters, load_model
from aurora.runtime.distributed.aggregation_worker import Arguments, Array
from aurora.training.data import GlobalBatches
from aurora.training.part_loss import PartLoss, set_exact_kernels
from aurora.training.state import optimizer_dtype
from aurora.types import TrainOptions
from aurora.types.arrays import IntArray

STEP, WEIGHTS, CHOSEN = "step", "weights", "chosen"  # names of a round's arguments
LOSSES = 2  # what follows the gradient in a worker's message: the loss and the load-balancing loss


class PartGradients:
    """What a worker computes of a part of a step's global batch; picklable before the first call.

    In a round without CHOSEN it is (E,) int64, how often the part's tokens chose each expert; with CHOSEN, that summed over the
    batch, it is (X + LOSSES,): the part's gradient of all weights, and the part's losses.

    Args:
        path: the model's folder.
        samples_NT: (N, T) int64, the token ids of all samples.
        options: how to train.
        parts: parts of a global batch.
    """

    def __init__(self, path: str, samples_NT: IntArray, options: TrainOptions, parts: int) -> None:
        self._path, self._samples_NT, self._options, self._parts = path, samples_NT, options, parts
        self._model: WholeModel | None = None

    def __call__(self, part: int, arguments: Arguments) -> Array:
        if self._model is None:
            self._model = WholeModel(self._path, self._samples_NT, self._options)
        model, step = self._model, int(arguments[STEP][0])
        model.train(step, arguments[WEIGHTS])
        forward = model.begun.pop(part, None)
        if forward is None:
            tokens_BT = torch.from_numpy(model.batches.of(step, part, self._parts))
            forward = PartLoss(model.model, tokens_BT, self._options, model.batches)
        if CHOSEN not in arguments and forward.chosen_E is not None:
            model.begun[part] = forward
            return forward.chosen_E.numpy()
        losses = forward.backward(torch.from_numpy(arguments[CHOSEN]) if CHOSEN in arguments else None)
        message = torch.cat([model.take_gradient_X(), torch.tensor(losses, dtype=optimizer_dtype(self._options))])
        if not message.isfinite().all():
            raise BadInput(f"step {step}: expected a finite loss and gradient; try a smaller `learning_rate`")
        return message.numpy()


class WholeModel:
    """A model with all experts, without an optimizer, and the samples that it is trained on.

    Args:
        path, samples_NT, options: as of PartGradients.

    Attributes:
        model: the model.
        batches: the global batch of each step.
        begun: by part of the step at hand, a forward pass whose gradient was not taken yet.
    """

    def __init__(self, path: str, samples_NT: IntArray, options: TrainOptions) -> None:
        self.batches = GlobalBatches(samples_NT, options.batch, options.seed)
        self.model = load_model(path, "cpu", optimizer_dtype(options))
        set_exact_kernels(self.model, options)
        self.begun: dict[int, PartLoss] = {}
        self._compute_dtype, self._dtype = getattr(torch, options.dtype), optimizer_dtype(options)
        self._parameters = [parameter.requires_grad_() for parameter in _in_sequence(self.model)]
        self._step = -1

    def train(self, step: int, weights_X: Array) -> None:
        """Takes the weights of a step, in the sequence of `TrainState.weights_X`, unless it has them."""
        if step == self._step:
            return
        self._step, self.begun = step, {}
        sizes = [parameter.numel() for parameter in self._parameters]
        for parameter, weights in zip(self._parameters, torch.from_numpy(weights_X).split_with_sizes(sizes), strict=True):
            parameter.data = weights.view(parameter.shape).to(self._compute_dtype)

    def take_gradient_X(self) -> torch.Tensor:
        """Returns the gradient (X,) of all weights, and forgets it."""
        gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        return torch.cat([gradient.reshape(-1).to(self._dtype) for gradient in gradients])


def _in_sequence(model: MoeModel) -> Iterator[nn.Parameter]:
    """All parameters in the sequence of `TrainState.parameters`: those outside experts first."""
    experts = [parameter for layer in model.layers for _, parameter in expert_parameters(layer.experts)]
    of_experts = {id(parameter) for parameter in experts}
    yield from (parameter for parameter in model.model.parameters() if id(parameter) not in of_experts)
    yield from experts
