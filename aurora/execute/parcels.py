"""What ranks send one another for a batch of tokens in a MoE layer: a row for every choice, or one for every rank.

Either knows how many rows go where, what the receiver's experts do with them, and how the answers add up. Rows lie by rank.
"""

from typing import Any

import torch
from torch import nn

from aurora.execute.kernels import Packing, exact_dtype, gather_rows, weighted_sum


class Seats(nn.Module):
    """Which rank and slot each expert has. slots_G: the experts that every rank holds, each on one rank."""

    def __init__(self, slots_G: tuple[tuple[int, ...], ...], rank: int) -> None:
        super().__init__()
        self.rank, self.ranks = rank, len(slots_G)
        held = torch.tensor([expert for slots in slots_G for expert in slots])
        held_G = torch.tensor([len(slots) for slots in slots_G])
        first_G = held_G.cumsum(0) - held_G
        self.experts = len(held)
        self.rank_of_place = torch.arange(self.ranks).repeat_interleave(held_G)  # places go by (rank, slot)
        self.mine = slice(int(first_G[rank]), int(first_G[rank] + held_G[rank]))  # this rank's places
        self.slots_RE = torch.arange(len(slots_G[rank])).repeat(self.ranks)  # here, once for every sender
        place_E = torch.empty(self.experts, dtype=torch.long)
        place_E[held] = torch.arange(self.experts)
        rank_E = self.rank_of_place[place_E]
        for name, array in (("place_E", place_E), ("rank_E", rank_E), ("slot_E", place_E - first_G[rank_E])):
            self.register_buffer(name, array, persistent=False)

    place_E: torch.Tensor
    rank_E: torch.Tensor
    slot_E: torch.Tensor


class EveryChoice:
    """A row for every (token, choice): its hidden state, in the order of places. Weights are applied where the token is.

    hidden (N, H), index and weights (N, K), mask (N,) bool tells which tokens need experts, None: all. counts (E,) int64:
    rows for each place.
    """

    def __init__(
        self, seats: Seats, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, mask: torch.Tensor | None
    ) -> None:
        self._seats, self._weights = seats, weights
        place = seats.place_E.index_select(0, index.flatten())
        if mask is not None:
            place = torch.where(mask.repeat_interleave(index.shape[1]), place, seats.experts)
        self.counts = torch.bincount(place, minlength=seats.experts + 1)[: seats.experts]
        choice = torch.argsort(place, stable=True)
        if mask is not None:
            choice = choice[: int(self.counts.sum())]
        self._row_NK = torch.full(index.shape, -1, device=index.device)
        self._row_NK.view(-1).scatter_(0, choice, torch.arange(len(choice), device=choice.device))
        self.rows = hidden.new_empty(len(choice), hidden.shape[1])
        gather_rows(hidden, choice // index.shape[1], self.rows)

    def sizes(self, counts_RE: torch.Tensor) -> list[list[int]]:
        """(R, R) rows from each rank to each, from what all ranks count."""
        sizes_RR = counts_RE.new_zeros(self._seats.ranks, self._seats.ranks)
        sizes: list[list[int]] = sizes_RR.index_add_(1, self._seats.rank_of_place, counts_RE).tolist()
        return sizes

    def run(self, rows: torch.Tensor, counts_RE: torch.Tensor, experts: Any) -> torch.Tensor:
        """The answers (P, H) to the rows (P, H) that came by rank, then by slot."""
        slots = self._seats.slots_RE.repeat_interleave(counts_RE[:, self._seats.mine].flatten())
        return _run(experts, rows, slots.to(rows.device))

    def combine(self, answers: torch.Tensor) -> torch.Tensor:
        """(N, H): the answers to this rank's rows, weighted and summed by token."""
        return weighted_sum(answers, self._row_NK, self._weights)


class OncePerRank:
    """A row for every (token, rank) however many of its experts sit there; the rank answers with their weighted sum.

    Fewer bytes than a row for every choice: by how much depends on which experts a token chooses together. Sums are taken in
    another order than by `EveryChoice`. A row carries the token's weights and slots too (`Packing`). counts (R,) int64: rows
    for each rank.
    """

    def __init__(
        self, seats: Seats, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, mask: torch.Tensor | None
    ) -> None:
        self._packing = Packing(hidden.shape[1], index.shape[1], hidden.dtype)
        rank_NK = seats.rank_E[index]
        if mask is not None:
            rank_NK = rank_NK.masked_fill(~mask[:, None], seats.ranks)
        goes_NR = torch.zeros(len(index), seats.ranks + 1, dtype=torch.bool, device=index.device)
        goes_NR.scatter_(1, rank_NK, True)
        rank_P, token_P = goes_NR[:, : seats.ranks].T.nonzero(as_tuple=True)
        self.counts = torch.bincount(rank_P, minlength=seats.ranks)

        row_NR = torch.full(goes_NR.shape, -1, device=index.device)
        row_NR[token_P, rank_P] = torch.arange(len(token_P), device=index.device)
        self._row_NK = row_NR[:, : seats.ranks].topk(min(seats.ranks, index.shape[1])).values  # the -1 come last

        self.rows = self._packing.new(len(token_P), hidden.device)
        hidden_P, weights_PK, slots_PK = self._packing.parts(self.rows)
        gather_rows(hidden, token_P, hidden_P)
        gather_rows(weights.to(exact_dtype(hidden.dtype)), token_P, weights_PK)
        there_PK = rank_NK.index_select(0, token_P) == rank_P[:, None]
        slots_PK.copy_(torch.where(there_PK, seats.slot_E[index].index_select(0, token_P), -1))

    def sizes(self, counts_RR: torch.Tensor) -> list[list[int]]:
        """(R, R) rows from each rank to each, from what all ranks count."""
        sizes: list[list[int]] = counts_RR.tolist()
        return sizes

    def run(self, rows: torch.Tensor, counts_RR: torch.Tensor, experts: Any) -> torch.Tensor:
        """The answers (P, H) to a message of P rows: for each the sum over its experts here."""
        hidden_P, weights_PK, slots_PK = self._packing.parts(rows)
        there_PK = slots_PK >= 0
        slots_Q = slots_PK[there_PK].long()
        hidden_Q = hidden_P.new_empty(len(slots_Q), hidden_P.shape[1])
        gather_rows(hidden_P, there_PK.nonzero()[:, 0], hidden_Q)
        at_PK = torch.full(slots_PK.shape, -1, device=rows.device)
        at_PK[there_PK] = torch.arange(len(slots_Q), device=rows.device)
        return weighted_sum(_run(experts, hidden_Q, slots_Q), at_PK, weights_PK)

    def combine(self, answers: torch.Tensor) -> torch.Tensor:
        """(N, H): the answers to this rank's rows, summed by token."""
        return weighted_sum(answers, self._row_NK)


def _run(experts: Any, rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """(P, H): the experts module's answer to each row (P, H) by the expert in its slot (P,), without a weight."""
    if len(rows) == 0:
        return rows
    done: torch.Tensor = experts(rows, slots[:, None], rows.new_ones(len(rows), 1))
    return done
