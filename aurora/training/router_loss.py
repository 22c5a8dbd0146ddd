"""The load-balancing loss of transformers' MoE models, over the global batch of all ranks."""

import inspect
from collections.abc import Sequence

import torch

from aurora.errors import BadInput
from aurora.models.loading import MoeModel
from aurora.moe.permutation import exact_dtype


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
