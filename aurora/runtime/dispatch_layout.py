"""Dispatch layout of a MoE layer: one row per (token, expert) pair, or one per (token, rank) when deduplicated.

A layout holds one batch of a layer. Its methods are the layer's operations, each called once and in this sequence: `counts` are
gathered from all ranks and told by `gathered`, then `dispatch`, `compute`, `combine` and `aggregate`. The caller performs the
exchanges (`ExchangeStep`). `aurora.runtime.hierarchical_layout` has one row per (token, server), which takes several.

Axes: N tokens, K choices of a token, E experts, M replicas of an expert, P physical experts (every replica is one), R and G
ranks, S ranks that hold tokens or, of sizes, steps (exchanges of one all-to-all), X rows, Q (row, expert) pairs of arrived
rows, H hidden width.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from aurora.planner.workload.serving_gpus import server_split
from aurora.runtime.permutation_cpu import sum_by_rank
from aurora.runtime.replica_selection import LocalFirst, proportional, select_replicas
from aurora.runtime.token_permutation import (
    MessageFormat,
    gather_rows,
    permutation_by_expert,
    permutation_by_rank,
    weighted_sum,
)
from aurora.types import Hierarchy
from aurora.types.arrays import FloatArray, IntArray

# Performs one exchange: a contiguous tensor of bytes to send to each rank, and one to fill with what each rank sends.
ExchangeStep = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], None]


class ExpertMap(nn.Module):
    """Maps experts to physical experts: one for every slot of every rank, numbered by rank and then by slot.

    Args:
        slots_G: for every rank, the experts in its slots.
        rank: this rank.
        split_EG: (E, G) which part of an expert's tokens each rank takes; None: each expert has one replica.
        local_first: True: the tokens of all ranks are split together, and a rank's own replicas take its tokens first. False:
            each rank splits its own tokens. See `aurora.runtime.replica_selection`.
        hierarchy: the servers of the ranks, if exchanges may be hierarchical. Unless `local_first`, one server then serves a
            rank's tokens of an expert, as `server_split` says.

    Attributes:
        num_physical: number of physical experts.
        first_R: (R + 1,) rank g has the physical experts first_R[g] to first_R[g + 1] - 1.
        local: slice of this rank's physical experts.
        arrival_slots: the local slot of every (sender, local physical expert), by sender.
        max_replicas: largest number of replicas of any expert.
        rank_P: (P + 1,) int64, rank of every physical expert; R for `num_physical`.
        server_R: (R + 1,) int64, server of every rank; with N servers, N for R. Without a hierarchy all ranks are on one.
        members: the ranks of this rank's server.
        member_R: (R + 1,) int64, index of every rank in `members`; their number for all others.
    """

    def __init__(
        self,
        slots_G: tuple[tuple[int, ...], ...],
        rank: int,
        split_EG: FloatArray | None = None,
        local_first: bool = False,
        hierarchy: Hierarchy | None = None,
    ) -> None:
        super().__init__()
        self.rank, self.ranks = rank, len(slots_G)
        self.hierarchy = Hierarchy(np.zeros(self.ranks, dtype=np.int64)) if hierarchy is None else hierarchy
        held_G = torch.tensor([len(slots) for slots in slots_G])
        self.num_physical = int(held_G.sum())
        self.first_R = np.array([0, *held_G.cumsum(0).tolist()])
        self.local = slice(self.first_R[rank], self.first_R[rank + 1])
        self.arrival_slots = np.tile(np.arange(len(slots_G[rank])), self.ranks)
        rank_P = torch.arange(self.ranks).repeat_interleave(held_G)
        replicas_of: dict[int, list[int]] = {}
        for physical, expert in enumerate(expert for slots in slots_G for expert in slots):
            replicas_of.setdefault(expert, []).append(physical)
        self.max_replicas = most = max(map(len, replicas_of.values()))
        physical_EM = torch.tensor([(own + own[-1:] * most)[:most] for _, own in sorted(replicas_of.items())])
        share_until_EM = torch.ones(len(physical_EM), most, dtype=torch.float64)
        self.local_first: LocalFirst | None = None
        if local_first and most > 1:
            share_G = None if split_EG is None else tuple(tuple(split_EG[list(held), g]) for g, held in enumerate(slots_G))
            self.local_first = LocalFirst(slots_G, rank, share_G)
        elif split_EG is not None:
            if hierarchy is not None:
                split_EG = server_split(split_EG, hierarchy.server_G)[hierarchy.server_G[rank]]
            until_EG = split_EG.cumsum(axis=1)
            share_until_EM = torch.from_numpy(until_EG / until_EG[:, -1:]).gather(1, rank_P[physical_EM])
        server_G = self.hierarchy.server_G
        self.members = np.flatnonzero(server_G == server_G[rank])
        member_R = torch.full((self.ranks + 1,), len(self.members))
        member_R[self.members] = torch.arange(len(self.members))
        buffers = {"physical_EM": physical_EM, "share_until_EM": share_until_EM, "member_R": member_R}
        buffers["rank_P"] = torch.cat([rank_P, torch.tensor([self.ranks])])
        buffers["server_R"] = torch.from_numpy(np.append(server_G, self.hierarchy.servers))
        for name, array in buffers.items():
            self.register_buffer(name, array, persistent=False)

    physical_EM: torch.Tensor
    share_until_EM: torch.Tensor
    rank_P: torch.Tensor
    server_R: torch.Tensor
    member_R: torch.Tensor

    @property
    def needs_all_counts(self) -> bool:
        """Whether `physical_experts` needs the counts of all ranks."""
        return self.local_first is not None

    def count(self, index: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Returns (E,) int64: how often every expert is chosen by the tokens (N, K) in `mask`; None: all tokens."""
        return torch.bincount((index if mask is None else index[mask]).flatten(), minlength=len(self.physical_EM))

    def physical_experts(
        self, index: torch.Tensor, mask: torch.Tensor | None, tokens_SE: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Returns (N, K) the physical expert of every choice; `num_physical` where the token needs no experts.

        Args:
            index: (N, K) expert of every choice.
            mask: (N,) bool, which tokens need experts; None: all.
            tokens_SE: (S, E) the results of `count` on all ranks; required if `needs_all_counts`.
        """
        if self.max_replicas == 1:
            physical_NK = self.physical_EM.view(-1)[index]
        else:
            expert_X = index.flatten() if mask is None else index[mask].flatten()
            counts_E = torch.bincount(expert_X, minlength=len(self.physical_EM))
            if self.local_first is None:
                until_EM = proportional(counts_E, self.share_until_EM, self.rank, self.ranks)
            else:
                assert tokens_SE is not None, "local first needs all ranks' counts"
                until_EM = self.local_first(tokens_SE.to(index.device))
            physical_X = self.physical_EM[expert_X, select_replicas(expert_X, counts_E, until_EM)]
            physical_NK = torch.full_like(index, self.num_physical)
            physical_NK[slice(None) if mask is None else mask] = physical_X.view(-1, index.shape[1])
        return physical_NK if mask is None else physical_NK.masked_fill(~mask[:, None], self.num_physical)

    def local_slots(self, physical: torch.Tensor) -> torch.Tensor:
        """Returns int64 tensor of the same shape: the slots of physical experts on this rank; -1 for those of other ranks."""
        slots = physical.long() - int(self.local.start)
        return slots.masked_fill_((slots < 0) | (physical >= int(self.local.stop)), -1)


class RowPerExpert:
    """Layout of one row per (token, expert) pair: the token's hidden state. Rows are sorted by physical expert.

    The sender applies the weights.

    Args:
        expert_map: the layer's map.
        hidden: (N, H) hidden states of this rank's tokens.
        index, weights: (N, K) the experts that every token chose, and their weights.
        mask, tokens_SE: as in `ExpertMap.physical_experts`.

    Attributes:
        rows: (X, H) the rows to send.
        counts: (P,) int64, number of rows for every physical expert. Ranks gather it before they send.
        sizes_SRR: (S, R, R) int64, the rows from each rank (row) to each rank (column) in each exchange of a dispatch; set by
            `gathered`. A combine has them transposed, and backwards if there are several.
    """

    def __init__(
        self,
        expert_map: ExpertMap,
        hidden: torch.Tensor,
        index: torch.Tensor,
        weights: torch.Tensor,
        mask: torch.Tensor | None,
        tokens_SE: torch.Tensor | None = None,
    ) -> None:
        self._map, self._weights = expert_map, weights
        physical_NK = expert_map.physical_experts(index, mask, tokens_SE)
        self.counts, token_X, self._row_NK = permutation_by_expert(physical_NK, expert_map.num_physical)
        self.rows = hidden.new_empty(len(token_X), hidden.shape[1])
        gather_rows(hidden, token_X, self.rows)

    def gathered(self, counts_RP: torch.Tensor) -> None:
        """Takes the `counts` of every rank."""
        self._counts_RP = counts_RP.numpy()
        self.sizes_SRR: IntArray = sum_by_rank(self._counts_RP, self._map.first_R)[None]

    def dispatch(self, exchange: ExchangeStep) -> torch.Tensor:
        """Returns the rows (X, H) that arrive for this rank's experts, by sender and then by slot."""
        return exchange_rows(exchange, self.rows, self.sizes_SRR[0], self._map.rank)

    def compute(self, rows: torch.Tensor, experts: Any) -> torch.Tensor:
        """Returns (X, H), the local experts' outputs for the rows that arrived."""
        slots_X = np.repeat(self._map.arrival_slots, self._counts_RP[:, self._map.local].ravel())
        return apply_experts(experts, rows, torch.from_numpy(slots_X).to(rows.device))

    def combine(self, answers: torch.Tensor, exchange: ExchangeStep) -> torch.Tensor:
        """Returns the answers (X, H) to this rank's rows, from each rank's answers to the rows that arrived there."""
        return exchange_rows(exchange, answers, self.sizes_SRR[0].T, self._map.rank)

    def aggregate(self, answers: torch.Tensor) -> torch.Tensor:
        """Returns (N, H): what `combine` returned, weighted and summed by token."""
        return weighted_sum(answers, self._row_NK, self._weights)


class RowPerRank:
    """Layout of one row per (token, rank), however many of the token's experts the rank holds. Rows are sorted by rank.

    The receiving rank answers with the weighted sum over these experts. This sends fewer bytes than `RowPerExpert`, and takes
    sums in another sequence. A row also carries the token's weights and physical experts (`MessageFormat`).

    Args:
        expert_map, hidden, index, weights, mask, tokens_SE: as in `RowPerExpert`.

    Attributes:
        rows: (X, row_bytes) uint8, the rows to send.
        counts: (R,) int64, number of rows for every rank. Ranks gather it before they send.
        rank_NK: (N, K) int64, the rank that computes every choice; R where the token needs no experts.
        sizes_SRR: as in `RowPerExpert`.
    """

    def __init__(
        self,
        expert_map: ExpertMap,
        hidden: torch.Tensor,
        index: torch.Tensor,
        weights: torch.Tensor,
        mask: torch.Tensor | None,
        tokens_SE: torch.Tensor | None = None,
    ) -> None:
        self._map, self.format = expert_map, MessageFormat(hidden.shape[1], index.shape[1], hidden.dtype)
        physical_NK = expert_map.physical_experts(index, mask, tokens_SE)
        self.rank_NK = expert_map.rank_P[physical_NK]
        self.counts, _, token_X, self._row_NK = permutation_by_rank(self.rank_NK, expert_map.ranks)
        self.rows = self.format.pack(hidden, weights, physical_NK, token_X)

    def gathered(self, counts_RR: torch.Tensor) -> None:
        """Takes the `counts` of every rank."""
        self.sizes_SRR: IntArray = counts_RR.numpy()[None]

    def dispatch(self, exchange: ExchangeStep) -> torch.Tensor:
        """Returns the rows (X, row_bytes) that arrive for this rank's experts."""
        return exchange_rows(exchange, self.rows, self.sizes_SRR[0], self._map.rank)

    def received(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns hidden states (X, H), weights (X, K) and slots (X, K), -1 for other ranks', of the rows that arrived."""
        hidden_X, weights_XK, physical_XK = self.format.parts(rows)
        return hidden_X, weights_XK, self._map.local_slots(physical_XK)

    def compute(self, rows: torch.Tensor, experts: Any) -> torch.Tensor:
        """Returns (X, H), for every row that arrived the weighted sum of the outputs of its local experts."""
        hidden_X, weights_XK, slots_XK = self.received(rows)
        here_XK = slots_XK >= 0
        slots_Q = slots_XK[here_XK]
        hidden_Q = hidden_X.new_empty(len(slots_Q), hidden_X.shape[1])
        gather_rows(hidden_X, here_XK.nonzero()[:, 0], hidden_Q)
        answer_XK = torch.full(slots_XK.shape, -1, device=rows.device)
        answer_XK[here_XK] = torch.arange(len(slots_Q), device=rows.device)
        return weighted_sum(apply_experts(experts, hidden_Q, slots_Q), answer_XK, weights_XK)

    def combine(self, answers: torch.Tensor, exchange: ExchangeStep) -> torch.Tensor:
        """Returns the sums (X, H) for this rank's rows, from each rank's answers to the rows that arrived there."""
        return exchange_rows(exchange, answers, self.sizes_SRR[0].T, self._map.rank)

    def aggregate(self, answers: torch.Tensor) -> torch.Tensor:
        """Returns (N, H): what `combine` returned, summed by token."""
        return weighted_sum(answers, self._row_NK)


def exchange_rows(exchange: ExchangeStep, rows: torch.Tensor, sizes_RR: IntArray, rank: int) -> torch.Tensor:
    """Returns what arrives, by rank, if each rank sends each other as many of its rows as sizes_RR (R, R) says, by rank."""
    out_sizes, in_sizes = sizes_RR[rank].tolist(), sizes_RR[:, rank].tolist()
    arrived = rows.new_empty(sum(in_sizes), rows.shape[1])
    sends, recvs = (
        tensor.view(torch.uint8).split_with_sizes(sizes) for tensor, sizes in ((rows, out_sizes), (arrived, in_sizes))
    )
    recvs[rank].copy_(sends[rank])
    exchange(sends, recvs)
    return arrived


def apply_experts(experts: Any, rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Returns an experts module's answer to each row (X, H) by the expert in its slot (X,), unweighted, in the rows' dtype."""
    if len(rows) == 0:
        return rows
    answers: torch.Tensor = experts(rows, slots[:, None], rows.new_ones(len(rows), 1))
    return answers.view(rows.shape).to(rows.dtype)  # which the other ranks expect
