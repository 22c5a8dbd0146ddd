"""The expert-parallel MoE layer of one rank: count, lay out, gather, exchange, compute, exchange, sum.

There is one layer, over a transport, or over what sends a batch without the host (`PushedRows`). Those that run it differ in
what they override: the runtime's `DistributedExperts` shares GPU and port with other models, training's `ExpertParallel` is
differentiable, and an engine computes the experts itself, between `dispatch` and `combine`.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from aurora.moe.expert_map import ExpertMap
from aurora.moe.layouts import DispatchLayout, RowPerExpert, RowPerRank, RowPerServer
from aurora.moe.transport import ExchangeStep, Transport
from aurora.types import Order
from aurora.types.arrays import IntArray


class PushedRows(Protocol):
    """One batch on its way, of which the host knows no sizes; see `aurora.runtime.pushed_batch`."""

    def compute(self, experts: Any) -> None:
        """Queues this rank's experts on what arrives, and the way back."""

    def combined(self) -> torch.Tensor:
        """Returns (N, H), the layer's outputs for this rank's tokens."""


class ExpertParallelLayer:
    """One expert-parallel layer on one rank. All methods but `over_servers` and `computing` are collective calls.

    Attributes:
        expert_map: which rank and slot serves each choice; another one may take its place between two batches.
        transport: carries tensors between the ranks.
        hierarchical: whether all-to-alls go over the map's servers, if `over_servers` says so.
        deduplicate: whether a flat all-to-all sends a token once to a rank that holds several of its experts.
    """

    expert_map: ExpertMap
    transport: Transport
    hierarchical: bool = False
    deduplicate: bool = False

    def order(self, phase: str) -> Order:
        """Returns the order of the "dispatch" or "combine"."""
        raise NotImplementedError

    def layout_kind(self, top_k: int) -> type[DispatchLayout]:
        """Returns the dispatch layout of tokens that choose top_k experts each."""
        if self.hierarchical:
            return RowPerServer
        return RowPerRank if self.deduplicate and top_k > 1 else RowPerExpert

    def gather_loads(self, tokens_E: torch.Tensor) -> torch.Tensor:
        """Returns (R, E) int64 on the CPU: how often the tokens of each rank chose each expert, of this rank tokens_E (E,)."""
        return self.transport.gather(tokens_E)

    def gather_counts(self, layout: DispatchLayout) -> torch.Tensor:
        """Returns the `counts` of all ranks' layouts, (R, *counts.shape) int64 on the CPU."""
        return self.transport.gather(layout.counts)

    def over_servers(self, flat_RR: IntArray, row_bytes: int) -> bool:
        """Returns whether a batch of a hierarchical layer goes over servers, or is flat.

        Args:
            flat_RR: (R, R) rows from each rank (row) to each rank (column) if it is flat.
            row_bytes: size of a row in bytes.
        """
        return True

    def pushed(
        self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, mask: torch.Tensor | None
    ) -> PushedRows | None:
        """Sends a batch without the host; None: it goes over the transport. Arguments are those of `dispatch`."""
        return None

    def exchanging(self, phase: str, rows_SRR: IntArray, row_bytes: int) -> AbstractContextManager[ExchangeStep]:
        """Context manager of one all-to-all; it gives what performs each of its exchanges.

        Args:
            phase: "dispatch" or "combine".
            rows_SRR: (S, R, R) rows from each rank (row) to each rank (column) in each exchange.
            row_bytes: size of a row in bytes.
        """
        order = self.order(phase)
        return nullcontext(lambda sends, recvs: self.transport.exchange(order, sends, recvs, lambda *_: None))

    def computing(self, phase: str) -> AbstractContextManager[None]:
        """Context manager of the phase "expert" or "aggregate", in which this rank computes."""
        return nullcontext()

    def dispatch(
        self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, mask: torch.Tensor | None = None
    ) -> tuple[DispatchLayout, torch.Tensor]:
        """Sends this rank's tokens to the ranks of their experts.

        Args:
            hidden: (N, H) hidden states of this rank's tokens.
            index, weights: (N, K) the experts that every token chose, and their weights.
            mask: (N,) bool, which tokens need experts; None: all.

        Returns:
            The batch's layout, for `combine`, and the rows that arrived for this rank's experts.
        """
        tokens_SE = None
        if self.expert_map.needs_all_counts:
            tokens_SE = self.gather_loads(self.expert_map.count(index, mask))
        tokens = (self.expert_map, hidden, index, weights, mask, tokens_SE)
        layout = self.layout_kind(index.shape[1])(*tokens)
        counts = self.gather_counts(layout)
        if isinstance(layout, RowPerServer):
            flat_RR = layout.flat_counts(counts)
            if not self.over_servers(flat_RR.numpy(), _row_bytes(layout.rows)):
                layout, counts = RowPerRank(*tokens), flat_RR
        layout.gathered(counts)
        with self.exchanging("dispatch", layout.sizes_SRR, _row_bytes(layout.rows)) as exchange:
            return layout, layout.dispatch(exchange)

    def combine(self, layout: DispatchLayout, answers: torch.Tensor) -> torch.Tensor:
        """Sends the answers (X, H) to the rows of `dispatch` back. Returns (N, H), their sums by this rank's tokens."""
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
        """Returns (N, H), the layer's outputs for this rank's tokens, summed over their experts.

        Args:
            hidden, index, weights, mask: as of `dispatch`.
            experts: computes the experts in this rank's slots, as transformers' experts modules do.
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
