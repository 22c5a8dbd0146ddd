"""Expert-parallel replacement of a MoE layer's experts module in training: tokens travel forward, and gradients back."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from aurora.runtime.dispatch_layout import ExpertMap, apply_experts, exchange_rows
from aurora.runtime.distributed.transport import Transport
from aurora.runtime.permutation_cpu import sum_by_rank
from aurora.runtime.token_permutation import exact_dtype, gather_rows, permutation_by_expert, weighted_sum
from aurora.types import Order
from aurora.types.arrays import IntArray


class ExpertParallel(nn.Module):
    """Module that replaces a layer's experts module: on this rank's tokens it gives the same output as all experts would.

    The replicas of an expert share the tokens of all ranks, a rank's own first. `serve` must be called before the first forward
    pass.

    Args:
        experts: the module that is replaced, with all experts, or with none if it has an attribute `reader`, an ExpertReader.

    Attributes:
        local: the module that computes this rank's experts.
        reader: reads single experts from the model's files; None if `local` had all of them.
        count: experts of the layer.
        held: the experts in the slots of `local`.
        tokens_E: (E,) int64, how many tokens of all ranks chose each expert; forward passes add to it.
    """

    def __init__(self, experts: Any) -> None:
        super().__init__()
        self.reader: Any = getattr(experts, "reader", None)
        self.count = int(experts.num_experts if self.reader is None else self.reader.count)
        self.local = experts
        self.held = tuple(range(int(experts.num_experts)))
        self.tokens_E = np.zeros(self.count, dtype=np.int64)

    def serve(self, slots_G: Sequence[Sequence[int]], expert_map: ExpertMap, order: Order, transport: Transport) -> None:
        """Serves by `expert_map`, made of `slots_G`, from the next forward pass on.

        Args:
            slots_G: for every rank, the experts in its slots.
            expert_map: maps experts to physical experts.
            order: the order of the dispatch; the combine and the gradients' exchanges are in the same or the reversed order.
            transport: carries tokens and gradients between the ranks.
        """
        self._map, self._order, self._transport = expert_map, order, transport
        self._expert_P = np.array([expert for held in slots_G for expert in held], dtype=np.int64)

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """Returns the layer's outputs summed over experts, in the shape of `hidden_states`, (N, H) or (batch, tokens, H).

        A collective call: all ranks make it. So is the backward pass through it.
        """
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        tokens_SE = None
        if self._map.needs_all_counts:
            tokens_SE = self._transport.gather(self._map.count(top_k_index, None))
        physical_NK = self._map.physical_experts(top_k_index, None, tokens_SE)
        counts_P, token_X, row_NK = permutation_by_expert(physical_NK, self._map.num_physical)
        counts_RP = self._transport.gather(counts_P).numpy()
        np.add.at(self.tokens_E, self._expert_P, counts_RP.sum(axis=0))
        routed = _RoutedRows(self._transport, self._order, sum_by_rank(counts_RP, self._map.first_R), token_X, row_NK)
        arrived = _DispatchedRows.apply(rows, routed)  # type: ignore[no-untyped-call]
        slots_X = np.repeat(self._map.arrival_slots, counts_RP[:, self._map.local].ravel())
        answers = apply_experts(self.local, arrived, torch.from_numpy(slots_X).to(rows.device))
        returned = _ReturnedRows.apply(answers, routed)  # type: ignore[no-untyped-call]
        exact = exact_dtype(rows.dtype)
        answers = returned.index_select(0, row_NK.flatten()).view(*row_NK.shape, -1).to(exact)
        out: torch.Tensor = (answers * top_k_weights[..., None].to(exact)).sum(dim=1)
        return out.to(rows.dtype).view(hidden_states.shape)


@dataclass(frozen=True)
class _RoutedRows:
    """One batch of a layer on its way to experts and back, a row for each (token, expert) pair, sorted by physical expert."""

    transport: Transport
    order: Order  # of the way to the experts
    sizes_RR: IntArray  # (R, R) the rows from each rank (row) to each rank (column)
    token_X: torch.Tensor  # (X,) the token of each row of this rank
    row_NK: torch.Tensor  # (N, K) the row of each choice

    def to_experts(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows that arrive for this rank's experts."""
        return self._exchanged(rows, self.sizes_RR, self.order)

    def to_tokens(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows that come back for this rank's tokens."""
        return self._exchanged(rows, self.sizes_RR.T, self.order.reversed)

    def _exchanged(self, rows: torch.Tensor, sizes_RR: IntArray, order: Order) -> torch.Tensor:
        def step(sends: Sequence[torch.Tensor], recvs: Sequence[torch.Tensor]) -> None:
            self.transport.exchange(order, sends, recvs, lambda *_: None)

        return exchange_rows(step, rows.contiguous(), sizes_RR, self.transport.rank)


class _DispatchedRows(torch.autograd.Function):
    """Hidden states (N, H) -> rows at their experts (X, H). Gradients come back and are summed by token."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, routed: _RoutedRows) -> torch.Tensor:
        ctx.routed = routed
        rows = hidden.new_empty(len(routed.token_X), hidden.shape[1])
        gather_rows(hidden, routed.token_X, rows)
        return routed.to_experts(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return weighted_sum(ctx.routed.to_tokens(gradients[0]), ctx.routed.row_NK), None


class _ReturnedRows(torch.autograd.Function):
    """Answers at their experts (X, H) -> answers at their tokens (X, H). Gradients go the way that tokens went."""

    @staticmethod
    def forward(ctx: Any, answers: torch.Tensor, routed: _RoutedRows) -> torch.Tensor:
        ctx.routed = routed
        return routed.to_tokens(answers)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return ctx.routed.to_experts(gradients[0]), None
