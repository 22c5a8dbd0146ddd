"""A MoE layer's experts spread over ranks: takes the place of the experts module and performs the layer's ops."""

from typing import Any

import numpy as np
import torch
from torch import nn

from aurora.execute.session import Session
from aurora.models.loading import hold_experts
from aurora.types import Barrier, Compute, Exchange, Op, Order


class DistributedExperts(nn.Module):
    """Called like the module it replaces, with this rank's tokens; gives the same output.

    Rows are sorted by (rank of the expert, expert), so a message to a rank is one slice and its experts' rows lie together.
    """

    def __init__(
        self, experts: Any, slots_G: tuple[tuple[int, ...], ...], ops: tuple[Op, ...], layer: int, session: Session
    ) -> None:
        super().__init__()
        self.num_experts = int(experts.num_experts)
        self._ops, self._layer, self._session = ops, layer, session
        self._rank = session.transport.rank
        position = np.empty(self.num_experts, dtype=np.int64)
        position[[expert for held in slots_G for expert in held]] = np.arange(self.num_experts)
        self.register_buffer("_position_E", torch.from_numpy(position), persistent=False)
        self._first_G = np.concatenate([[0], np.cumsum([len(held) for held in slots_G])]).tolist()
        hold_experts(experts, list(slots_G[self._rank]))
        self.local = experts

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """hidden_states (N, H), top_k_index and top_k_weights (N, K) -> (N, H). All ranks call it for the same layer."""
        session, layer = self._session, self._layer
        rows = counts_RE = arrived = sizes = answers = out = torch.empty(0)
        choice = torch.empty(0, dtype=torch.long)
        for op in self._ops:
            match op:
                case Compute("gate"):  # what transformers did since the last layer
                    choice, counts_E = self._sort(top_k_index)
                    rows = hidden_states[choice // top_k_index.shape[1]]
                    session.stop_compute("gate", layer)
                case Barrier():
                    counts_RE = session.counts(counts_E, layer)
                    sizes = self._between(counts_RE)
                case Exchange("dispatch", order):
                    arrived = self._exchange("dispatch", order, rows, sizes[self._rank], sizes[:, self._rank])
                case Compute("expert"):
                    with session.computing("expert", layer):
                        arrived = self._run_local(arrived, counts_RE)
                case Exchange("combine", order):
                    answers = self._exchange("combine", order, arrived, sizes[:, self._rank], sizes[self._rank])
                case Compute("aggregate"):
                    with session.computing("aggregate", layer):
                        out = torch.zeros_like(hidden_states)
                        weights = top_k_weights.flatten()[choice, None]
                        out.index_add_(0, choice // top_k_index.shape[1], (answers * weights).to(out.dtype))
        session.start_compute()
        return out

    def _sort(self, top_k_index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The (token, choice) pairs to send, by place of their expert, as indices into the flattened (N, K); and how many
        go to each place (E,) int64. Padding and finished requests send none."""
        place = self._position_E[top_k_index.flatten()]  # type: ignore[index]
        mask = self._session.mask
        if mask is not None:
            wanted = mask.repeat_interleave(top_k_index.shape[1])
            place = torch.where(wanted, place, self.num_experts)
        counts = torch.bincount(place, minlength=self.num_experts + 1)[: self.num_experts]
        return torch.argsort(place, stable=True)[: int(counts.sum())], counts

    def _between(self, counts_RE: torch.Tensor) -> torch.Tensor:
        """(R, R) int64: rows from each rank to each."""
        upto = torch.cat([torch.zeros(len(counts_RE), 1, dtype=torch.long), counts_RE.cumsum(dim=1)], dim=1)
        return upto[:, self._first_G].diff(dim=1)

    def _exchange(self, phase: str, order: Order, rows: torch.Tensor, out_R: torch.Tensor, in_R: torch.Tensor) -> torch.Tensor:
        """Send this rank's rows, cut by out_R, and give what arrives, in_R rows from each rank, by rank."""
        arrived = rows.new_empty((int(in_R.sum()), rows.shape[1]))
        sends = list(torch.split(rows.contiguous(), out_R.tolist()))
        recvs = list(torch.split(arrived, in_R.tolist()))
        recvs[self._rank].copy_(sends[self._rank])
        self._session.exchange(phase, self._layer, order, sends, recvs)
        return arrived

    def _run_local(self, rows: torch.Tensor, counts_RE: torch.Tensor) -> torch.Tensor:
        """Run the local experts on rows that came by rank, then by expert."""
        if len(rows) == 0:
            return rows
        mine = counts_RE[:, self._first_G[self._rank] : self._first_G[self._rank + 1]]
        local = torch.arange(mine.shape[1]).repeat(len(mine)).repeat_interleave(mine.flatten()).to(rows.device)
        ones = torch.ones(len(rows), 1, dtype=rows.dtype, device=rows.device)
        done: torch.Tensor = self.local(rows, local[:, None], ones)
        return done

    def idle(self, top_k: int, like: torch.Tensor) -> None:
        """Take part in the layer without tokens; `like` gives dtype, device and width of a hidden state (1, H)."""
        index = torch.empty(0, top_k, dtype=torch.long, device=like.device)
        self(like[:0], index, like.new_empty(0, top_k))
