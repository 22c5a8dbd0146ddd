"""Expert map of a MoE layer: which rank and slot serves each choice of a token, replicas included.

A choice is one of the K experts that the router picked for a token. Two rules divide an expert's tokens over its replicas.
*Proportional*: each rank divides its own tokens by the replicas' shares. *Local first*: the tokens of all ranks together are
divided by the shares, and a rank's own replicas take its own tokens first; this needs all ranks' counts. Both rules return
`until_EM`, running sums: of this rank's tokens for an expert, how many go to its first replica, to its first two, and so on.
With 10 tokens and three replicas, [4, 7, 10] sends 4, 3 and 3 of them.

Axes: N tokens, K choices of a token, X all choices, E experts, M replicas of an expert, P physical experts (every replica is
one), R and G ranks, S ranks that hold tokens. The local-first rule runs as a kernel on a CUDA device with Triton, elsewhere in
torch. Both cut an expert's tokens at the intervals of `token_split`, so that every rank finds the same division. Source:
Lazarus (arXiv:2407.04656) Alg. 1; here the tokens that remain are divided by the sum of all residual shares, where the paper's
printed sum leaves one out.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from aurora.moe.permutation import uses_triton
from aurora.types import Hierarchy
from aurora.types.arrays import FloatArray, IntArray


def select_replicas(expert_X: torch.Tensor, counts_E: torch.Tensor, until_EM: torch.Tensor) -> torch.Tensor:
    """Returns (X,) the index of the replica that serves each choice: an expert's first choices go to its replica 0, and so on.

    Args:
        expert_X: (X,) int64, the expert of every choice.
        counts_E: (E,) int64, how often each expert is chosen.
        until_EM: (E, M), running sums over an expert's replicas of the choices that each serves.
    """
    by_expert = torch.argsort(expert_X, stable=True)
    sorted_X = expert_X[by_expert]
    nth_X = torch.arange(len(expert_X), device=expert_X.device) - (counts_E.cumsum(0) - counts_E)[sorted_X]
    return torch.empty_like(expert_X).scatter_(0, by_expert, (nth_X[:, None] >= until_EM[sorted_X, :-1]).sum(dim=1))


def proportional(counts_E: torch.Tensor, share_until_EM: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """Returns (E, M) `until_EM` of one rank's own tokens, by the proportional rule.

    Each rank rounds at another offset, so that rounding does not favour a replica. Summed over all ranks, a replica gets the
    tokens that `aurora.planner.placement.cost_model` counts for it.

    Args:
        counts_E: (E,) int64, how many of this rank's tokens chose each expert.
        share_until_EM: (E, M), running sums of the shares of an expert's replicas; the last is 1.
        rank, ranks: this rank, and how many there are.
    """
    return torch.floor(share_until_EM * counts_E[:, None] + (rank + 0.5) / ranks)


RESOLUTION = 1 << 20  # uneven splits are whole multiples of 1 / RESOLUTION


@dataclass(frozen=True)
class TokenSplit:
    """The replicas of a layer, sorted by expert and then by rank; each takes an interval of the tokens of its expert.

    Of n tokens of expert e, replica x takes the tokens from (n * start_X[x] + phase_E[e]) // whole_E[e] up to, but not
    including, (n * stop_X[x] + phase_E[e]) // whole_E[e].
    """

    expert_X: IntArray
    rank_X: IntArray
    start_X: IntArray  # the replica's interval within 0..whole_E[expert]
    stop_X: IntArray
    first_E: IntArray  # where each expert's replicas begin
    whole_E: IntArray  # the units that an expert is divided into
    phase_E: IntArray  # an offset that keeps single tokens of different experts from all going to one rank


def token_split(slots_G: Sequence[Sequence[int]], split_G: Sequence[Sequence[float]] | None = None) -> TokenSplit:
    """Returns the token split of one layer.

    Args:
        slots_G: the experts in each rank's slots; every expert is in at least one. A rank that holds an expert twice takes
            twice as many of its tokens.
        split_G: in the shape of `slots_G`, the part of its expert's load that each slot takes; None: equal parts.
    """
    expert_X, rank_X, part_X = _parts(slots_G, split_G)
    first_E = np.flatnonzero(np.diff(expert_X, prepend=-1))
    count_E = np.diff(first_E, append=len(expert_X))
    stop_X = part_X.cumsum()
    stop_X -= np.repeat(stop_X[first_E] - part_X[first_E], count_E)
    if split_G is not None:  # whole units: one per replica where the parts are equal, else RESOLUTION in all
        even_E = np.maximum.reduceat(part_X, first_E) == np.minimum.reduceat(part_X, first_E)
        nth_X = np.arange(len(expert_X)) - np.repeat(first_E, count_E) + 1
        last_X = np.repeat(stop_X[first_E + count_E - 1], count_E)
        stop_X = np.where(np.repeat(even_E, count_E), nth_X, np.rint(stop_X / last_X * RESOLUTION))
    stop_X = stop_X.astype(np.int64)
    start_X = np.where(np.diff(expert_X, prepend=-1) > 0, 0, np.roll(stop_X, 1))
    whole_E = stop_X[first_E + count_E - 1]
    phase_E = whole_E * (np.arange(len(first_E)) % count_E) // count_E
    return TokenSplit(expert_X, rank_X, start_X, stop_X, first_E, whole_E, phase_E)


def _parts(
    slots_G: Sequence[Sequence[int]], split_G: Sequence[Sequence[float]] | None
) -> tuple[IntArray, IntArray, FloatArray]:
    """The expert, the rank and the part of each replica, (X,) each, sorted by expert and then by rank."""
    parts: dict[tuple[int, int], float] = {}
    for rank, held in enumerate(slots_G):
        for slot, expert in enumerate(held):
            parts[expert, rank] = parts.get((expert, rank), 0) + (1 if split_G is None else split_G[rank][slot])
    expert_X, rank_X = np.array(sorted(parts)).T
    return expert_X, rank_X, np.array([parts[pair] for pair in sorted(parts)])


class LocalFirst(nn.Module):
    """Applies the local-first rule of one layer to one rank's tokens.

    Args:
        slots_G: the experts in each rank's slots.
        rank: the rank.
        share_G: in the shape of `slots_G`, the part of its expert's load that each slot takes; None: equal parts.

    Attributes:
        rank_EM: (E, M) the rank that holds each replica of an expert, ascending.
        from_EM, upto_EM: (E, M) each replica's interval within 0..whole_E, the units that an expert's load is divided into.
        phase_E: (E,) added before cutting at a unit, so that single tokens of different experts do not all go to one rank.

    Source: Lazarus Alg. 1 (arXiv:2407.04656).
    """

    def __init__(
        self, slots_G: tuple[tuple[int, ...], ...], rank: int, share_G: tuple[tuple[float, ...], ...] | None = None
    ) -> None:
        super().__init__()
        held = token_split(slots_G, share_G)
        count_E = np.diff(held.first_E, append=len(held.expert_X))
        nth_X = np.arange(len(held.expert_X)) - np.repeat(held.first_E, count_E)
        self.rank = rank

        def table(values_X: IntArray, rest_E: IntArray) -> torch.Tensor:
            table_EM = np.repeat(rest_E[:, None], int(count_E.max()), axis=1)
            table_EM[held.expert_X, nth_X] = values_X
            return torch.from_numpy(table_EM)

        self.register_buffer("rank_EM", table(held.rank_X, np.zeros_like(count_E)), persistent=False)
        self.register_buffer("from_EM", table(held.start_X, held.whole_E), persistent=False)
        self.register_buffer("upto_EM", table(held.stop_X, held.whole_E), persistent=False)
        self.register_buffer("whole_E", torch.from_numpy(held.whole_E), persistent=False)
        self.register_buffer("phase_E", torch.from_numpy(held.phase_E), persistent=False)

    rank_EM: torch.Tensor
    from_EM: torch.Tensor
    upto_EM: torch.Tensor
    whole_E: torch.Tensor
    phase_E: torch.Tensor

    def forward(self, tokens_SE: torch.Tensor) -> torch.Tensor:
        """Returns (E, M) int64 `until_EM` of this rank's tokens.

        M is the largest number of replicas; an expert with fewer has, at the end of its row, replicas that get no tokens.

        Args:
            tokens_SE: (S, E) how many tokens of each rank chose each expert.
        """
        if uses_triton(tokens_SE):
            from aurora.moe import permutation_triton

            with torch.cuda.device(tokens_SE.device):
                return permutation_triton.local_first(tokens_SE, self)
        load_E1, whole_E1, phase_E1 = tokens_SE.sum(dim=0)[:, None], self.whole_E[:, None], self.phase_E[:, None]
        capacity_EM = (load_E1 * self.upto_EM + phase_E1) // whole_E1 - (load_E1 * self.from_EM + phase_E1) // whole_E1
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
        split_EG: (E, G) which part of an expert's tokens each rank takes; None: each expert has one replica.
        local_first: True: the local-first rule. False: the proportional rule, in which each rank splits its own tokens.
        hierarchy: the servers of the ranks, if exchanges may be hierarchical; None: all exchanges are flat. With the
            proportional rule `server_split` then makes one server serve all of a rank's tokens of an expert.

    Attributes:
        num_physical: number of physical experts.
        first_R: (R + 1,) rank g has the physical experts first_R[g] to first_R[g + 1] - 1.
        local: slice of this rank's physical experts.
        arrival_slots: this rank's slots 0, 1, ..., repeated for each sender: the sequence in which row groups arrive.
        max_replicas: largest number of replicas of any expert.
        rank_P: (P + 1,) int64, rank of every physical expert. The last entry, R, belongs to `num_physical`, which means none.
        slot_P: (P,) int64, slot of every physical expert on its rank.
        server_R: (R + 1,) int64, server of every rank; the last entry is the number of servers, for rank R, which means none.
            Without a hierarchy all ranks are on server 0.
        members: the ranks of this rank's server.
        member_R: (R + 1,) int64, index of every rank in `members`; len(members) for ranks of other servers and for none.
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
                from aurora.planner.workload.serving_gpus import server_split  # which flat all-to-alls need not

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

        None as `mask` selects all tokens.
        """
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
