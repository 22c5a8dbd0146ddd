"""What ranks send one another for a batch of tokens in a MoE layer: a row for every choice, or one for every rank.

Either knows how many rows go where, what the receiver's experts do with them, and how the answers add up. Rows lie by rank.
"""

from typing import Any

import numpy as np
import torch
from torch import nn

from aurora.runtime.replica_selection import ReplicaSelection
from aurora.runtime.token_kernels import MessageFormat, by_place, exact_dtype, gather_rows, weighted_sum
from aurora.runtime.token_permutation import rows_by_rank
from aurora.types.arrays import FloatArray


class ExpertMap(nn.Module):
    """Which rank and slot each token's expert has. slots_G: the experts that every rank holds.

    split_EG (E, G): which part of a sender's tokens each rank takes of an expert that several hold; None: each is held once.
    A place is a slot of a rank; places go by (rank, slot). local_first: parts are of all ranks' tokens together, and a rank's
    own replicas take its tokens first, which needs all ranks' counts (`plan.replicas.dispatch`).
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
        self.places = int(held_G.sum())
        self.bounds = np.array([0, *held_G.cumsum(0).tolist()])  # rank g has the places from bounds[g] on
        self.mine = slice(self.bounds[rank], self.bounds[rank + 1])
        self.slots_RP = np.tile(np.arange(len(slots_G[rank])), self.ranks)  # here, once for every sender
        rank_P = torch.arange(self.ranks).repeat_interleave(held_G)
        places_of: dict[int, list[int]] = {}
        for place, expert in enumerate(expert for slots in slots_G for expert in slots):
            places_of.setdefault(expert, []).append(place)
        self.most = max(map(len, places_of.values()))
        place_EM = torch.tensor([(own + own[-1:] * self.most)[: self.most] for _, own in sorted(places_of.items())])
        upto_EM = torch.ones(len(place_EM), self.most, dtype=torch.float64)
        if split_EG is not None:
            upto_EG = split_EG.cumsum(axis=1)
            upto_EM = torch.from_numpy(upto_EG / upto_EG[:, -1:]).gather(1, rank_P[place_EM])
        self.cuts: ReplicaSelection | None = None
        if local_first and self.most > 1:
            share_G = None if split_EG is None else tuple(tuple(split_EG[list(held), g]) for g, held in enumerate(slots_G))
            self.cuts = ReplicaSelection(slots_G, rank, share_G)
        slot_P = torch.arange(self.places) - first_G[rank_P]
        for name, array in (("place_EM", place_EM), ("upto_EM", upto_EM), ("rank_P", rank_P), ("slot_P", slot_P)):
            self.register_buffer(name, array, persistent=False)

    place_EM: torch.Tensor
    upto_EM: torch.Tensor
    rank_P: torch.Tensor
    slot_P: torch.Tensor

    def counted(self, index: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """(E,) int64: how many choices, index (N, K), each expert has, of tokens that need experts by mask (N,)."""
        return torch.bincount((index if mask is None else index[mask]).flatten(), minlength=len(self.place_EM))

    def seated(self, index: torch.Tensor, mask: torch.Tensor | None, tokens_SE: torch.Tensor | None = None) -> torch.Tensor:
        """(N, K) the place of every choice, index (N, K); `places` where mask (N,) says that the token needs no experts.

        The choices of a replicated expert are cut at the running sum of its shares, as `plan.costs.divided` counts them; own
        replicas first: as `plan.replicas.dispatch` does, given what all ranks count, tokens_SE (S, E).
        """
        if self.most == 1:
            place = self.place_EM.view(-1)[index]
        else:
            wanted = index.flatten() if mask is None else index[mask].flatten()
            by_expert = torch.argsort(wanted, stable=True)
            expert = wanted[by_expert]
            counts_E = torch.bincount(wanted, minlength=len(self.place_EM))
            nth = torch.arange(len(wanted), device=index.device) - (counts_E.cumsum(0) - counts_E)[expert]
            if self.cuts is None:
                upto_EM = torch.floor(self.upto_EM * counts_E[:, None] + (self.rank + 0.5) / self.ranks)
            else:
                assert tokens_SE is not None, "local first needs all ranks' counts"
                upto_EM = self.cuts(tokens_SE.to(index.device))
            replica = (nth[:, None] >= upto_EM[expert, :-1]).sum(dim=1)
            seats = torch.empty_like(wanted)
            seats[by_expert] = self.place_EM[expert, replica]
            place = torch.full_like(index, self.places)
            place[slice(None) if mask is None else mask] = seats.view(-1, index.shape[1])
        return place if mask is None else place.masked_fill(~mask[:, None], self.places)


class RowPerExpert:
    """A row for every (token, choice): its hidden state, in the order of places. Weights are applied where the token is.

    hidden (N, H), index and weights (N, K), mask (N,) bool tells which tokens need experts, None: all. counts (P,) int64:
    rows for each place. tokens_SE: see `ExpertMap.seated`.
    """

    def __init__(
        self,
        seats: ExpertMap,
        hidden: torch.Tensor,
        index: torch.Tensor,
        weights: torch.Tensor,
        mask: torch.Tensor | None,
        tokens_SE: torch.Tensor | None = None,
    ) -> None:
        self._seats, self._weights = seats, weights
        self.counts, token_P, self._row_NK = by_place(seats.seated(index, mask, tokens_SE), seats.places)
        self.rows = hidden.new_empty(len(token_P), hidden.shape[1])
        gather_rows(hidden, token_P, self.rows)

    def sizes(self, counts_RP: torch.Tensor) -> list[list[int]]:
        """(R, R) rows from each rank to each, from what all ranks count."""
        sizes: list[list[int]] = rows_by_rank(counts_RP.numpy(), self._seats.bounds).tolist()
        return sizes

    def run(self, rows: torch.Tensor, counts_RP: torch.Tensor, experts: Any) -> torch.Tensor:
        """The answers (P, H) to the rows (P, H) that came by rank, then by slot."""
        slots_Q = np.repeat(self._seats.slots_RP, counts_RP.numpy()[:, self._seats.mine].ravel())
        return _run(experts, rows, torch.from_numpy(slots_Q).to(rows.device))

    def combine(self, answers: torch.Tensor) -> torch.Tensor:
        """(N, H): the answers to this rank's rows, weighted and summed by token."""
        return weighted_sum(answers, self._row_NK, self._weights)


class RowPerRank:
    """A row for every (token, rank) however many of its experts sit there; the rank answers with their weighted sum.

    Fewer bytes than a row for every choice: by how much depends on which experts a token chooses together. Sums are taken in
    another order than by `RowPerExpert`. A row carries the token's weights and slots too (`MessageFormat`).
    counts (R,) int64: rows for each rank.
    """

    def __init__(
        self,
        seats: ExpertMap,
        hidden: torch.Tensor,
        index: torch.Tensor,
        weights: torch.Tensor,
        mask: torch.Tensor | None,
        tokens_SE: torch.Tensor | None = None,
    ) -> None:
        self._packing = MessageFormat(hidden.shape[1], index.shape[1], hidden.dtype)
        place_NK = seats.seated(index, mask, tokens_SE)
        rank_NK = torch.cat([seats.rank_P, seats.rank_P.new_tensor([seats.ranks])])[place_NK]
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
        slot_NK = torch.cat([seats.slot_P, seats.slot_P.new_tensor([-1])])[place_NK]
        slots_PK.copy_(torch.where(there_PK, slot_NK.index_select(0, token_P), -1))

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
