"""Token split: how a layer's tokens are divided over the replicas of their experts, in whole tokens and alike on every rank.

Each replica takes an interval of its expert's tokens. `aurora.moe.expert_map` cuts a batch's tokens by these
intervals, a rank's own replicas first. Source: Lazarus (arXiv:2407.04656) Alg. 1; remaining tokens are divided by the sum of
all residual shares, of which the printed sum leaves one out.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

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
