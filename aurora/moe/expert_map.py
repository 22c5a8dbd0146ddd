"""Expert map of a MoE layer: the rank and slot that computes each choice of a token, replicas included.

A choice is one of the K experts that the router picked for a token. Two rules divide an expert's tokens over its replicas.
*Proportional*: each rank divides its own tokens by the replicas' shares. *Local first*: the tokens of all ranks together are
divided by the shares, and replicas on a rank take that rank's tokens first; this needs all ranks' counts. Both rules return
`until_EM`, running sums over an expert's replicas of the number of this rank's tokens that each replica gets. With 10 tokens
and three replicas, [4, 7, 10] sends 4, 3 and 3 of them.

Axes: N tokens, K choices of a token, X all choices, E experts, M replicas of an expert, P physical experts (every replica is
one), R and G ranks, S ranks that hold tokens.
"""

import numpy as np
import torch
from torch import nn

from aurora.types import Hierarchy
from aurora.types.arrays import FloatArray

RESOLUTION = 1 << 20  # uneven splits are whole multiples of 1 / RESOLUTION


def select_replicas(expert_X: torch.Tensor, counts_E: torch.Tensor, until_EM: torch.Tensor) -> torch.Tensor:
    """Returns (X,) the index of the replica that computes each choice; an expert's choices are assigned in sequence.

    Args:
        expert_X: (X,) int64, the expert of every choice.
        counts_E: (E,) int64, how often each expert is chosen.
        until_EM: (E, M), running sums over an expert's replicas of the number of choices that each takes, as in this module.
    """
    by_expert = torch.argsort(expert_X, stable=True)
    sorted_X = expert_X[by_expert]
    nth_X = torch.arange(len(expert_X), device=expert_X.device) - (counts_E.cumsum(0) - counts_E)[sorted_X]
    return torch.empty_like(expert_X).scatter_(0, by_expert, (nth_X[:, None] >= until_EM[sorted_X, :-1]).sum(dim=1))


