"""`plan.replicas.dispatch` on tensors: where each expert's tokens of this rank are cut, so that a rank's own replicas come
first.

On a CUDA device with Triton its kernel does the work, elsewhere torch; both give what the plan's function gives.
"""

import numpy as np
import torch
from torch import nn

from aurora.planner.replication.token_split import holders
from aurora.runtime.token_kernels import on_triton
from aurora.types.arrays import IntArray


class ReplicaSelection(nn.Module):
    """The replicas of a layer, by expert and then by rank, as (E, M) tables; where an expert has fewer than M, with parts of
    nothing.

    slots_G: the experts that every rank holds. share_G: which part of its expert's load each slot takes; None: equal parts.
    """

    def __init__(
        self, slots_G: tuple[tuple[int, ...], ...], rank: int, share_G: tuple[tuple[float, ...], ...] | None = None
    ) -> None:
        super().__init__()
        held = holders(slots_G, share_G)
        count_E = np.diff(held.first_E, append=len(held.expert_X))
        nth_X = np.arange(len(held.expert_X)) - np.repeat(held.first_E, count_E)
        self.rank = rank

        def table(values_X: IntArray, rest_E: IntArray) -> torch.Tensor:
            table_EM = np.repeat(rest_E[:, None], int(count_E.max()), axis=1)
            table_EM[held.expert_X, nth_X] = values_X
            return torch.from_numpy(table_EM)

        self.register_buffer("rank_EM", table(held.rank_X, np.zeros_like(count_E)), persistent=False)
        self.register_buffer("from_EM", table(held.from_X, held.whole_E), persistent=False)
        self.register_buffer("upto_EM", table(held.upto_X, held.whole_E), persistent=False)
        self.register_buffer("whole_E", torch.from_numpy(held.whole_E), persistent=False)
        self.register_buffer("phase_E", torch.from_numpy(held.phase_E), persistent=False)

    rank_EM: torch.Tensor
    from_EM: torch.Tensor
    upto_EM: torch.Tensor
    whole_E: torch.Tensor
    phase_E: torch.Tensor

    def forward(self, tokens_SE: torch.Tensor) -> torch.Tensor:
        """(E, M) int64: how many of this rank's tokens go to each expert's first 1, 2, ... replicas, given those of all ranks,
        tokens_SE (S, E) int64."""
        tables = self.rank_EM, self.from_EM, self.upto_EM, self.whole_E, self.phase_E
        if on_triton(tokens_SE):
            from aurora.runtime import triton_kernels

            with torch.cuda.device(tokens_SE.device):
                return triton_kernels.local_first(tokens_SE, self.rank, *tables)
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
    """See `ReplicaSelection.forward`. Source: Lazarus Alg. 1 (arXiv:2407.04656)."""
    load_E1, whole_E1, phase_E1 = tokens_SE.sum(dim=0)[:, None], whole_E[:, None], phase_E[:, None]
    room_EM = (load_E1 * upto_EM + phase_E1) // whole_E1 - (load_E1 * from_EM + phase_E1) // whole_E1
    local_EM = torch.minimum(room_EM, tokens_SE.T.gather(1, rank_EM))
    room_EM = room_EM - local_EM
    until_EM = room_EM.cumsum(dim=1)
    own_EM = local_EM * (rank_EM == rank)
    over_E = tokens_SE[rank] - own_EM.sum(dim=1)
    begin_E = tokens_SE[:rank].sum(dim=0) - (local_EM * (rank_EM < rank)).sum(dim=1)
    from_E1, upto_E1 = begin_E[:, None], (begin_E + over_E)[:, None]
    rows_EM = own_EM + (torch.minimum(until_EM, upto_E1) - torch.maximum(until_EM - room_EM, from_E1)).clamp(min=0)
    return rows_EM.cumsum(dim=1)
