"""A MoE layer's experts spread over ranks: takes the place of the experts module and performs the layer's ops."""

import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from aurora.models.loading import expert_parameters, hold_experts
from aurora.runtime.dispatch_layout import ExpertMap, RowPerExpert, RowPerRank
from aurora.runtime.layer_context import LayerContext
from aurora.types import PART_S, Barrier, Compute, Exchange, Op, Placement

LEAST_ROWS = 64  # of a part of the experts' work


class DistributedExperts(nn.Module):
    """Called like the module it replaces, with this rank's tokens; gives the same output. Experts are where `placement` says.

    Made of the module it replaces, with all experts; `perform` comes before the first call.
    """

    def __init__(self, experts: Any) -> None:
        super().__init__()
        self.num_experts = int(experts.num_experts)
        self.local = experts
        self.held = tuple(range(self.num_experts))  # by slot of `local`
        self._part_rows = LEAST_ROWS

    def perform(
        self,
        placement: Placement,
        ops: tuple[Op, ...],
        layer: int,
        session: LayerContext,
        deduplicate: bool = False,
        local_first: bool = False,
    ) -> None:
        """Keep what `placement` gives this rank in `layer`, of what is held, and take part in `ops` from now on.

        deduplicate: a token goes once to a rank that holds several of its experts. local_first: replicas share the tokens of
        all ranks, a rank's own first; ranks count them before they send.
        """
        self._ops, self._layer, self._session = ops, layer, session
        self._rank = session.transport.rank
        self._deduplicate = deduplicate
        slots_G = placement.slots_LG[layer]
        split_EG = None if placement.split_LG is None else placement.split_EG(layer)
        seats = ExpertMap(slots_G, self._rank, split_EG, local_first)
        self.seats = seats.to(next(self.local.parameters()).device)
        self.hold(slots_G[self._rank])

    def hold(self, wanted: Sequence[int], arrived: Mapping[int, Mapping[str, torch.Tensor]] = MappingProxyType({})) -> None:
        """Have the experts `wanted`, in this order: of those held, and of what has `arrived`, by expert and parameter."""
        if tuple(wanted) != self.held:
            hold_experts(self.local, [arrived.get(expert) or self.held.index(expert) for expert in wanted])
            self.held = tuple(wanted)

    def weights(self, expert: int) -> dict[str, torch.Tensor]:
        """A held expert's weights by parameter."""
        slot = self.held.index(expert)
        return {name: parameter.detach()[slot] for name, parameter in expert_parameters(self.local)}

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """hidden_states (N, H), top_k_index and top_k_weights (N, K) -> (N, H). All ranks call it for the same layer."""
        session, layer, rank = self._session, self._layer, self._rank
        deduplicated = self._deduplicate and top_k_index.shape[1] > 1
        counts = arrived = answers = out = torch.empty(0)
        out_sizes: list[int] = []
        in_sizes: list[int] = []
        for op in self._ops:
            match op:
                case Compute("gate"):  # what transformers did since the last layer
                    session.route(top_k_index)
                    all_SE = None
                    if self.seats.cuts is not None:
                        own_E = self.seats.counted(top_k_index, session.mask)
                        session.stop_compute("gate", layer)  # whoever waits for other ranks holds no GPU
                        all_SE = session.counts(own_E, layer)
                        session.start_compute()
                    tokens = (hidden_states, top_k_index, top_k_weights, session.mask, all_SE)
                    parcels = RowPerRank(self.seats, *tokens) if deduplicated else RowPerExpert(self.seats, *tokens)
                    session.stop_compute("gate", layer)
                case Barrier():
                    counts = session.counts(parcels.counts, layer)
                    sizes = parcels.sizes(counts)
                    out_sizes, in_sizes = sizes[rank], [row[rank] for row in sizes]
                case Exchange("dispatch"):
                    arrived = self._exchange(op, parcels.rows, out_sizes, in_sizes)
                case Compute("expert"):
                    with session.computing("expert", layer):
                        arrived = parcels.run(arrived, counts, self.local if session.alone else self._in_parts)
                case Exchange("combine"):
                    answers = self._exchange(op, arrived, in_sizes, out_sizes)
                case Compute("aggregate"):
                    with session.computing("aggregate", layer):
                        out = parcels.combine(answers)
        session.start_compute()
        return out

    def _in_parts(self, rows: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """What `local` does, with brief work of other models in between; a part takes about PART_S, as the one before tells."""
        done: list[torch.Tensor] = []
        first = 0
        while first < len(rows):
            if first:
                self._session.part("expert", self._layer)
            part, began_s = slice(first, min(first + self._part_rows, len(rows))), time.perf_counter()
            done.append(self.local(rows[part], index[part], weights[part]))
            first, size = part.stop, part.stop - part.start
            self._part_rows = max(LEAST_ROWS, int(size * PART_S / (time.perf_counter() - began_s)))
        return done[0] if len(done) == 1 else torch.cat(done)

    def _exchange(self, op: Exchange, rows: torch.Tensor, out_sizes: list[int], in_sizes: list[int]) -> torch.Tensor:
        """Send this rank's rows, cut by out_sizes, and give what arrives, in_sizes rows from each rank, by rank."""
        arrived = rows.new_empty(sum(in_sizes), rows.shape[1])
        sends, recvs = rows.split_with_sizes(out_sizes), arrived.split_with_sizes(in_sizes)
        recvs[self._rank].copy_(sends[self._rank])
        self._session.exchange(self._layer, op, sends, recvs)
        return arrived

    def idle(self, top_k: int, like: torch.Tensor) -> None:
        """Take part in the layer without tokens; `like` gives dtype, device and width of a hidden state (1, H)."""
        index = torch.empty(0, top_k, dtype=torch.long, device=like.device)
        self(like[:0], index, like.new_empty(0, top_k))
