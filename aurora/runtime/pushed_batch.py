"""Pushed batch: one batch of a MoE layer over ordered push, from tokens to their sums, in eight kernel launches.

The launches (the host never waits): 1. lay out the choices; 2. push the tokens, and wait for the peers' tokens; 3. sort the
arrived rows by expert; 4. to 6. the experts' first projection, gate, second projection; 7. push the answers, weighted and
summed by row, and wait for the peers' answers; 8. sum by token.

A token travels once to each rank, with its weights and experts. Each sender tells how often its tokens chose each expert, and
numbers these choices. From that the receiver computes the place of every row among the rows of its expert. Experts take one
grouped matrix product per projection; the numbers of rows per expert stay on the GPU, so the host need not wait for them.
"""

from typing import Any

import torch

from aurora.errors import BadInput
from aurora.moe.expert_map import ExpertMap
from aurora.moe.layouts import apply_experts
from aurora.moe.permutation import MessageFormat
from aurora.moe.permutation_triton import silu_gate, weighted_sum
from aurora.moe.push_layout_triton import PushedChoices, arrange, lay_out
from aurora.moe.push_triton import Rows
from aurora.runtime.transports.push import OrderedPush

Tokens = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # hidden states (N, H), experts (N, K) and weights (N, K)
GROUPED = ((9, 0), (10, 0))  # capabilities
DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of hidden states: sums are taken in float32


class PushedBatch:
    """Runs one batch of a layer over ordered push. The constructor queues the dispatch; call `compute`, then `combined`.

    Args:
        push: the ranks' buffers, with `experts` set, and large enough for rows of the layer's MessageFormat.
        layer: index of the layer; selects the order.
        expert_map: the layer's map, with `needs_all_counts` False.
        tokens: hidden states (N, H), experts (N, K) and weights (N, K) of this rank's tokens.
        mask: (N,) bool, True for tokens that need experts; None: all.

    Raises:
        BadInput: if the buffers are too small, or hidden states have a dtype in which rows cannot be summed.
    """

    def __init__(
        self, push: OrderedPush, layer: int, expert_map: ExpertMap, tokens: Tokens, mask: torch.Tensor | None = None
    ) -> None:
        hidden, index, weights = tokens
        if hidden.dtype not in DTYPES:
            raise BadInput(f"ordered push: expected hidden states of {', '.join(map(str, DTYPES))}, found {hidden.dtype}")
        self._push, self._layer, self._map, top_k = push, layer, expert_map, index.shape[1]
        self._packing = packing = MessageFormat(hidden.shape[1], top_k, hidden.dtype)
        slots = max(min(push.batch_tokens, push.round_tokens), 1)
        push.check_size(len(hidden), packing.row_bytes, slots)
        physical_NK = expert_map.physical_experts(index, mask)
        tail = physical_NK.new_empty(len(hidden), (packing.row_bytes - packing.weights_at) // 4, dtype=torch.int32)
        codes_at, counts = (packing.physical_at - packing.weights_at) // 4, push.peers.told
        choices = PushedChoices(expert_map.rank_P, expert_map.slot_P, weights, counts, tail, codes_at)
        row_of_RX, count_RT, self._place_NK = lay_out(physical_NK, push.ranks, slots, choices)
        rows = Rows(hidden, top_k, tail, packing.weights_at, packing.row_bytes)
        self._arrived, self._count_RT = push.exchange(push.table_L2[layer, 0], rows, row_of_RX, count_RT)

    def compute(self, experts: Any) -> None:
        """Computes this rank's experts on the rows that have arrived, and queues the combine."""
        push, packing, count_RT = self._push, self._packing, self._count_RT
        push.receive()
        sorted_X, ends_E, *choices = arrange(self._arrived, count_RT, packing, self._map)
        answers = Rows(compute_experts(experts, sorted_X, ends_E), 1, None, 0, packing.weights_at, *choices)
        self._arrived, _ = push.exchange(push.table_L2[self._layer, 1], answers, push.same(len(self._arrived)), count_RT[:, :1])

    def combined(self) -> torch.Tensor:
        """Returns (N, H): each token's weighted expert outputs, summed in float32 in the order of the token's choices."""
        self._push.receive()
        returned = self._arrived[:, : self._packing.width * self._packing.dtype.itemsize].view(self._packing.dtype)
        return weighted_sum(returned, self._place_NK, None)


def compute_experts(experts: Any, rows: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """Returns the experts' unweighted outputs (X, H) for rows (X, H) that are sorted by expert.

    Where torch has a kernel of its own for them (`has_grouped_kernel`), gated experts without biases take one
    `torch._grouped_mm` per projection and, for SiLU, one kernel between them, and the host does not wait. On other devices, and
    for other experts, `experts` itself is called in transformers' way, and the host waits for `ends_E`, so that no CUDA graph
    can capture it.

    Args:
        experts: an experts module of transformers.
        rows: (X, H). Rows after the last expert's are ignored, and their outputs are undefined or missing.
        ends_E: (E,) int32, the end of each expert's rows: expert e has rows ends_E[e - 1] to ends_E[e] - 1.
    """
    if len(ends_E) and has_grouped_kernel(rows) and is_grouped(experts):
        return grouped_products(experts, rows, ends_E)
    counts_E = ends_E.diff(prepend=ends_E.new_zeros(1)).long()
    slots = torch.arange(len(ends_E), device=rows.device).repeat_interleave(counts_E)
    return apply_experts(experts, rows[: len(slots)], slots)


def has_grouped_kernel(rows: torch.Tensor) -> bool:
    """Returns whether `torch._grouped_mm` of these rows is one kernel: bfloat16 on GPUs of capability 9.0 or 10.0.

    Elsewhere it reads the ends of experts on the host, and multiplies expert by expert.
    """
    if not rows.is_cuda or rows.dtype != torch.bfloat16:
        return False
    return torch.cuda.get_device_capability(rows.device) in GROUPED


def is_grouped(experts: Any) -> bool:
    """Returns whether `grouped_products` supports an experts module.

    Its experts must be gated, have neither biases nor norms, and weights whose dimensions are multiples of 16 bytes.
    """
    if not getattr(experts, "has_gate", False) or experts.has_bias or experts.has_post_expert_norm:
        return False
    sizes = (*experts.gate_up_proj.shape[1:], *experts.down_proj.shape[1:])
    return hasattr(torch, "_grouped_mm") and not any(size * experts.down_proj.element_size() % 16 for size in sizes)


def grouped_products(experts: Any, rows: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """Returns the experts' outputs (X, H) by grouped matrix products; arguments as in `compute_experts`."""
    transposed = experts.is_transposed
    up, down = (weight if transposed else weight.transpose(1, 2) for weight in (experts.gate_up_proj, experts.down_proj))
    gate_up = torch._grouped_mm(rows, up, offs=ends_E)
    gated = silu_gate(gate_up, ends_E) if rows.is_cuda and _has_silu_gate(experts) else experts._apply_gate(gate_up)
    return torch._grouped_mm(gated, down, offs=ends_E)


def _has_silu_gate(experts: Any) -> bool:
    """Returns whether an experts module's gate is silu(first half) * second half."""
    usual = getattr(experts._apply_gate, "__name__", "") == "_default_apply_gate"
    return usual and type(experts.act_fn).__name__ in ("SiLU", "SiLUActivation")
