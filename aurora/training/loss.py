"""Loss of a part of a global batch, with its share of the load-balancing loss; and a mode that computes all in float64."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.overrides import TorchFunctionMode

from aurora.errors import BadInput
from aurora.models.loading import MoeModel
from aurora.moe.permutation import exact_dtype
from aurora.training.data import GlobalBatches
from aurora.types import TrainOptions


def set_exact_kernels(model: MoeModel, options: TrainOptions) -> None:
    """Switches a model that trains in float64 to computing experts one by one; torch's grouped kernels lack float64."""
    if options.dtype == "float64":
        model.model.set_experts_implementation("eager")


class PartLoss:
    """Runs a model's forward pass for some samples of a global batch, and keeps its loss for `backward`.

    Losses and gradients of the parts of a batch add up to those of the whole batch.

    Args:
        model: the model.
        tokens_BT: (B, T) int64, the samples' token ids.
        options: dtype and the weight of the load-balancing loss.
        batches: the global batches, whose size normalises the loss.

    Attributes:
        chosen_E: (E,) int64, how often the samples' tokens chose each expert, over all layers; None if the weight of the
            load-balancing loss is 0.
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
        """Adds these samples' gradient to the model's gradients.

        Args:
            chosen_E: (E,) the attribute `chosen_E`, summed over all parts of the batch; None: no load-balancing loss.

        Returns:
            These samples' shares of the loss, and of the load-balancing loss before weighting.
        """
        router_loss = torch.zeros_like(self._loss)
        if self._router is not None and chosen_E is not None:
            router_loss = self._router.part(chosen_E, self._tokens)
        (self._loss + self._weight * router_loss).backward()  # type: ignore[no-untyped-call]
        return self._loss.item(), router_loss.item()


def router_loss_weight(model: MoeModel, wanted: float | None) -> float:
    """Returns the weight of the load-balancing loss: `wanted`, or the weight in the model's config if that is None.

    Weight 0 turns the loss off.

    Raises:
        BadInput: if `wanted` is above zero, and the model does not return its router logits.
    """
    has_logits = "output_router_logits" in inspect.signature(model.model.forward).parameters
    if wanted and not has_logits:
        raise BadInput(f"`router_loss`: {model.name} returns no router logits, expected 0, found {wanted}")
    weight = getattr(model.config, "router_aux_loss_coef", None) if wanted is None else wanted
    return float(weight or 0.0) if has_logits else 0.0


class RouterLoss:
    """Load-balancing loss of a part of a global batch; the losses of all parts add up to that of the whole batch.

    As in transformers, the loss of the batch is E * sum_e f_e P_e over the tokens of all layers. f_e is how often expert e is
    among a token's top k, counted over the whole batch and without a gradient; P_e is the expert's mean probability.

    Args:
        logits_L: by layer, (N, E) router logits of the samples' tokens.
        experts: experts of a layer, E.
        top_k: experts that a token chooses.

    Attributes:
        chosen_E: (E,) int64, how often the samples' tokens chose each expert, over all layers.

    Source:
        Switch Transformers (arXiv:2101.03961) Eq. 4-6.
    """

    def __init__(self, logits_L: Sequence[torch.Tensor], experts: int, top_k: int) -> None:
        exact = exact_dtype(logits_L[0].dtype)
        self._layers = len(logits_L)
        self._chance_E = logits_L[0].new_zeros(experts, dtype=exact)
        self.chosen_E = torch.zeros(experts, dtype=torch.long, device=self._chance_E.device)
        for logits in logits_L:
            chance_NE = logits.softmax(dim=-1)
            self.chosen_E += torch.bincount(chance_NE.topk(top_k, dim=-1).indices.flatten(), minlength=experts)
            self._chance_E = self._chance_E + chance_NE.to(exact).sum(dim=0)

    def part(self, chosen_E: torch.Tensor, tokens: int) -> torch.Tensor:
        """Returns these samples' share of the batch's load-balancing loss.

        Args:
            chosen_E: (E,) int64, how often the tokens of the global batch chose each expert, over all layers.
            tokens: tokens of the global batch.
        """
        rows = tokens * self._layers
        frequency_E = chosen_E.to(self._chance_E) / rows
        return len(chosen_E) * (frequency_E * self._chance_E).sum() / rows


class Float64Throughout(TorchFunctionMode):
    """Context manager that turns torch's casts to float32 into casts to float64."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Calls a function of torch."""
        if func is torch.Tensor.float:
            return args[0].double()
        named = {name: _exact(value) for name, value in (kwargs or {}).items()}
        return func(*map(_exact, args), **named)


def _exact(argument: Any) -> Any:
    return torch.float64 if argument is torch.float32 else argument
