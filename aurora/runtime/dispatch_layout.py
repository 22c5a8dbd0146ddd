"""Dispatch layout of a MoE layer: one row per (token, expert) pair, or one per (token, rank) when deduplicated.

A layout knows how many rows go to each rank, what the receiving rank's experts compute on them, and how their answers are
combined. Rows lie by destination rank.

Axes: N tokens, K choices of a token, E experts, M replicas of an expert, P physical experts (every replica is one), R and G
ranks, S ranks that hold tokens, X rows, Q (row, expert) pairs of arrived rows, H hidden width.
"""

from typing import Any

import numpy as np
import torch
from torch import nn

from aurora.runtime.permutation_cpu import sum_by_rank
from aurora.runtime.replica_selection import LocalFirst, proportional, select_replicas
from aurora.runtime.token_permutation import (
    MessageFormat,
    exact_dtype,
    gather_rows,
    permutation_by_expert,
    permutation_by_rank,
    weighted_sum,
)
from aurora.types.arrays import FloatArray, IntArray


class ExpertMap(nn.Module):
    """Maps experts to physical experts: one for every slot of every rank, numbered by rank and then by slot.

    Args:
        slots_G: for every rank, the experts in its slots.
        rank: this rank.
        split_EG: (E, G) which part of an expert's tokens each rank takes; None: each expert has one replica.
        local_first: True: the tokens of all ranks are split together, and a rank's own replicas take its tokens first. False:
            each rank splits its own tokens. See `aurora.runtime.replica_selection`.

    Attributes:
        num_physical: number of physical experts.
        first_R: (R + 1,) rank g has the physical experts first_R[g] to first_R[g + 1] - 1.
        local: slice of this rank's physical experts.
        arrival_slots: the local slot of every (sender, local physical expert), by sender.
        max_replicas: largest number of replicas of any expert.
        rank_P, slot_P: (P + 1,) int64, rank and slot of every physical expert; R and -1 for `num_physical`.
    """

    def __init__(
        self,
        slots_G: tuple[tuple[int, ...], ...],
        rank: int,
        split_EG: FloatArray | None = None,
        local_first: bool = False,
    ) -> None:
        super().__init__()
        self.rank, self.ranks = rank, len(slots_G)
        held_G = torch.tensor([len(slots) for slots in slots_G])
        first_G = held_G.cumsum(0) - held_G
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
        if split_EG is not None:
            until_EG = split_EG.cumsum(axis=1)
            share_until_EM = torch.from_numpy(until_EG / until_EG[:, -1:]).gather(1, rank_P[physical_EM])
        self.local_first: LocalFirst | None = None
        if local_first and most > 1:
            share_G = None if split_EG is None else tuple(tuple(split_EG[list(held), g]) for g, held in enumerate(slots_G))
            self.local_first = LocalFirst(slots_G, rank, share_G)
        slot_P = torch.arange(self.num_physical) - first_G[rank_P]
        rank_P, slot_P = (torch.cat([each, torch.tensor([none])]) for each, none in ((rank_P, self.ranks), (slot_P, -1)))
        buffers = {"physical_EM": physical_EM, "share_until_EM": share_until_EM, "rank_P": rank_P, "slot_P": slot_P}
        for name, array in buffers.items():
            self.register_buffer(name, array, persistent=False)

    physical_EM: torch.Tensor
    share_until_EM: torch.Tensor
    rank_P: torch.Tensor
    slot_P: torch.Tensor

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

    def sizes(self, counts_RP: torch.Tensor) -> IntArray:
        """Returns (R, R) how many rows each rank (row) sends to each rank (column), from the `counts` of every rank."""
        sizes_RR: IntArray = sum_by_rank(counts_RP.numpy(), self._map.first_R)
        return sizes_RR

    def compute(self, rows: torch.Tensor, counts_RP: torch.Tensor, experts: Any) -> torch.Tensor:
        """Returns (X, H), the local experts' outputs for arrived rows (X, H), which lie by sender and then by slot."""
        slots_X = np.repeat(self._map.arrival_slots, counts_RP.numpy()[:, self._map.local].ravel())
        return _apply(experts, rows, torch.from_numpy(slots_X).to(rows.device))

    def combine(self, answers: torch.Tensor) -> torch.Tensor:
        """Returns (N, H): the experts' outputs `answers` (X, H) for this rank's rows, weighted and summed by token."""
        return weighted_sum(answers, self._row_NK, self._weights)


class RowPerRank:
    """Layout of one row per (token, rank), however many of the token's experts the rank holds; arguments as in `RowPerExpert`.

    The receiving rank answers with the weighted sum over these experts. This sends fewer bytes than `RowPerExpert`, and takes
    sums in another sequence. A row also carries the token's weights and slots (`MessageFormat`).

    Attributes:
        rows: (X, row_bytes) uint8, the rows to send.
        counts: (R,) int64, number of rows for every rank. Ranks gather it before they send.
        rank_NK: (N, K) int64, the rank that computes every choice; R where the token needs no experts.
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
        self._format = MessageFormat(hidden.shape[1], index.shape[1], hidden.dtype)
        physical_NK = expert_map.physical_experts(index, mask, tokens_SE)
        self.rank_NK = rank_NK = expert_map.rank_P[physical_NK]
        self.counts, rank_X, token_X, self._row_NK = permutation_by_rank(rank_NK, expert_map.ranks)

        self.rows = self._format.new(len(token_X), hidden.device)
        hidden_X, weights_XK, slots_XK = self._format.parts(self.rows)
        gather_rows(hidden, token_X, hidden_X)
        gather_rows(weights.to(exact_dtype(hidden.dtype)), token_X, weights_XK)
        elsewhere_XK = rank_NK.index_select(0, token_X) != rank_X[:, None]
        slots_XK.copy_(expert_map.slot_P[physical_NK].index_select(0, token_X).masked_fill_(elsewhere_XK, -1))

    def sizes(self, counts_RR: torch.Tensor) -> IntArray:
        """Returns (R, R) how many rows each rank (row) sends to each rank (column), from the `counts` of every rank."""
        sizes_RR: IntArray = counts_RR.numpy()
        return sizes_RR

    def compute(self, rows: torch.Tensor, counts_RR: torch.Tensor, experts: Any) -> torch.Tensor:
        """Returns (X, H), for every arrived row (X, row_bytes) the weighted sum of the outputs of its local experts."""
        hidden_X, weights_XK, slots_XK = self._format.parts(rows)
        here_XK = slots_XK >= 0
        slots_Q = slots_XK[here_XK].long()
        hidden_Q = hidden_X.new_empty(len(slots_Q), hidden_X.shape[1])
        gather_rows(hidden_X, here_XK.nonzero()[:, 0], hidden_Q)
        answer_XK = torch.full(slots_XK.shape, -1, device=rows.device)
        answer_XK[here_XK] = torch.arange(len(slots_Q), device=rows.device)
        return weighted_sum(_apply(experts, hidden_Q, slots_Q), answer_XK, weights_XK)

    def combine(self, answers: torch.Tensor) -> torch.Tensor:
        """Returns (N, H): the sums `answers` (X, H) that came back for this rank's rows, added up by token."""
        return weighted_sum(answers, self._row_NK)


def _apply(experts: Any, rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """(X, H) the experts module's answer to each row (X, H) by the expert in its slot (X,), unweighted, in the rows' dtype."""
    if len(rows) == 0:
        return rows
    answers: torch.Tensor = experts(rows, slots[:, None], rows.new_ones(len(rows), 1))
    return answers.view(rows.shape).to(rows.dtype)  # which the other ranks expect
