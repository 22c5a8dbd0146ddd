"""Loss of some samples of a global batch, with the load-balancing loss of all ranks, and float64 throughout."""

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


def router_loss_weight(model: MoeModel, wanted: float | None) -> float:
    """Returns the weight of the load-balancing loss: `wanted`, or that of the model's config if it is None; zero for none.

    Raises:
        BadInput: if it is wanted, and the model does not return its router logits.
    """
    has_logits = "output_router_logits" in inspect.signature(model.model.forward).parameters
    if wanted and not has_logits:
        raise BadInput(f"`router_loss`: {model.name} returns no router logits, expected 0, found {wanted}")
    weight = getattr(model.config, "router_aux_loss_coef", None) if wanted is None else wanted
    return float(weight or 0.0) if has_logits else 0.0


class RouterLoss:
    """The load-balancing loss of some samples of a global batch; the sum over all of its samples is the whole.

    As in transformers, the whole is E sum_e f_e P_e over the tokens of all layers, where f_e is how often expert e is among the
    top-k and P_e its mean probability. f_e is counted over the whole batch and has no gradient.

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
        """Returns the samples' part of the loss.

        Args:
            chosen_E: (E,) int64, how often the tokens of the global batch chose each expert, over all layers.
            tokens: tokens of the global batch.
        """
        rows = tokens * self._layers
        frequency_E = chosen_E.to(self._chance_E) / rows
        return len(chosen_E) * (frequency_E * self._chance_E).sum() / rows


class Float64Throughout(TorchFunctionMode):
    """Context manager in which casts to float32 are casts to float64."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Calls a function of torch."""
        if func is torch.Tensor.float:
            return args[0].double()
        named = {name: _exact(each) for name, each in (kwargs or {}).items()}
        return func(*map(_exact, args), **named)


def _exact(argument: Any) -> Any:
    return torch.float64 if argument is torch.float32 else argument
