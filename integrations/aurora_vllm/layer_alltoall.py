"""The all-to-all of a MoE layer: only the tokens that a rank needs travel to it, in the planned order or one made per batch."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from aurora.planner.alltoall.open_shop import DenseShop, openshop
from aurora.planner.alltoall.registry import ORDER
from aurora.runtime.dispatch_layout import ExpertMap, RowPerRank
from aurora.runtime.distributed.transport import Transport
from aurora.runtime.token_kernels import MessageFormat
from aurora.types import Cluster, Network, Order
from aurora.types.arrays import IntArray

SMALL_BYTES = 8192  # a message's latency, 0.2 ms, at a port of 40 MB/s
Told = Callable[[str, int, float, IntArray], None]  # phase, layer, seconds, bytes_GG


@dataclass
class DispatchedBatch:
    """A layer's tokens under way. sizes: rows from each rank to each. back: the order of the way back. summed_s: seconds of the
    sum at the end."""

    parcels: RowPerRank
    sizes: list[list[int]]
    back: Order
    arrived: int
    summed_s: float = 0.0


class LayerExchange:
    """One layer's all-to-all on one rank. slots_G: the experts that every rank holds, in the order of its weights.

    orders: of dispatch and combine; None makes an open shop's for every batch, the same on all ranks. Where no rank sends
    another as much as SMALL_BYTES, waiting for a turn costs more than sharing ports: all goes at once. told: hears of phases.
    """

    def __init__(
        self,
        layer: int,
        transport: Transport,
        slots_G: tuple[tuple[int, ...], ...],
        orders: tuple[Order, Order] | None,
        cluster: Cluster | None,
        told: Told,
        device: torch.device,
    ) -> None:
        self._layer, self._transport, self._told = layer, transport, told
        self._seats = ExpertMap(slots_G, transport.rank).to(device)
        held = slots_G[transport.rank]
        elsewhere = next((expert for own in slots_G for expert in own if expert not in held), 0)
        self._expert_S = torch.tensor([*held, elsewhere], device=device)  # the last is for choices of other ranks
        self._network = Network.equal(transport.ranks) if cluster is None else cluster.network
        self._shop = DenseShop(transport.ranks)
        nothing_GG = np.zeros((transport.ranks, transport.ranks), dtype=np.int64)
        at_once = ORDER["all-at-once"](nothing_GG, self._network, rng=np.random.default_rng(0))
        self._at_once, self._planned = (at_once, at_once.reversed), orders

    def dispatch(
        self, hidden: torch.Tensor, weights: torch.Tensor, index: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, DispatchedBatch]:
        """The rows (P, H) that came to this rank, their weights and experts (P, K), and what `combine` wants.

        A choice that another rank serves has weight zero and an expert that is not here. All ranks call it together.
        """
        rank = self._transport.rank
        began = time.perf_counter()
        parcels = RowPerRank(self._seats, hidden, index.long(), weights, None)
        counts_RR = self._transport.gather(parcels.counts)
        sizes = parcels.sizes(counts_RR)
        bytes_GG = counts_RR.numpy() * parcels.rows.shape[1]
        orders = self._orders(bytes_GG)
        rows = self._exchange(orders[0], parcels.rows, sizes[rank], [row[rank] for row in sizes])
        packing = MessageFormat(hidden.shape[1], index.shape[1], hidden.dtype)
        hidden_P, weights_PK, slots_PK = packing.parts(rows)
        there_PK = slots_PK >= 0
        experts_PK = self._expert_S[slots_PK.long()].to(index.dtype)  # slot -1 is the last
        self._told("dispatch", self._layer, time.perf_counter() - began, bytes_GG)
        batch = DispatchedBatch(parcels, sizes, orders[1], len(rows))
        return hidden_P.contiguous(), weights_PK.where(there_PK, 0).to(weights.dtype), experts_PK, batch

    def combine(self, answers: torch.Tensor, batch: DispatchedBatch) -> torch.Tensor:
        """(N, H): this rank's tokens, their experts' answers summed; answers (P, H): to the rows that came here."""
        assert len(answers) == batch.arrived
        rank = self._transport.rank
        began = time.perf_counter()
        back = self._exchange(batch.back, answers.contiguous(), [row[rank] for row in batch.sizes], batch.sizes[rank])
        bytes_GG = np.array(batch.sizes, dtype=np.int64).T * answers.shape[1] * answers.element_size()
        back_s = time.perf_counter()
        self._told("combine", self._layer, back_s - began, bytes_GG)
        done = batch.parcels.combine(back)
        batch.summed_s = time.perf_counter() - back_s
        return done

    def _orders(self, bytes_GG: IntArray) -> tuple[Order, Order]:
        between_GG = bytes_GG.copy()
        np.fill_diagonal(between_GG, 0)
        if between_GG.max() < SMALL_BYTES:
            return self._at_once
        if self._planned is not None:
            return self._planned
        made = openshop(between_GG, self._network, rng=np.random.default_rng(0), shop=self._shop)
        return made, made.reversed

    def _exchange(self, order: Order, rows: torch.Tensor, out_sizes: Sequence[int], in_sizes: Sequence[int]) -> torch.Tensor:
        """Send this rank's rows, cut by out_sizes, and give what arrives, in_sizes rows from each rank, by rank."""
        arrived = rows.new_empty(sum(in_sizes), rows.shape[1])
        sends, recvs = rows.split_with_sizes(list(out_sizes)), arrived.split_with_sizes(list(in_sizes))
        recvs[self._transport.rank].copy_(sends[self._transport.rank])
        self._transport.exchange(order, sends, recvs, lambda *_event: None)
        return arrived
