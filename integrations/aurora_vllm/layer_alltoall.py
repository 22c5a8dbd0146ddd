"""A MoE layer's all-to-all: a token travels once to each rank, or to each server, that needs it, in the planned order, the one
that is measured to be fastest, or one made per batch."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from aurora.planner.alltoall.hierarchical_order import hierarchical_order
from aurora.planner.alltoall.open_shop import openshop
from aurora.planner.alltoall.registry import ORDER
from aurora.runtime.dispatch_layout import ExchangeStep, ExpertMap, RowPerRank
from aurora.runtime.distributed.transport import Transport
from aurora.runtime.hierarchical_layout import RowPerServer
from aurora.runtime.watched_exchanges import WatchedExchanges
from aurora.types import Hierarchy, Network, Order
from aurora.types.arrays import IntArray
from aurora_vllm.time_slices import TimeSlices

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

    If no rank would send another SMALL_BYTES or more, all rows go straight to their ranks and at once, which is faster than
    taking turns, and than several steps.

    Args:
        layer: the MoE layer's index.
        transport: carries tensors between the expert-parallel ranks.
        time_slices: grant the port for an all-to-all.
        slots_G: for each rank, the experts it holds, in the sequence of its weights.
        planned_orders: (order of the dispatch, order of the combine); None: `order_of_batch` makes one for every batch, the
            same on all ranks.
        hierarchy: the servers and chunks of the all-to-all, which then has two hops, unless `watched` has it flat; None: it is
            flat.
        network: the ranks' network, for orders made per batch; None: equal ports.
        report: called with (phase, layer, seconds, bytes_GG (G, G)) of each all-to-all.
        device: device of the tokens.
        watched: chooses in place of the planned orders, and whether an all-to-all has two hops; one for all layers. None: as
            planned.

    Attributes:
        planned_orders: as given; others may take their place between two batches.
    """

    def __init__(
        self,
        layer: int,
        transport: Transport,
        time_slices: TimeSlices,
        slots_G: tuple[tuple[int, ...], ...],
        planned_orders: tuple[Order, Order] | None,
        hierarchy: Hierarchy | None,
        network: Network | None,
        report: ReportPhase,
        device: torch.device,
        watched: WatchedExchanges | None = None,
    ) -> None:
        self._layer, self._transport, self._time_slices, self._report = layer, transport, time_slices, report
        self._hierarchy, self._watched, self._device = hierarchy, watched, device
        self.place(ExpertMap(slots_G, transport.rank, hierarchy=hierarchy).to(device), slots_G[transport.rank])
        self._network = Network.equal(transport.ranks) if network is None else network
        no_bytes_GG = np.zeros((transport.ranks, transport.ranks), dtype=np.int64)
        at_once = ORDER["all-at-once"](no_bytes_GG, self._network, rng=np.random.default_rng(0))
        self._at_once, self.planned_orders = (at_once, at_once.reversed), planned_orders

    def place(self, expert_map: ExpertMap, local: Sequence[int]) -> None:
        """Sends tokens by another expert map from the next batch on.

        Args:
            expert_map: of all ranks.
            local: the experts of this rank, in the sequence of its weights.
        """
        self._expert_map = expert_map
        remote = next((expert for expert in range(expert_map.num_physical) if expert not in local), 0)
        self._expert_S = torch.tensor([*local, remote], device=self._device)  # the last stands for choices of other ranks

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
        tokens = (self._expert_map, hidden, index.long(), weights, None)
        layout: RowPerRank = RowPerRank(*tokens) if self._hierarchy is None else RowPerServer(*tokens)
        tokens_R = torch.bincount(layout.rank_NK[own_rows].flatten(), minlength=self._transport.ranks)
        mine = torch.cat([tokens_R, layout.counts])
        gathered = self._transport.gather(mine) if self._watched is None else self._watched.gather(self._transport, mine)
        tokens_RR, counts = gathered.split_with_sizes([len(tokens_R), len(layout.counts)], dim=1)
        row_bytes = layout.rows.shape[1]
        flat_RR = layout.flat_counts(counts) if isinstance(layout, RowPerServer) else counts
        small = _is_small(flat_RR.numpy() * row_bytes)
        if isinstance(layout, RowPerServer) and (small or not self._over_servers(flat_RR, row_bytes)):
            layout, counts = RowPerRank(*tokens), flat_RR
        layout.gathered(counts)
        bytes_SGG = layout.sizes_SRR * row_bytes
        bytes_GG = bytes_SGG.sum(axis=0)
        dispatch_order, combine_order = self._at_once if small else self._orders(bytes_GG)
        with self._exchanging("dispatch", dispatch_order, bytes_SGG) as exchange:
            rows = layout.dispatch(exchange)
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
        bytes_SGG = batch.layout.sizes_SRR.swapaxes(1, 2) * (answers.shape[1] * answers.element_size())
        with self._exchanging("combine", batch.combine_order, bytes_SGG) as exchange:
            returned = batch.layout.combine(answers.contiguous(), exchange)
        returned_s = time.perf_counter()
        self._report("combine", self._layer, returned_s - began_s, bytes_SGG.sum(axis=0))
        summed = batch.layout.aggregate(returned)
        batch.aggregate_s = time.perf_counter() - returned_s
        return summed

    def _over_servers(self, flat_RR: torch.Tensor, row_bytes: int) -> bool:
        """Whether a batch that may have two hops, and is not small, has them. A watch that is asked must see its exchanges."""
        return self._watched is None or self._watched.over_servers(flat_RR.numpy(), row_bytes)

    def _orders(self, bytes_GG: IntArray) -> tuple[Order, Order]:
        """The orders of dispatch and combine for a batch that is not small."""
        if self.planned_orders is not None:
            return self.planned_orders
        order = order_of_batch(_between(bytes_GG), self._hierarchy, self._network)
        return order, order.reversed

    @contextmanager
    def _exchanging(self, phase: str, order: Order, bytes_SGG: IntArray) -> Iterator[ExchangeStep]:
        """Context manager that grants the port for an all-to-all; it gives what performs an exchange, planned in `order`."""
        exchange = self._transport.exchange
        if self._time_slices.cuts:
            yield self._time_slices.cut(self._transport, order, bytes_SGG, self._network)
            return
        with self._time_slices.exchanging(self._transport):
            if self._watched is None or any(order is each for each in self._at_once):
                yield lambda sends, recvs: exchange(order, sends, recvs, lambda *_event: None)
            else:
                with self._watched.exchanging(order, phase, self._transport.rank, bytes_SGG.sum(axis=0)) as chosen:
                    yield lambda sends, recvs: exchange(chosen, sends, recvs, lambda *_event: None)


def order_of_batch(bytes_GG: IntArray, hierarchy: Hierarchy | None, network: Network) -> Order:
    """Returns an order for one batch: an open shop of ranks or, of a hierarchical all-to-all, of servers.

    Args:
        bytes_GG: (G, G) with a zero diagonal, bytes from each rank to each other, of all steps together.
        hierarchy: the servers; None: the all-to-all is flat.
        network: the ranks' network.
    """
    rng = np.random.default_rng(0)
    if hierarchy is None:
        return openshop(bytes_GG, network, rng=rng)
    return hierarchical_order(bytes_GG, hierarchy, network, rng=rng)


def _between(bytes_GG: IntArray) -> IntArray:
    """A copy without what stays on its rank."""
    return np.where(np.eye(len(bytes_GG), dtype=bool), 0, bytes_GG)


def _is_small(bytes_GG: IntArray) -> bool:
    """Whether no rank sends another SMALL_BYTES or more."""
    return bool(_between(bytes_GG).max(initial=0) < SMALL_BYTES)
