"""Calling conventions of experts, by the signature of the experts module; `call_by_index` makes all of them alike."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from aurora.errors import BadInput

# Model types of transformers whose experts cannot be placed, and why.
NOT_PLACED = {
    "doge": "an expert is one row of an embedding, which is looked up and not sent to",
    "jetmoe": "its attention layers have experts too, and plans place experts of feed-forward layers only",
    "longcat_flash": "tokens choose experts that compute nothing, so that the number of their experts varies",
    "zaya": "tokens may choose no expert, so that the number of their experts varies",
}


class ExpertsByIndex(nn.Module):
    """Class of an experts module with transposed gated weights that is called with tokens, indices and weights."""

    has_gate, has_bias, has_post_expert_norm, is_transposed, _is_expert_parallel = True, False, False, True, False

    act_fn: Callable[[torch.Tensor], torch.Tensor]

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return up * self.act_fn(gate)

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """Returns (N, H), for tokens (N, H) the outputs of their experts (N, K), weighted by (N, K) and summed."""
        from transformers.integrations.moe import grouped_mm_experts_forward

        out: torch.Tensor = grouped_mm_experts_forward(self, hidden_states, top_k_index, top_k_weights)
        return out


class WeightedInputs(nn.Module):
    """MoE block like `block` that multiplies a token by its router score before its expert, not after: Llama 4's.

    That block gives every expert every token, and zeros for those that chose another one. This one gives an expert its own.

    Raises:
        BadInput: if tokens choose several experts.
    """

    def __init__(self, block: Any) -> None:
        super().__init__()
        if block.top_k != 1:
            raise BadInput(f"{type(block).__name__} weighs the inputs of experts: expected one per token, found {block.top_k}")
        self.experts, self.router, self.shared_expert = block.experts, block.router, block.shared_expert

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (tokens (N, H), router logits (N, E)) for hidden states (..., H)."""
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        scores_NE, logits_NE = self.router(tokens)
        scores_N1, index_N1 = scores_NE.max(dim=1, keepdim=True)
        routed = self.experts(tokens * scores_N1, index_N1, torch.ones_like(scores_N1))
        return self.shared_expert(tokens) + routed, logits_NE


def _unstack(model: nn.Module, path: str, name: str) -> None:
    """Gives each expert an index where rows of all experts lie in one matrix, as in DBRX; others are as wanted."""
    experts = getattr(model.get_submodule(path), name)
    if not list(experts.parameters(recurse=False)):
        for parameter in experts.parameters():
            parameter.data = parameter.data.view(experts.num_experts, -1, *parameter.shape[1:])


def _weigh_inputs(model: nn.Module, path: str, name: str) -> None:
    """Gives each expert its own tokens only, where a block gives each all of them, as in Llama 4."""
    block = model.get_submodule(path)
    getattr(block, name).__class__ = ExpertsByIndex
    model.set_submodule(path, WeightedInputs(block))


# By the names of the first parameters of an experts module's forward: what makes its block call it by index.
CONVENTIONS: dict[tuple[str, ...], Callable[[nn.Module, str, str], None]] = {
    ("hidden_states", "top_k_index", "top_k_weights"): _unstack,
    ("hidden_states", "router_indices", "routing_weights"): _unstack,
    ("hidden_states",): _weigh_inputs,
}


def find_experts(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yields (path of a block, the block's attribute that is an experts module of CONVENTIONS), in forward order."""
    for path, block in model.named_modules():
        for name, child in block.named_children():
            if hasattr(child, "num_experts") and (known := _signature(child)) in CONVENTIONS:
                fused = any(parameter.ndim == 3 for parameter in child.parameters(recurse=False))
                if fused or len(known) == 3:  # routers take hidden states alone, too
                    yield path, name


def call_by_index(model: nn.Module) -> None:
    """Makes a model call all of its experts modules with tokens (N, H), indices (N, K) and weights (N, K)."""
    for path, name in list(find_experts(model)):
        CONVENTIONS[_signature(getattr(model.get_submodule(path), name))](model, path, name)


def _signature(experts: Any) -> tuple[str, ...]:
    """The names of the first three parameters of an experts module's forward."""
    return tuple(inspect.signature(experts.forward).parameters)[:3]
