"""ASSIGN: strategies that assign one model's groups of experts to GPUs.

Each strategy takes (costs, rng), the GroupCosts of a layer and a random generator, and returns group_G: (G,) int64, the group
that each GPU holds.
"""

from collections.abc import Callable

import numpy as np
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import maximum_bipartite_matching

from aurora.algorithms.placement import assignment_core as core
from aurora.algorithms.placement.cost_model import GroupCosts
from aurora.algorithms.placement.phase_times import exclusive_s
from aurora.types.arrays import FloatArray, IntArray


def bottleneck_matching(weight_GJ: FloatArray) -> IntArray:
    """Returns the perfect matching of rows (GPUs) with columns (groups) whose largest weight is the smallest possible.

    Bisects over the distinct weights and matches with Hopcroft-Karp. Ties are broken the same way every time.

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
        match = _within(weight_GJ, levels[middle])
        if match is None:
            low = middle + 1
        else:
            best, high = match, middle
    return best


def _within(weight_GJ: FloatArray, level: float) -> IntArray | None:
    """Returns a perfect matching of weights up to `level`, or None if there is none."""
    match = maximum_bipartite_matching(csr_matrix(weight_GJ <= level), perm_type="column")
    return None if (match < 0).any() else np.asarray(match, dtype=np.int64)


def bottleneck_sum_matching(first_GJ: FloatArray, second_GJ: FloatArray) -> IntArray:
    """Returns the perfect matching that minimises (largest matched entry of first_GJ) + (largest matched entry of second_GJ).

    A threshold on the first matrix rises while the threshold on the second falls. Each edge that the second threshold removes
    costs one augmenting path of O(n^2). Ties are broken the same way every time.

    Args:
        first_GJ: (n, n) float64; infinite entries cannot be used.
        second_GJ: (n, n) float64, finite.

    Returns:
        (n,) int64, the column matched to each row; -1 everywhere if finite entries allow no perfect matching.
    """
    return np.asarray(core.least_sum(*(np.ascontiguousarray(each_GJ, np.float64) for each_GJ in (first_GJ, second_GJ))))


AssignmentStrategy = Callable[[GroupCosts, np.random.Generator], IntArray]


def exact(costs: GroupCosts, rng: np.random.Generator) -> IntArray:
    """Returns (G,) int64, the group on each GPU that minimises Eq. 1, exactly; `rng` is not used.

    Eq. 1 of Aurora (arXiv:2410.17043) is max(gate + dispatch) + max(experts + combine) + max(aggregate)."""
    return bottleneck_sum_matching(costs.gate_s_G[:, None] + costs.dispatch_s_GJ, costs.expert_s_GJ + costs.combine_s_GJ)


def by_load(costs: GroupCosts, rng: np.random.Generator) -> IntArray:
    """Assigns the busiest group to the strongest GPU, the next busiest to the next strongest, and so on.

    Args and returns: as in `exact`.

    GPUs are ranked by their time for all experts, then by their slower port. The assignment is optimal only if rows and columns
    of the traffic are proportional.

    Source:
        Aurora (arXiv:2410.17043) Thm 5.1.
    """
    strongest_first = np.lexsort((-np.minimum(costs.out_Bps, costs.in_Bps), costs.expert_s_GJ.sum(axis=1)))
    group_G = np.empty(len(costs.load_J), dtype=np.int64)
    group_G[strongest_first] = np.argsort(-costs.load_J, kind="stable")
    return group_G


def matching(costs: GroupCosts, rng: np.random.Generator) -> IntArray:
    """Minimises max over GPUs of (dispatch + experts + combine) seconds, exactly. Args and returns: as in `exact`."""
    return bottleneck_matching(costs.exclusive_s_GJ)


def contiguous(costs: GroupCosts, rng: np.random.Generator) -> IntArray:
    """Assigns group g to GPU g. Args and returns: as in `exact`."""
    return np.arange(len(costs.load_J))


def shuffled(costs: GroupCosts, rng: np.random.Generator) -> IntArray:
    """Assigns groups to GPUs at random (RGA of Aurora, arXiv:2410.17043, §8.1). Args and returns: as in `exact`."""
    return rng.permutation(len(costs.load_J))


ASSIGN: dict[str, AssignmentStrategy] = {
    "exact": exact,
    "by-load": by_load,
    "matching": matching,
    "contiguous": contiguous,
    "random": shuffled,
}


def best_exclusive_s(costs: GroupCosts) -> float:
    """Returns the seconds of Aurora's Eq. 1 under the best assignment of the groups in `costs` to GPUs."""
    return exclusive_s(costs.phase_times(exact(costs, np.random.default_rng(0))))
