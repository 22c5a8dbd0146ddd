"""Replica selection at run time: which replica of an expert serves each token.

Two rules. *Proportional*: each rank splits its own tokens over an expert's replicas by their shares. *Local first*: replicas
take their shares of all ranks' tokens, and a rank's own replicas take its tokens first, which needs all ranks' counts.
Both give `until_EM`: how many of this rank's tokens of an expert go to its first 1, 2, ... replicas.

Axes: X choices of tokens, E experts, M replicas of an expert, S ranks that hold tokens. On a CUDA device with Triton a kernel
does the local-first rule, elsewhere torch; both give what the intervals of `aurora.planner.replication.token_split` say.
"""

import numpy as np
import torch
from torch import nn

from aurora.planner.replication.token_split import token_split
from aurora.runtime.token_permutation import uses_triton
from aurora.types.arrays import IntArray


def select_replicas(expert_X: torch.Tensor, counts_E: torch.Tensor, until_EM: torch.Tensor) -> torch.Tensor:
    """Assigns each choice of an expert to one of the expert's replicas: the first choices to the first replica, and so on.

    Args:
        expert_X: (X,) int64, the expert of every choice.
        counts_E: (E,) int64, how often each expert is chosen.
        until_EM: (E, M), how many choices of each expert go to its first 1, 2, ... replicas.

    Returns:
        (X,) int64, the replica of every choice, from 0 to M - 1.
    """
    by_expert = torch.argsort(expert_X, stable=True)
    sorted_X = expert_X[by_expert]
    nth_X = torch.arange(len(expert_X), device=expert_X.device) - (counts_E.cumsum(0) - counts_E)[sorted_X]
    replica_X = torch.empty_like(expert_X)
    replica_X[by_expert] = (nth_X[:, None] >= until_EM[sorted_X, :-1]).sum(dim=1)
    return replica_X


def proportional(counts_E: torch.Tensor, share_until_EM: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """Returns (E, M) `until_EM` of one rank's own tokens, by the proportional rule.

    The sums over all ranks are as `aurora.planner.placement.cost_model` counts them.

    Args:
        counts_E: (E,) int64, this rank's tokens of every expert.
        share_until_EM: (E, M) float64, running sum of the shares of an expert's replicas.
        rank, ranks: this rank, and the number of ranks; rounding depends on the rank.
    """
    return torch.floor(share_until_EM * counts_E[:, None] + (rank + 0.5) / ranks)


class LocalFirst(nn.Module):
    """The local-first rule of one layer, with its replicas as (E, M) tables, by expert and then by rank.

    Args:
        slots_G: for every rank, the experts in its slots.
        rank: the rank whose tokens are dealt to replicas.
        share_G: in the shape of `slots_G`, the part of its expert's load that each slot takes; None: equal parts.
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

        Experts with fewer than M replicas have replicas without tokens at the end of their row.

        Args:
            tokens_SE: (S, E) int64, every rank's tokens of every expert.
        """
        tables = self.rank_EM, self.from_EM, self.upto_EM, self.whole_E, self.phase_E
        if uses_triton(tokens_SE):
            from aurora.runtime import permutation_triton

            with torch.cuda.device(tokens_SE.device):
                return permutation_triton.local_first(tokens_SE, self.rank, *tables)
        return local_first(tokens_SE, self.rank, *tables)


def local_first(
    tokens_SE: torch.Tensor,
    rank: int,
    rank_EM: torch.Tensor,
    from_EM: torch.Tensor,
    upto_EM: torch.Tensor,
    whole_E: torch.Tensor,
    phase_E: torch.Tensor,
) -> torch.Tensor:
    """Returns (E, M) int64 `until_EM` of one rank's tokens by the local-first rule, in torch; see `LocalFirst.forward`.

    Args:
        tokens_SE: (S, E) int64, every rank's tokens of every expert.
        rank: the rank whose tokens are dealt to replicas.
        rank_EM: (E, M) the rank that holds each replica.
        from_EM, upto_EM, whole_E, phase_E: start and stop (E, M) of each replica's interval, units and offsets (E,), as
            start_X, stop_X, whole_E and phase_E of `TokenSplit`.

    Source: Lazarus Alg. 1 (arXiv:2407.04656).
    """
    load_E1, whole_E1, phase_E1 = tokens_SE.sum(dim=0)[:, None], whole_E[:, None], phase_E[:, None]
    capacity_EM = (load_E1 * upto_EM + phase_E1) // whole_E1 - (load_E1 * from_EM + phase_E1) // whole_E1
    local_EM = torch.minimum(capacity_EM, tokens_SE.T.gather(1, rank_EM))
    capacity_EM = capacity_EM - local_EM
    until_EM = capacity_EM.cumsum(dim=1)
    own_EM = local_EM * (rank_EM == rank)
    over_E = tokens_SE[rank] - own_EM.sum(dim=1)
    begin_E = tokens_SE[:rank].sum(dim=0) - (local_EM * (rank_EM < rank)).sum(dim=1)
    from_E1, upto_E1 = begin_E[:, None], (begin_E + over_E)[:, None]
    rows_EM = own_EM + (torch.minimum(until_EM, upto_E1) - torch.maximum(until_EM - capacity_EM, from_E1)).clamp(min=0)
    return rows_EM.cumsum(dim=1)
