"""Local-first rule: divides an expert's tokens of all ranks over its replicas; replicas take tokens of their own rank first.

It runs as a kernel on a CUDA device with Triton, elsewhere in torch. Both cut an expert's tokens at the intervals of
`token_split`, so that every rank computes the same division. Axes are those of `aurora.moe.expert_map`. Source: Lazarus
(arXiv:2407.04656) Alg. 1; here the remaining tokens are divided by the sum of all residual shares; the paper's printed sum
leaves one out.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from aurora.moe.permutation import uses_triton
from aurora.types.arrays import FloatArray, IntArray

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
    """Returns the TokenSplit of one layer, from the experts in each rank's slots.

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
    """Divides one rank's tokens of a layer over replicas by the local-first rule.

    Args:
        slots_G: the experts in each rank's slots.
        rank: the rank.
        share_G: in the shape of `slots_G`, the part of its expert's load that each slot takes; None: equal parts.

    Attributes:
        rank_EM: (E, M) the rank that holds each replica of an expert, ascending.
        from_EM, upto_EM: (E, M) each replica's interval within 0..whole_E; an expert's load is divided into whole_E units.
        phase_E: (E,) offset added before rounding, so that single tokens of different experts do not all go to one rank.

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
        """Divides this rank's tokens over replicas; returns (E, M) int64 `until_EM`, as in `aurora.moe.expert_map`.

        M is the largest number of replicas; an expert with fewer has, at the end of its row, replicas that get no tokens.

        Args:
            tokens_SE: (S, E) number of tokens of each rank that chose each expert.
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
