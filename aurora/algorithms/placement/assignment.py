"""ASSIGN: strategies that assign one model's groups of experts to GPUs.

Each strategy takes (costs, rng), the LayerCosts of a layer's groups and a random generator, and returns group_G: (G,) int64,
the group that each GPU holds.
"""

from collections.abc import Callable

import numpy as np
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import maximum_bipartite_matching

from aurora.algorithms.placement.cost_model import LayerCosts
from aurora.algorithms.placement.phase_times import exclusive_s
from aurora.types.arrays import FloatArray, IntArray


def bottleneck_matching(weight_GJ: FloatArray) -> IntArray:
    """Returns the perfect matching of rows (GPUs) with columns (groups) whose largest weight is the smallest possible.

    Bisects over the distinct weights and matches with Hopcroft-Karp. Ties are broken the same way every time.

    Args:
        weight_GJ: (n, n) float64; infinite entries cannot be used.

    Returns:
        (n,) int64, the column matched to each row; -1 everywhere if finite entries allow no perfect matching.

    Source:
        Aurora (arXiv:2410.17043) §6.2, case II.
    """
    levels = np.unique(weight_GJ[np.isfinite(weight_GJ)])
    low, high, best_G = 0, len(levels) - 1, np.full(len(weight_GJ), -1)
    while low <= high:
        middle = (low + high) // 2
        match_G = maximum_bipartite_matching(csr_matrix(weight_GJ <= levels[middle]), perm_type="column")
        if (match_G < 0).any():
            low = middle + 1
        else:
            best_G, high = match_G.astype(np.int64), middle - 1
    return best_G


def bottleneck_sum_matching(first_GJ: FloatArray, second_GJ: FloatArray) -> IntArray:
    """Returns the perfect matching that minimises (largest matched entry of first_GJ) + (largest matched entry of second_GJ).

    A lower bound on the first entry rises, and every better matching respects it. Ties are broken the same way every time.

    Args:
        first_GJ: (n, n) float64; infinite entries cannot be used.
        second_GJ: (n, n) float64, finite.

    Returns:
        (n,) int64, the column matched to each row; -1 everywhere if finite entries allow no perfect matching.
    """
    rows, best_G, best_s, least_s = np.arange(len(first_GJ)), np.full(len(first_GJ), -1), np.inf, 0.0
    while True:
        # 1. The smallest first entry of matchings that may be better: their second entries are below best_s - least_s.
        match_G = bottleneck_matching(np.where(second_GJ < best_s - least_s, first_GJ, np.inf))
        if match_G[0] < 0:
            return best_G
        # 2. The smallest second entry beside it.
        first_s = first_GJ[rows, match_G].max()
        match_G = bottleneck_matching(np.where(first_GJ <= first_s, second_GJ, np.inf))
        if (sum_s := first_GJ[rows, match_G].max() + second_GJ[rows, match_G].max()) < best_s:
            best_G, best_s = match_G, sum_s
        # 3. What is better than the best now has a larger first entry.
        least_s = first_GJ.min(where=first_GJ > first_s, initial=np.inf)


AssignmentStrategy = Callable[[LayerCosts, np.random.Generator], IntArray]


def exact(costs: LayerCosts, rng: np.random.Generator) -> IntArray:
    """Returns (G,) int64, the group on each GPU that minimises Eq. 1, exactly; `rng` is not used.

    Eq. 1 of Aurora (arXiv:2410.17043) is max(gate + dispatch) + max(experts + combine) + max(aggregate)."""
    there_s_GJ, back_s_GJ = costs.alone_s_GE("send", "recv"), costs.alone_s_GE("csend", "crecv")
    return bottleneck_sum_matching(costs.gate_s_WG[0][:, None] + there_s_GJ, costs.expert_s_WGE[0] + back_s_GJ)


def contiguous(costs: LayerCosts, rng: np.random.Generator) -> IntArray:
    """Assigns group g to GPU g. Args and returns: as in `exact`."""
    return np.arange(len(costs.out_Bps))


def shuffled(costs: LayerCosts, rng: np.random.Generator) -> IntArray:
    """Assigns groups to GPUs at random (RGA of Aurora, arXiv:2410.17043, §8.1). Args and returns: as in `exact`."""
    return rng.permutation(len(costs.out_Bps))


ASSIGN: dict[str, AssignmentStrategy] = {
    "exact": exact,
    "contiguous": contiguous,
    "random": shuffled,
}


def best_exclusive_s(costs: LayerCosts) -> float:
    """Returns the seconds of Aurora's Eq. 1 under the best assignment of the groups in `costs` to GPUs."""
    return exclusive_s(costs.times_alone(exact(costs, np.random.default_rng(0))))
