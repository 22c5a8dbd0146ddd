"""Co-activation: counts how often tokens choose two experts together."""

from itertools import product

import numpy as np

from aurora.types.arrays import IntArray


def distinct_tokens(experts_UK: IntArray, source_U: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Merges the U tokens that have the same experts and the same source rank into V distinct tokens.

    Args:
        experts_UK: (U, K) int64, the experts of each token.
        source_U: (U,) int64, its source rank.

    Returns:
        (experts_VK, source_V, count_V), int64: (V, K) the experts of each distinct token in rising order, (V,) its source rank
        and (V,) the number of tokens merged into it.
    """
    ranked_UX = np.column_stack([source_U, np.sort(experts_UK.astype(np.int64), axis=1)])
    rows_VX, count_V = np.unique(ranked_UX, axis=0, return_counts=True)
    return rows_VX[:, 1:], rows_VX[:, 0], count_V


def coactivation_counts(experts_VK: IntArray, source_V: IntArray, count_V: IntArray, experts: int, gpus: int) -> IntArray:
    """Returns (S, E, E) int64: tokens of each source that choose both experts; the diagonal counts the tokens of each expert.

    experts_VK, source_V, count_V: as `distinct_tokens` returns them.
    """
    counts_SX = np.zeros((gpus, experts * experts), dtype=np.int64)
    for source in range(gpus):
        own_V = source_V == source
        for a_V, b_V in product(experts_VK[own_V].T, repeat=2):
            pairs = np.bincount(a_V * experts + b_V, weights=count_V[own_V], minlength=experts * experts)
            counts_SX[source] += pairs.astype(np.int64)
    return counts_SX.reshape(gpus, experts, experts)
