"""A MoE layer's all-to-all in vLLM: a token travels once to each rank (hierarchical: once to each server) of its experts.

The order is the planned one, or one that is computed for each batch.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch

from aurora.moe.expert_map import ExpertMap
from aurora.moe.layer import combine, dispatch
from aurora.moe.layouts import RowPerRank
from aurora.moe.transport import ExchangeStep, Transport
from aurora.types import Hierarchy, Network, Order
from aurora.types.arrays import IntArray
from aurora_vllm.traffic_recorder import PhaseClock, Span, span

SMALL_BYTES = 8192  # the latency of a message, 0.2 ms, at a port of 40 MB/s
Slots = tuple[tuple[int, ...], ...]  # the experts of each rank, in the sequence of its weights
ReportPhase = Callable[[str, int, Span | None, IntArray], None]  # phase, layer, the time it takes, bytes_GG


class LayerAllToAll:
    """Performs dispatch and combine of one MoE layer on one rank, by messages in an order.

    In a small batch, in which no rank would send SMALL_BYTES or more to another, every rank sends all its rows at once, without
    an order and flat, because that is faster.

    Args:
        layer: the MoE layer's index.
        transport: carries tensors between the expert-parallel ranks.
        slots_G: the experts of each rank.
        planned_orders: (order of the dispatch, order of the combine); None: `order_of_batch` computes one for every batch, the
            same on all ranks.
        hierarchy: the servers and chunks of hierarchical all-to-alls; None: all-to-alls are flat.
        network: the ranks' network, for orders computed per batch; None: equal ports.
        report: called with (phase, layer, Span, bytes_GG (G, G)) for each all-to-all, once all its work has been launched.
        clock: marks the beginning and the end of all-to-alls.
        device: device of the tokens.

    Attributes:
        planned_orders: as given.
        at_once: orders (dispatch, combine) of small batches.
        expert_map: maps experts to ranks.
    """

    def __init__(
        self,
        layer: int,
        transport: Transport,
        slots_G: Slots,
        planned_orders: tuple[Order, Order] | None,
        hierarchy: Hierarchy | None,
        network: Network | None,
        report: ReportPhase,
        clock: PhaseClock,
        device: torch.device,
    ) -> None:
        self.layer, self.transport, self.report, self.clock, self.hierarchy = layer, transport, report, clock, hierarchy
        self.expert_map, local = ExpertMap(slots_G, transport.rank, hierarchy=hierarchy).to(device), slots_G[transport.rank]
        remote = next((expert for expert in range(self.expert_map.num_physical) if expert not in local), 0)
        self._expert_S = torch.tensor([*local, remote], device=device)  # the last stands for choices of other ranks
        self.network = Network.equal(transport.ranks) if network is None else network
        at_once = Order.all_at_once(transport.ranks)
        self.at_once, self.planned_orders = (at_once, at_once.reversed), planned_orders

    def dispatch(
        self, hidden: torch.Tensor, weights: torch.Tensor, index: torch.Tensor, own_rows: slice
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, DispatchedBatch]:
        """Sends this rank's tokens to the ranks of their experts. A collective call: all ranks make it.

        Args:
            hidden: (N, H), hidden states of this rank's tokens.
            weights, index: (N, K), the weights and the experts that the router chose for each token.
            own_rows: rows whose choices this rank counts; the others are padding, or counted by another tensor-parallel rank.

        Returns:
            (rows, weights, index, batch): the P received rows (P, H), their weights (P, K), their experts (P, K), and the
            DispatchedBatch for `combine`. Choices of experts on other ranks have weight zero, and an index of an expert that
            is not on this rank.
        """
        batch = DispatchedBatch(self, own_rows)
        kind: type[RowPerRank] = RowPerRank
        if self.hierarchy is not None:
            from aurora.moe.server_layout import RowPerServer  # which flat all-to-alls need not

            kind = RowPerServer
        batch.layout = kind(self.expert_map, hidden, index.long(), weights, None)
        layout, rows = dispatch(batch.layout, batch, batch.is_hierarchical)
        assert isinstance(layout, RowPerRank)
        batch.layout, batch.received = layout, len(rows)
        received, weights_PK, slots_PK = layout.received(rows)
        local_PK = slots_PK >= 0
        experts_PK = self._expert_S[slots_PK].to(index.dtype)  # slot -1 is the last
        batch.report("dispatch")
        return received.contiguous(), weights_PK.where(local_PK, 0).to(weights.dtype), experts_PK, batch

    def combine(self, answers: torch.Tensor, batch: DispatchedBatch) -> torch.Tensor:
        """Sends expert outputs back to the ranks of their tokens, and sums them. A collective call: all ranks make it.

        Args:
            answers: (P, H), the local experts' outputs for the P rows of `dispatch`.
            batch: the DispatchedBatch from `dispatch`.

        Returns:
            (N, H), each token's expert outputs, summed.
        """
        assert len(answers) == batch.received
        batch.begin()
        returned = combine(batch.layout, answers.contiguous(), batch)
        batch.report("combine")
        began = self.clock.mark()
        summed = batch.layout.aggregate(returned)
        batch.aggregate = span(began, self.clock.mark())
        return summed

    def orders(self, bytes_GG: IntArray) -> tuple[Order, Order]:
        """Returns the orders (dispatch, combine) for a batch that is not small; bytes_GG (G, G): its bytes between ranks."""
        if self.planned_orders is not None:
            return self.planned_orders
        order = order_of_batch(_between(bytes_GG), self.hierarchy, self.network)
        return order, order.reversed


class DispatchedBatch:
    """One batch of a layer from dispatch to combine, and its LayerTransport (aurora.moe.layer); its size chooses the order.

    Args:
        alltoall: the layer's all-to-all.
        own_rows: as in `LayerAllToAll.dispatch`.

    Attributes:
        layout: the layout in which the tokens went.
        received: number of rows that this rank received.
        tokens_G: (G,) number of (token, expert) choices that each rank computes, counted over all ranks' `own_rows`.
        aggregate: time span of the weighted sum at the end; None until the sum has been launched.
    """

    layout: RowPerRank
    tokens_G: IntArray

    def __init__(self, alltoall: LayerAllToAll, own_rows: slice) -> None:
        self.transport = alltoall.transport
        self.received = 0
        self.aggregate: Span | None = None
        self._alltoall, self._own_rows = alltoall, own_rows
        self._small: bool | None = None  # None: not known yet
        self._orders: tuple[Order, Order] | None = None  # of dispatch and combine
        self.begin()

    def begin(self) -> None:
        """Marks the beginning of an all-to-all, for `report`."""
        self._began = self._alltoall.clock.mark()

    def report(self, phase: str) -> None:
        """Passes the times of the all-to-all of `phase` to the layer's `report`, once all its work has been launched."""
        alltoall = self._alltoall
        took = span(self._began, alltoall.clock.mark())
        alltoall.report(phase, alltoall.layer, took, self._bytes_SGG.sum(axis=0))

    def gather(self, counts: torch.Tensor) -> torch.Tensor:
        """Allgathers the row counts; the same message also carries the counts for `tokens_G`."""
        tokens_R = torch.bincount(self.layout.rank_NK[self._own_rows].flatten(), minlength=self.transport.ranks)
        gathered = self.transport.gather(torch.cat([tokens_R, counts]))
        tokens_RR, counts_RX = gathered.split_with_sizes([len(tokens_R), len(counts)], dim=1)
        self.tokens_G = tokens_RR.numpy().sum(axis=0)
        return counts_RX

    def is_hierarchical(self, flat_RR: IntArray, row_bytes: int) -> bool:
        """Returns True if this batch is to be hierarchical: it is not small."""
        self._small = _is_small(flat_RR * row_bytes)
        return not self._small

    def exchanging(self, phase: str, rows_SRR: IntArray, row_bytes: int) -> AbstractContextManager[ExchangeStep]:
        """Context manager around an all-to-all, whose steps go in one order; see LayerTransport."""
        alltoall, exchange = self._alltoall, self.transport.exchange
        self._bytes_SGG = bytes_SGG = rows_SRR * row_bytes
        if self._orders is None:
            small = _is_small(bytes_SGG[0]) if self._small is None else self._small
            self._orders = alltoall.at_once if small else alltoall.orders(bytes_SGG.sum(axis=0))
        order = self._orders[phase == "combine"]
        return nullcontext(lambda sends, recvs: exchange(order, sends, recvs, lambda *_event: None))


def order_of_batch(bytes_GG: IntArray, hierarchy: Hierarchy | None, network: Network) -> Order:
    """Returns an order computed for one batch: an open-shop schedule of the ranks, or of the servers if hierarchical.

    Args:
        bytes_GG: (G, G) with a zero diagonal, bytes from each rank to each other, summed over the all-to-all's steps.
        hierarchy: the servers; None: the all-to-all is flat.
        network: the ranks' network.
    """
    from aurora.algorithms.alltoall.hierarchical_order import hierarchical_order
    from aurora.algorithms.alltoall.open_shop import openshop

    rng = np.random.default_rng(0)
    if hierarchy is None:
        return openshop(bytes_GG, network, rng=rng)
    return hierarchical_order(bytes_GG, hierarchy, network, rng=rng)


def _between(bytes_GG: IntArray) -> IntArray:
    """A copy without what stays on its rank."""
    return np.where(np.eye(len(bytes_GG), dtype=bool), 0, bytes_GG)


def _is_small(bytes_GG: IntArray) -> bool:
    """Returns whether no rank sends another SMALL_BYTES or more."""
    return bool(_between(bytes_GG).max(initial=0) < SMALL_BYTES)
