"""Forward pass of some samples of a global batch, and their part of its loss and gradient."""

from contextlib import nullcontext

import torch
from torch.nn.functional import cross_entropy

from aurora.models.loading import MoeModel
from aurora.moe.permutation import exact_dtype
from aurora.training.data import GlobalBatches
from aurora.training.precision import Float64Throughout
from aurora.training.router_loss import RouterLoss, router_loss_weight
from aurora.types import TrainOptions


def set_exact_kernels(model: MoeModel, options: TrainOptions) -> None:
    """Makes a model compute its experts one by one in float64, which torch's grouped kernels do not take."""
    if options.dtype == "float64":
        model.model.set_experts_implementation("eager")


class PartLoss:
    """A model's forward pass of some samples of a global batch. What parts of the batch give adds up to what the whole gives.

    Args:
        model: the model.
        tokens_BT: (B, T) int64, the samples' token ids.
        options: dtype and the weight of the load-balancing loss.
        batches: says how large a global batch is.

    Attributes:
        chosen_E: (E,) int64, how often the samples' tokens chose each expert, over all layers; None if the load-balancing loss
            has no weight.
    """

    def __init__(self, model: MoeModel, tokens_BT: torch.Tensor, options: TrainOptions, batches: GlobalBatches) -> None:
        self._weight, self._tokens = router_loss_weight(model, options.router_loss), batches.tokens
        balanced = {"output_router_logits": True} if self._weight else {}
        with Float64Throughout() if options.dtype == "float64" else nullcontext():
            out = model.model(input_ids=tokens_BT, use_cache=False, **balanced)
        logits_BTV = out.logits[:, :-1]
        logits_BTV = logits_BTV.to(exact_dtype(logits_BTV.dtype))
        whole = cross_entropy(logits_BTV.flatten(0, 1), tokens_BT[:, 1:].flatten(), reduction="sum")
        self._loss = whole / batches.predicted
        self._router = RouterLoss(out.router_logits, model.experts, model.top_k) if self._weight else None
        self.chosen_E = None if self._router is None else self._router.chosen_E

    def backward(self, chosen_E: torch.Tensor | None) -> tuple[float, float]:
        """Adds the samples' part of the gradient to the model's.

        Args:
            chosen_E: the attribute, summed over the whole batch.

        Returns:
            The samples' parts of the loss, and of the load-balancing loss, which is not weighted.
        """
        router_loss = torch.zeros_like(self._loss)
        if self._router is not None and chosen_E is not None:
            router_loss = self._router.part(chosen_E, self._tokens)
        (self._loss + self._weight * router_loss).backward()  # type: ignore[no-untyped-call]
        return self._loss.item(), router_loss.item()
