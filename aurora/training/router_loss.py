"""The load-balancing loss of transformers' MoE models, over the global batch of all ranks."""

import inspect
from collections.abc import Sequence

import torch

from aurora.errors import BadInput
from aurora.models.loading import MoeModel
from aurora.runtime.distributed.transport import Transport
from aurora.runtime.token_permutation import exact_dtype


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


def load_balancing_loss(
    logits_L: Sequence[torch.Tensor], experts: int, top_k: int, tokens: int, transport: Transport
) -> torch.Tensor:
    """Returns this rank's part of the load-balancing loss of a global batch; the sum over ranks is the whole.

    As in transformers, it is E sum_e f_e P_e over the tokens of all layers, where f_e is how often expert e is among the top-k
    and P_e its mean probability. f_e is counted over all ranks and has no gradient. A collective call.

    Args:
        logits_L: by layer, (N, E) router logits of this rank's tokens.
        experts: experts of a layer, E.
        top_k: experts that a token chooses.
        tokens: tokens of the global batch.
        transport: carries the counts between the ranks.

    Source:
        Switch Transformers (arXiv:2101.03961) Eq. 4-6.
    """
    exact = exact_dtype(logits_L[0].dtype)
    chance_E = logits_L[0].new_zeros(experts, dtype=exact)
    chosen_E = torch.zeros(experts, dtype=torch.long, device=chance_E.device)
    for logits in logits_L:
        chance_NE = logits.softmax(dim=-1)
        chosen_E += torch.bincount(chance_NE.topk(top_k, dim=-1).indices.flatten(), minlength=experts)
        chance_E = chance_E + chance_NE.to(exact).sum(dim=0)
    rows = tokens * len(logits_L)
    frequency_E = transport.gather(chosen_E).sum(dim=0).to(chance_E) / rows
    return experts * (frequency_E * chance_E).sum() / rows
