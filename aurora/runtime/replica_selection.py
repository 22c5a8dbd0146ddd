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
    """Returns (X,) the replica of every choice: an expert's first choices go to its first replica, and so on.

    Args:
        expert_X: (X,) int64, the expert of every choice.
        counts_E: (E,) int64, how often each expert is chosen.
        until_EM: (E, M), how many choices of each expert go to its first 1, 2, ... replicas.
    """
    by_expert = torch.argsort(expert_X, stable=True)
    sorted_X = expert_X[by_expert]
    nth_X = torch.arange(len(expert_X), device=expert_X.device) - (counts_E.cumsum(0) - counts_E)[sorted_X]
    replica_X = torch.empty_like(expert_X)
    replica_X[by_expert] = (nth_X[:, None] >= until_EM[sorted_X, :-1]).sum(dim=1)
    return replica_X


def proportional(counts_E: torch.Tensor, share_until_EM: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """Returns (E, M) `until_EM` of one rank's own tokens, by the proportional rule; rounding depends on the rank.

    The sums over all ranks are as `aurora.planner.placement.cost_model` counts them. `share_until_EM` are running sums of the
    shares of an expert's replicas.
    """
    return torch.floor(share_until_EM * counts_E[:, None] + (rank + 0.5) / ranks)


class LocalFirst(nn.Module):
    """The local-first rule of one layer for one rank's tokens; slots take `share_G` of an expert's load, None: equal parts.

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
        """Returns (E, M) int64 `until_EM` of this rank's tokens, from every rank's tokens of every expert (S, E).

        Experts with fewer than M replicas have replicas without tokens at the end of their row.
        """
        if uses_triton(tokens_SE):
            from aurora.runtime import permutation_triton

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
