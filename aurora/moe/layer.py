"""The expert-parallel MoE layer of one rank: count, lay out, gather, exchange, compute, exchange, sum.

A batch is exchanged by a Transport, or pushed by kernels without the host (`PushedRows`). Subclasses override parts of the
layer: the runtime's `DistributedExperts` shares GPU and port with other models, and training's `ExpertParallel` is
differentiable. An engine calls `dispatch` and `combine`, and computes the experts itself in between.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from aurora.moe.expert_map import ExpertMap
from aurora.moe.layouts import DispatchLayout, RowPerExpert, RowPerRank
from aurora.moe.transport import ExchangeStep, Transport
from aurora.types import Order
from aurora.types.arrays import IntArray


class PushedRows(Protocol):
    """A batch that kernels push to the experts' ranks, without its sizes on the host. See `aurora.runtime.pushed_batch`."""

    def compute(self, experts: Any) -> None:
        """Queues on the GPU the computation of this rank's experts for the arriving rows, and then the combine."""

    def combined(self) -> torch.Tensor:
        """Returns (N, H), the layer's outputs for this rank's tokens."""


class ExpertParallelLayer:
    """One expert-parallel layer on one rank.

    All ranks must make the same calls in the same sequence, except those of `is_hierarchical` and `computing`.

    Attributes:
        expert_map: maps each choice of a token to a rank and slot; may be replaced between two batches.
        transport: carries tensors between the ranks.
        hierarchical: whether all-to-alls may go over the map's servers; `is_hierarchical` decides for each batch.
        deduplicate: whether a flat all-to-all sends a token once to a rank that holds several of its experts.
    """

    expert_map: ExpertMap
    transport: Transport
    hierarchical: bool = False
    deduplicate: bool = False

    def order(self, phase: str) -> Order:
        """Returns the Order of the layer's dispatch or combine; `phase` is "dispatch" or "combine"."""
        raise NotImplementedError

    def layout_kind(self, top_k: int) -> type[DispatchLayout]:
        """Returns the DispatchLayout class to use for tokens that choose `top_k` experts each."""
        if self.hierarchical:
            from aurora.moe.server_layout import RowPerServer  # which flat all-to-alls need not

            return RowPerServer
        return RowPerRank if self.deduplicate and top_k > 1 else RowPerExpert

    def gather_loads(self, tokens_E: torch.Tensor) -> torch.Tensor:
        """Allgathers tokens_E (E,), how often this rank's tokens chose each expert; returns (R, E) int64 on the CPU."""
        return self.transport.gather(tokens_E)

    def gather_counts(self, layout: DispatchLayout) -> torch.Tensor:
        """Allgathers `layout.counts` of all ranks; returns (R, *counts.shape) int64 on the CPU."""
        return self.transport.gather(layout.counts)

    def is_hierarchical(self, flat_RR: IntArray, row_bytes: int) -> bool:
        """Returns whether a layer with `hierarchical` sends this batch by a hierarchical (True) or flat (False) all-to-all.

        Args:
            flat_RR: (R, R) rows that a flat all-to-all would send from each rank (row) to each rank (column).
            row_bytes: size of a row in bytes.
        """
        return True

    def pushed(
        self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, mask: torch.Tensor | None
    ) -> PushedRows | None:
        """Begins the dispatch of a batch by push kernels and returns the PushedRows; arguments as in `dispatch`.

        Returns None, and sends nothing, if the batch must use the transport. This class always returns None.
        """
        return None

    def exchanging(self, phase: str, rows_SRR: IntArray, row_bytes: int) -> AbstractContextManager[ExchangeStep]:
        """Context manager around one all-to-all; its value is a function (sends, recvs) to call for each of its exchanges.

        Args:
            phase: "dispatch" or "combine".
            rows_SRR: (S, R, R) rows from each rank (row) to each rank (column) in each of the S exchanges.
            row_bytes: size of a row in bytes.
        """
        order = self.order(phase)
        return nullcontext(lambda sends, recvs: self.transport.exchange(order, sends, recvs, lambda *_: None))

    def computing(self, phase: str) -> AbstractContextManager[None]:
        """Context manager around this rank's computation of the phase "expert" or "aggregate"."""
        return nullcontext()

    def dispatch(
        self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, mask: torch.Tensor | None = None
    ) -> tuple[DispatchLayout, torch.Tensor]:
        """Sends this rank's tokens to the ranks of their experts.

        Args:
            hidden: (N, H) hidden states of this rank's tokens.
            index, weights: (N, K) the experts that every token chose, and their weights.
            mask: (N,) bool, True for tokens that need experts; None: all.

        Returns:
            (layout, rows): the batch's layout, for `combine`, and the rows that arrived for this rank's experts.
        """
        tokens_SE = None
        if self.expert_map.needs_all_counts:
            tokens_SE = self.gather_loads(self.expert_map.count(index, mask))
        tokens = (self.expert_map, hidden, index, weights, mask, tokens_SE)
        layout = self.layout_kind(index.shape[1])(*tokens)
        counts = self.gather_counts(layout)
        flat_RR = layout.flat_counts(counts)
        if flat_RR is not None and not self.is_hierarchical(flat_RR.numpy(), _row_bytes(layout.rows)):
            layout, counts = RowPerRank(*tokens), flat_RR
        layout.gathered(counts)
        with self.exchanging("dispatch", layout.sizes_SRR, _row_bytes(layout.rows)) as exchange:
            return layout, layout.dispatch(exchange)

    def combine(self, layout: DispatchLayout, answers: torch.Tensor) -> torch.Tensor:
        """Sends experts' outputs back to their tokens' ranks, and sums the outputs that come back for this rank's tokens.

        Args:
            layout: the batch's layout, from `dispatch`.
            answers: (X, H), the output for each row that `dispatch` returned, in the same sequence.

        Returns:
            (N, H), the layer's outputs for this rank's tokens.
        """
        with self.exchanging("combine", layout.sizes_SRR.swapaxes(1, 2), _row_bytes(answers)) as exchange:
            returned = layout.combine(answers, exchange)
        with self.computing("aggregate"):
            return layout.aggregate(returned)

    def outputs(
        self,
        hidden: torch.Tensor,
        index: torch.Tensor,
        weights: torch.Tensor,
        experts: Any,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Runs the layer: dispatch, experts, combine. Returns (N, H), the outputs for this rank's tokens.

        Args:
            hidden, index, weights, mask: as in `dispatch`.
            experts: module with the experts in this rank's slots, with the call signature of transformers' experts modules.
        """
        if (batch := self.pushed(hidden, index, weights, mask)) is not None:
            with self.computing("expert"):
                batch.compute(experts)
            return batch.combined()
        layout, arrived = self.dispatch(hidden, index, weights, mask)
        with self.computing("expert"):
            answers = layout.compute(arrived, experts)
        return self.combine(layout, answers)


def _row_bytes(rows: torch.Tensor) -> int:
    return rows.shape[1] * rows.element_size()
