"""A MoE layer's all-to-all: a token travels once to each rank that needs it, in the planned order or one made per batch."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from aurora.planner.alltoall.open_shop import openshop
from aurora.planner.alltoall.registry import ORDER
from aurora.runtime.dispatch_layout import ExchangeStep, ExpertMap, RowPerRank
from aurora.runtime.distributed.transport import Transport
from aurora.types import Network, Order
from aurora.types.arrays import IntArray

SMALL_BYTES = 8192  # the latency of a message, 0.2 ms, at a port of 40 MB/s
ReportPhase = Callable[[str, int, float, IntArray], None]  # phase, layer, seconds, bytes_GG


@dataclass
class DispatchedBatch:
    """A layer's batch between dispatch and combine."""

    layout: RowPerRank  # which token's row goes to which rank
    combine_order: Order  # the order of the combine
    received: int  # number of rows that came to this rank
    tokens_G: IntArray  # (G,) how many choices of all ranks' own tokens each rank computes
    aggregate_s: float = 0.0  # seconds of the weighted sum at the end; set by `combine`


class LayerAllToAll:
    """Dispatch and combine of one MoE layer on one rank.

    If every rank sends less than SMALL_BYTES to each other rank, all messages go at once, which is faster than taking turns.

    Args:
        layer: the MoE layer's index.
        transport: carries tensors between the expert-parallel ranks.
        slots_G: for each rank, the experts it holds, in the sequence of its weights.
        planned_orders: (order of the dispatch, order of the combine); None: an open-shop order is made for every batch, the
            same on all ranks.
        network: the ranks' network, for orders made per batch; None: equal ports.
        report: called with (phase, layer, seconds, bytes_GG (G, G)) of each all-to-all.
        device: device of the tokens.
    """

    def __init__(
        self,
        layer: int,
        transport: Transport,
        slots_G: tuple[tuple[int, ...], ...],
        planned_orders: tuple[Order, Order] | None,
        network: Network | None,
        report: ReportPhase,
        device: torch.device,
    ) -> None:
        self._layer, self._transport, self._report = layer, transport, report
        self._expert_map = ExpertMap(slots_G, transport.rank).to(device)
        local = slots_G[transport.rank]
        remote = next((expert for experts in slots_G for expert in experts if expert not in local), 0)
        self._expert_S = torch.tensor([*local, remote], device=device)  # the last stands for choices of other ranks
        self._network = Network.equal(transport.ranks) if network is None else network
        no_bytes_GG = np.zeros((transport.ranks, transport.ranks), dtype=np.int64)
        at_once = ORDER["all-at-once"](no_bytes_GG, self._network, rng=np.random.default_rng(0))
        self._at_once, self._planned_orders = (at_once, at_once.reversed), planned_orders

    def dispatch(
        self, hidden: torch.Tensor, weights: torch.Tensor, index: torch.Tensor, own_rows: slice
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, DispatchedBatch]:
        """Sends this rank's tokens to the ranks of their experts. A collective call: all ranks make it.

        Args:
            hidden: (N, H), hidden states of this rank's tokens.
            weights, index: (N, K), the weights and the experts that the router chose for each token.
            own_rows: the rows that this rank counts: neither padding nor counted by another rank.

        Returns:
            (rows, weights, index, batch): the P rows that came to this rank (P, H), their weights (P, K), their experts (P, K),
            and the DispatchedBatch for `combine`. A choice that another rank serves has weight zero and an expert that is not
            on this rank.
        """
        began_s = time.perf_counter()
        layout = RowPerRank(self._expert_map, hidden, index.long(), weights, None)
        tokens_R = torch.bincount(layout.rank_NK[own_rows].flatten(), minlength=self._transport.ranks)
        gathered = self._transport.gather(torch.cat([tokens_R, layout.counts]))
        tokens_RR, counts = gathered.split_with_sizes([len(tokens_R), len(layout.counts)], dim=1)
        layout.gathered(counts)
        bytes_GG = layout.sizes_SRR.sum(axis=0) * layout.rows.shape[1]
        dispatch_order, combine_order = self._orders(bytes_GG)
        rows = layout.dispatch(self._exchange_step(dispatch_order))
        received, weights_PK, slots_PK = layout.received(rows)
        local_PK = slots_PK >= 0
        experts_PK = self._expert_S[slots_PK].to(index.dtype)  # slot -1 is the last
        self._report("dispatch", self._layer, time.perf_counter() - began_s, bytes_GG)
        batch = DispatchedBatch(layout, combine_order, len(rows), tokens_RR.numpy().sum(axis=0))
        return received.contiguous(), weights_PK.where(local_PK, 0).to(weights.dtype), experts_PK, batch

    def combine(self, answers: torch.Tensor, batch: DispatchedBatch) -> torch.Tensor:
        """Sends the experts' results back to the tokens' ranks and sums them. A collective call: all ranks make it.

        Args:
            answers: (P, H), the local experts' results for the P rows of `dispatch`.
            batch: the DispatchedBatch that `dispatch` returned.

        Returns:
            (N, H), for each of this rank's tokens the sum over its experts.
        """
        assert len(answers) == batch.received
        began_s = time.perf_counter()
        returned = batch.layout.combine(answers.contiguous(), self._exchange_step(batch.combine_order))
        bytes_GG = batch.layout.sizes_SRR.sum(axis=0).T * (answers.shape[1] * answers.element_size())
        returned_s = time.perf_counter()
        self._report("combine", self._layer, returned_s - began_s, bytes_GG)
        summed = batch.layout.aggregate(returned)
        batch.aggregate_s = time.perf_counter() - returned_s
        return summed

    def _orders(self, bytes_GG: IntArray) -> tuple[Order, Order]:
        """The orders of dispatch and combine for a batch."""
        between_GG = bytes_GG.copy()
        np.fill_diagonal(between_GG, 0)
        if between_GG.max() < SMALL_BYTES:
            return self._at_once
        if self._planned_orders is not None:
            return self._planned_orders
        order = openshop(between_GG, self._network, rng=np.random.default_rng(0))
        return order, order.reversed

    def _exchange_step(self, order: Order) -> ExchangeStep:
        """Returns what performs an exchange in `order`."""
        return lambda sends, recvs: self._transport.exchange(order, sends, recvs, lambda *_event: None)
