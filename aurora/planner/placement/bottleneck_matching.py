"""Bottleneck matching: the perfect matching whose largest weight is smallest."""

import numpy as np
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import maximum_bipartite_matching

from aurora.types.arrays import FloatArray, IntArray


def bottleneck_matching(weight_GJ: FloatArray) -> IntArray:
    """Returns the perfect matching whose largest weight is the smallest possible.

    Bisects over the distinct weights and matches with Hopcroft-Karp. Optimal; ties are broken the same way every time.

    Args:
        weight_GJ: (n, n) float64, finite.

    Returns:
        (n,) int64, the column matched to each row.

    Source:
        Aurora (arXiv:2410.17043) §6.2, case II.
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
    """Returns a perfect matching of weights up to `level`, or None if there is none."""
    match = maximum_bipartite_matching(csr_matrix(weight_GJ <= level), perm_type="column")
    return None if (match < 0).any() else np.asarray(match, dtype=np.int64)
