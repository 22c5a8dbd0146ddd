"""Bottleneck matching: the perfect matching whose heaviest edge is lightest."""

import numpy as np
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import maximum_bipartite_matching

from aurora.types.arrays import FloatArray, IntArray


def bottleneck_matching(weight_GJ: FloatArray) -> IntArray:
    """(G,) int64: the column matched to each row, so that the largest weight used is the smallest possible.

    Hopcroft-Karp under bisection over the distinct weights. Optimal; ties resolve the same way every time.
    weight_GJ (n, n), finite. Source: Aurora §6.2, case II.
    """
    levels = np.unique(weight_GJ)
    low, high = 0, len(levels) - 1
    best = _within(weight_GJ, levels[high])
    assert best is not None, "a complete bipartite graph has a perfect matching"
    while low < high:
        middle = (low + high) // 2
        found = _within(weight_GJ, levels[middle])
        if found is None:
            low = middle + 1
        else:
            best, high = found, middle
    return best


def _within(weight_GJ: FloatArray, level: float) -> IntArray | None:
    match = maximum_bipartite_matching(csr_matrix(weight_GJ <= level), perm_type="column")
    return None if (match < 0).any() else np.asarray(match, dtype=np.int64)
