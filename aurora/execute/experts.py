"""A MoE layer's experts spread over ranks: takes the place of the experts module and performs the layer's ops."""

from typing import Any

import torch
from torch import nn

from aurora.execute.parcels import EveryChoice, OncePerRank, Seats
from aurora.execute.session import Session
from aurora.models.loading import hold_experts
from aurora.types import Barrier, Compute, Exchange, Op, Order, Placement


class DistributedExperts(nn.Module):
    """Called like the module it replaces, with this rank's tokens; gives the same output. Experts are where `placement` says.

    deduplicate: a token goes once to a rank that holds several of its experts.
    """

    def __init__(
        self,
        experts: Any,
        placement: Placement,
        ops: tuple[Op, ...],
        layer: int,
        session: Session,
        deduplicate: bool = False,
    ) -> None:
        super().__init__()
        self.num_experts = int(experts.num_experts)
        self._ops, self._layer, self._session = ops, layer, session
        self._rank = session.transport.rank
        self._deduplicate = deduplicate
        slots_G = placement.slots_LG[layer]
        self.seats = Seats(slots_G, self._rank, None if placement.split_LG is None else placement.split_EG(layer))
        hold_experts(experts, list(slots_G[self._rank]))
        self.local = experts

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """hidden_states (N, H), top_k_index and top_k_weights (N, K) -> (N, H). All ranks call it for the same layer."""
        session, layer, rank = self._session, self._layer, self._rank
        once = self._deduplicate and top_k_index.shape[1] > 1
        counts = arrived = answers = out = torch.empty(0)
        out_sizes: list[int] = []
        in_sizes: list[int] = []
        for op in self._ops:
            match op:
                case Compute("gate"):  # what transformers did since the last layer
                    tokens = (hidden_states, top_k_index, top_k_weights, session.mask)
                    parcels = OncePerRank(self.seats, *tokens) if once else EveryChoice(self.seats, *tokens)
                    session.stop_compute("gate", layer)
                case Barrier():
                    counts = session.counts(parcels.counts, layer)
                    sizes = parcels.sizes(counts)
                    out_sizes, in_sizes = sizes[rank], [row[rank] for row in sizes]
                case Exchange("dispatch", order):
                    arrived = self._exchange("dispatch", order, parcels.rows, out_sizes, in_sizes)
                case Compute("expert"):
                    with session.computing("expert", layer):
                        arrived = parcels.run(arrived, counts, self.local)
                case Exchange("combine", order):
                    answers = self._exchange("combine", order, arrived, in_sizes, out_sizes)
                case Compute("aggregate"):
                    with session.computing("aggregate", layer):
                        out = parcels.combine(answers)
        session.start_compute()
        return out

    def _exchange(
        self, phase: str, order: Order, rows: torch.Tensor, out_sizes: list[int], in_sizes: list[int]
    ) -> torch.Tensor:
        """Send this rank's rows, cut by out_sizes, and give what arrives, in_sizes rows from each rank, by rank."""
        arrived = rows.new_empty(sum(in_sizes), rows.shape[1])
        sends, recvs = rows.split_with_sizes(out_sizes), arrived.split_with_sizes(in_sizes)
        recvs[self._rank].copy_(sends[self._rank])
        self._session.exchange(phase, self._layer, order, sends, recvs)
        return arrived

    def idle(self, top_k: int, like: torch.Tensor) -> None:
        """Take part in the layer without tokens; `like` gives dtype, device and width of a hidden state (1, H)."""
        index = torch.empty(0, top_k, dtype=torch.long, device=like.device)
        self(like[:0], index, like.new_empty(0, top_k))