def proportional(counts_E: torch.Tensor, share_until_EM: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """Divides one rank's tokens over replicas by the proportional rule; returns (E, M) `until_EM`, see this module.

    Each rank rounds with another offset, so that rounding favours no replica. Summed over all ranks, a replica gets the number
    of tokens that `aurora.algorithms.placement.cost_model` counts for it.

    Args:
        counts_E: (E,) int64, how many of this rank's tokens chose each expert.
        share_until_EM: (E, M), running sums of the shares of an expert's replicas; the last is 1.
        rank, ranks: this rank, and how many there are.
    """
    return torch.floor(share_until_EM * counts_E[:, None] + (rank + 0.5) / ranks)


class LocalFirst(nn.Module):
    """Divides one rank's tokens of a layer over replicas by the local-first rule: replicas take their own rank's tokens first.

    The tokens of an expert are divided into upto_EM[e, -1] units, of which each replica takes an interval. Of n tokens, the
    first m + 1 replicas of expert e together take (n * upto_EM[e, m] + phase_E[e]) // upto_EM[e, -1], so that every rank finds
    the same division.

    Args:
        slots_G: the experts in each rank's slots; every expert is in at least one.
        rank: the rank.
        split_EG: (E, G) the part of an expert's tokens that each rank takes; None: in proportion to the rank's slots.

    Attributes:
        rank_EM: (E, M) the rank that holds each replica of an expert, ascending; then ranks whose intervals are empty.
        upto_EM: (E, M) the end of each replica's interval, in units.
        phase_E: (E,) added before cutting at a unit, so that single tokens of different experts do not all go to one rank.

    Source: Lazarus Alg. 1 (arXiv:2407.04656). Here the tokens that remain are divided by the sum of all residual shares, where
    the paper's printed sum leaves one out.
    """

    def __init__(self, slots_G: tuple[tuple[int, ...], ...], rank: int, split_EG: FloatArray | None = None) -> None:
        super().__init__()
        self.rank = rank
        experts = 1 + max(expert for slots in slots_G for expert in slots)
        held_EG = np.stack([np.bincount(np.array(slots, dtype=np.int64), minlength=experts) for slots in slots_G], axis=1)
        count_E1 = (held_EG > 0).sum(axis=1, keepdims=True)
        rank_EM = np.argsort(held_EG == 0, axis=1, kind="stable")[:, : count_E1.max()]
        part_EM = np.take_along_axis(held_EG if split_EG is None else split_EG * (held_EG > 0), rank_EM, axis=1)
        upto_EM = part_EM.cumsum(axis=1)
        if split_EG is not None:  # whole units: one for each replica where the parts are equal, else RESOLUTION in all
            nth_M = np.arange(1, rank_EM.shape[1] + 1)
            even_E1 = ((part_EM == part_EM[:, :1]) | (nth_M > count_E1)).all(axis=1, keepdims=True)
            upto_EM = np.where(even_E1, np.minimum(nth_M, count_E1), np.rint(upto_EM / upto_EM[:, -1:] * RESOLUTION))
        upto_EM, count_E = upto_EM.astype(np.int64), count_E1[:, 0]
        phase_E = upto_EM[:, -1] * (np.arange(experts) % count_E) // count_E
        for name, table in (("rank_EM", rank_EM), ("upto_EM", upto_EM), ("phase_E", phase_E)):
            self.register_buffer(name, torch.from_numpy(table), persistent=False)

    rank_EM: torch.Tensor
    upto_EM: torch.Tensor
    phase_E: torch.Tensor

    def forward(self, tokens_SE: torch.Tensor) -> torch.Tensor:
        """Divides this rank's tokens over replicas; returns (E, M) int64 `until_EM`, as in this module.

        M is the largest number of replicas; an expert with fewer has, at the end of its row, replicas that get no tokens.

        Args:
            tokens_SE: (S, E) number of tokens of each rank that chose each expert.
        """
        load_E1 = tokens_SE.sum(dim=0)[:, None]
        cut_EM = (load_E1 * self.upto_EM + self.phase_E[:, None]) // self.upto_EM[:, -1:]
        capacity_EM = cut_EM.diff(dim=1, prepend=torch.zeros_like(load_E1))
        local_EM = torch.minimum(capacity_EM, tokens_SE.T.gather(1, self.rank_EM))
        capacity_EM = capacity_EM - local_EM
        until_EM = capacity_EM.cumsum(dim=1)
        own_EM = local_EM * (self.rank_EM == self.rank)
        over_E = tokens_SE[self.rank] - own_EM.sum(dim=1)
        begin_E = tokens_SE[: self.rank].sum(dim=0) - (local_EM * (self.rank_EM < self.rank)).sum(dim=1)
        from_E1, upto_E1 = begin_E[:, None], (begin_E + over_E)[:, None]
        rows_EM = own_EM + (torch.minimum(until_EM, upto_E1) - torch.maximum(until_EM - capacity_EM, from_E1)).clamp(min=0)
        return rows_EM.cumsum(dim=1)


class ExpertMap(nn.Module):
    """Maps experts to physical experts: one for every slot of every rank, numbered by rank and then by slot.

    Args:
        slots_G: for every rank, the experts in its slots.
        rank: this rank.
        split_EG: (E, G) the part of an expert's tokens that each rank takes; None: each expert has one replica.
        local_first: True: the local-first rule. False: the proportional rule, in which each rank splits its own tokens.
        hierarchy: the servers of the ranks, if exchanges may be hierarchical; None: all exchanges are flat. With a hierarchy,
            the proportional rule sends all of a rank's tokens for an expert to one server (`server_split`).

    Attributes:
        num_physical: number of physical experts.
        first_R: (R + 1,) rank g has the physical experts first_R[g] to first_R[g + 1] - 1.
        local: slice of this rank's physical experts.
        arrival_slots: this rank's slots 0, 1, ..., repeated for each sender: the sequence in which row groups arrive.
        max_replicas: largest number of replicas of any expert.
        rank_P: (P + 1,) int64, rank of every physical expert. The last entry, R, is for `num_physical`, which stands for none.
        slot_P: (P,) int64, slot of every physical expert on its rank.
        server_R: (R + 1,) int64, server of every rank; the last entry, the number of servers, is for rank R, which stands for
            none. Without a hierarchy all ranks are on server 0.
        members: the ranks of this rank's server.
        member_R: (R + 1,) int64, index of every rank in `members`; len(members) for ranks of other servers and for rank R.
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
        physical_EM = torch.tensor([(replicas + replicas[-1:] * most)[:most] for _, replicas in sorted(replicas_of.items())])
        share_until_EM = torch.ones(len(physical_EM), most, dtype=torch.float64)
        self.local_first = None
        if local_first and most > 1:
            self.local_first = LocalFirst(slots_G, rank, split_EG)
        elif split_EG is not None:
            if hierarchy is not None:
                from aurora.algorithms.workload.serving_gpus import server_split  # which flat all-to-alls need not

                split_EG = server_split(split_EG, hierarchy.server_G)[hierarchy.server_G[rank]]
            until_EG = split_EG.cumsum(axis=1)
            share_until_EM = torch.from_numpy(until_EG / until_EG[:, -1:]).gather(1, rank_P[physical_EM])
        server_G = self.hierarchy.server_G
        self.members = np.flatnonzero(server_G == server_G[rank])
        member_R = torch.full((self.ranks + 1,), len(self.members))
        member_R[self.members] = torch.arange(len(self.members))
        buffers = {"physical_EM": physical_EM, "share_until_EM": share_until_EM, "member_R": member_R}
        buffers["slot_P"] = torch.arange(self.num_physical) - torch.from_numpy(self.first_R)[rank_P]
        buffers["rank_P"] = torch.cat([rank_P, torch.tensor([self.ranks])])
        buffers["server_R"] = torch.from_numpy(np.append(server_G, self.hierarchy.servers))
        for name, array in buffers.items():
            self.register_buffer(name, array, persistent=False)

    local_first: LocalFirst | None
    physical_EM: torch.Tensor
    share_until_EM: torch.Tensor
    rank_P: torch.Tensor
    slot_P: torch.Tensor
    server_R: torch.Tensor
    member_R: torch.Tensor

    @property
    def needs_all_counts(self) -> bool:
        """True if `physical_experts` needs the counts of all ranks."""
        return self.local_first is not None

    def count(self, index: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Returns (E,) int64: how often each expert is chosen in `index` (N, K), by the tokens that `mask` (N,) selects.

        `mask` None selects all tokens.
        """
        return torch.bincount((index if mask is None else index[mask]).flatten(), minlength=len(self.physical_EM))

    def physical_experts(
        self, index: torch.Tensor, mask: torch.Tensor | None, tokens_SE: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Returns (N, K) the physical expert of every choice; `num_physical` where the token needs no experts.

        Args:
            index: (N, K) expert of every choice.
            mask: (N,) bool, True for tokens that need experts; None: all.
            tokens_SE: (S, E) the results of `count` on all ranks; required if `needs_all_counts`.
        """
        if self.max_replicas == 1:
            physical_NK = self.physical_EM.view(-1)[index]
        else:
            experts = len(self.physical_EM)
            needed_NK = index if mask is None else torch.where(mask[:, None], index, experts)
            expert_X = needed_NK.flatten()
            counts_E = expert_X.new_zeros(experts + 1).index_add_(0, expert_X, torch.ones_like(expert_X))
            if self.local_first is None:
                until_EM = proportional(counts_E[:-1], self.share_until_EM, self.rank, self.ranks)
            else:
                assert tokens_SE is not None, "local first needs all ranks' counts"
                until_EM = self.local_first(tokens_SE.to(index.device))
            replica_X = select_replicas(expert_X, counts_E, torch.cat([until_EM, until_EM[:1]]))
            physical_NK = self.physical_EM[expert_X.clamp(max=experts - 1), replica_X].view(index.shape)
        return physical_NK if mask is None else torch.where(mask[:, None], physical_NK, self.num_physical)

    def local_slots(self, physical: torch.Tensor) -> torch.Tensor:
        """Returns, as int64 in the shape of `physical`, the slot of each physical expert; -1 if another rank holds it."""
        slots = physical.long() - int(self.local.start)
        return slots.masked_fill_((slots < 0) | (physical >= int(self.local.stop)), -1)
