"""Local-first rule: divides an expert's tokens of all ranks over its replicas; replicas take tokens of their own rank first.

Axes are those of `aurora.moe.expert_map`. Source: Lazarus (arXiv:2407.04656) Alg. 1; here the tokens that remain are divided by
the sum of all residual shares, where the paper's printed sum leaves one out.
"""

import numpy as np
import torch
from torch import nn

from aurora.types.arrays import FloatArray

RESOLUTION = 1 << 20  # uneven splits are whole multiples of 1 / RESOLUTION


class LocalFirst(nn.Module):
    """Divides one rank's tokens of a layer over replicas by the local-first rule.

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

    Source: Lazarus Alg. 1 (arXiv:2407.04656).
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
        """Divides this rank's tokens over replicas; returns (E, M) int64 `until_EM`, as in `aurora.moe.expert_map`.

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
