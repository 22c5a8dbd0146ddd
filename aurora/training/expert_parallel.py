"""Expert-parallel replacement of a MoE layer's experts module in training: tokens go forward, gradients come back."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from aurora.moe.expert_map import ExpertMap
from aurora.moe.layer import OrderedAllToAlls, all_loads, combine, compute, dispatch
from aurora.moe.layouts import RowPerExpert, exchange_rows
from aurora.moe.permutation import exact_dtype, weighted_sum
from aurora.moe.transport import ExchangeStep, Transport
from aurora.types import Order
from aurora.types.arrays import IntArray


class ExpertParallel(nn.Module):
    """Differentiable expert-parallel module that replaces a layer's experts module; same output for this rank's tokens.

    The replicas of an expert share the tokens of all ranks; each serves its own rank's tokens first. `serve` must be called
    before the first forward pass.

    Args:
        experts: the replaced module, with all experts; or with none if it has an attribute `reader` (an ExpertReader).

    Attributes:
        local: the module that computes this rank's experts.
        reader: reads single experts from the model's files; None if `local` had all of them.
        count: number of experts of the layer.
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
        """Sets the expert map and the order, from the next forward pass on.

        Args:
            slots_G: for every rank, the experts in its slots.
            expert_map: maps experts to the slots in `slots_G`.
            order: the order of all-to-alls towards experts (dispatch; gradients of the combine). All-to-alls towards tokens
                (combine; gradients of the dispatch) use the reversed order.
            transport: carries tokens and gradients between the ranks.
        """
        self.expert_map, self._alltoalls = expert_map, OrderedAllToAlls(transport, order)
        self._expert_P = np.array([expert for slots in slots_G for expert in slots], dtype=np.int64)

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """Returns each token's expert outputs, weighted and summed; shaped like `hidden_states`, (N, H) or (batch, tokens, H).

        Forward and backward pass are collective calls: all ranks make them.
        """
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        loads_RE = all_loads(self.expert_map, top_k_index, None, self._alltoalls.gather)
        layout = DifferentiableRows(self.expert_map, rows, top_k_index, top_k_weights, None, loads_RE)
        _, arrived = dispatch(layout, self._alltoalls)
        np.add.at(self.tokens_E, self._expert_P, layout.tokens_P)
        answers = compute(layout, arrived, self.local)
        return layout.aggregate(combine(layout, answers, self._alltoalls)).view(hidden_states.shape)


class DifferentiableRows(RowPerExpert):
    """Layout of one row per (token, expert) pair whose exchanges are differentiable.

    Attributes:
        tokens_P: (P,) int64, rows of all ranks for each physical expert; set by `gathered`.
    """

    tokens_P: IntArray

    def _lay_out(self, hidden: torch.Tensor, weights: torch.Tensor, physical_NK: torch.Tensor) -> None:
        self._hidden = hidden
        with torch.no_grad():
            super()._lay_out(hidden, weights, physical_NK)

    def gathered(self, counts: torch.Tensor) -> None:
        super().gathered(counts)
        self.tokens_P = counts.sum(dim=0).numpy()

    def dispatch(self, exchange: ExchangeStep) -> torch.Tensor:
        """Returns the rows (X, H) received for this rank's experts. The backward pass sends gradients back to the tokens."""
        self._to_experts = exchange
        arrived: torch.Tensor = _DispatchedRows.apply(self._hidden, self)  # type: ignore[no-untyped-call]
        del self._hidden, self.rows  # as a graph keeps this
        return arrived

    def combine(self, answers: torch.Tensor, exchange: ExchangeStep) -> torch.Tensor:
        """Returns the expert outputs (X, H) of this rank's rows. The backward pass sends gradients to the experts' ranks."""
        self._to_tokens = exchange
        returned: torch.Tensor = _ReturnedRows.apply(answers, self)  # type: ignore[no-untyped-call]
        return returned

    def aggregate(self, answers: torch.Tensor) -> torch.Tensor:
        """Returns (N, H), the expert outputs weighted and summed by token, in at least float32."""
        exact = exact_dtype(answers.dtype)
        answers_NKH = answers.index_select(0, self._row_NK.flatten()).view(*self._row_NK.shape, -1).to(exact)
        summed: torch.Tensor = (answers_NKH * self._weights[..., None].to(exact)).sum(dim=1)
        return summed.to(answers.dtype)

    def to_experts(self, rows: torch.Tensor) -> torch.Tensor:
        """Sends rows (X, H) of this rank's tokens to the experts. Returns the rows received for this rank's experts."""
        return exchange_rows(self._to_experts, rows.contiguous(), self.sizes_SRR[0], self._map.rank)

    def to_tokens(self, rows: torch.Tensor) -> torch.Tensor:
        """Sends rows (X, H) of this rank's experts back. Returns the rows received for this rank's tokens."""
        return exchange_rows(self._to_tokens, rows.contiguous(), self.sizes_SRR[0].T, self._map.rank)

    def summed(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns (N, H), the sum of each token's rows in `rows` (X, H)."""
        return weighted_sum(rows, self._row_NK)


class _DispatchedRows(torch.autograd.Function):
    """Hidden states (N, H) -> rows at their experts (X, H). Gradients come back and are summed by token."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, layout: DifferentiableRows) -> torch.Tensor:
        ctx.layout = layout
        return layout.to_experts(layout.rows)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return ctx.layout.summed(ctx.layout.to_tokens(gradients[0])), None


class _ReturnedRows(torch.autograd.Function):
    """Answers at their experts (X, H) -> answers at their tokens (X, H). Gradients go the way that tokens went."""

    @staticmethod
    def forward(ctx: Any, answers: torch.Tensor, layout: DifferentiableRows) -> torch.Tensor:
        ctx.layout = layout
        return layout.to_tokens(answers)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return ctx.layout.to_experts(gradients[0]), None
