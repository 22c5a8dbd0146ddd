"""ASSIGN: strategies that assign one model's groups of experts to GPUs.

Each strategy takes (costs, rng), the GroupCosts of a layer and a random generator, and returns group_G: (G,) int64, the group
that each GPU holds.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import maximum_bipartite_matching

from aurora.algorithms.placement.cost_model import GroupCosts
from aurora.algorithms.placement.phase_times import exclusive_s
from aurora.types.arrays import FloatArray, IntArray
from aurora.types.compiled import njit


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
    _, match_G = _least_sum(first_GJ, second_GJ, np.inf)
    return np.asarray(match_G)


class Matching(NamedTuple):
    """A partial matching; -1 where a row or column is free.

    Attributes:
        column_G: (n,) int64, the column of each row.
        row_J: (n,) int64, the row of each column.
    """

    column_G: IntArray
    row_J: IntArray


@njit(cache=True)
def _least_sum(first_GJ: FloatArray, second_GJ: FloatArray, best: float) -> tuple[float, IntArray]:
    """(sum, match) of the best matching whose sum of bottlenecks is below `best`; (inf, undefined) if there is none.

    The first threshold only rises, so the second one, best - first, only falls. Edges above the second leave the matching. The
    rows that become free are matched again along the path whose largest entry of first_GJ is smallest.
    """
    n = len(first_GJ)
    matching = Matching(np.full(n, -1), np.full(n, -1))
    best_G, value, threshold = np.full(n, -1), np.inf, 0.0
    while True:
        free_row = _drop_edges(second_GJ, matching, best, threshold)
        if free_row < 0:
            value = best = _bottleneck_sum(first_GJ, second_GJ, matching)
            best_G[:] = matching.column_G
            continue
        threshold, end, via_J = _bottleneck_path(first_GJ, second_GJ, matching, free_row, threshold, best)
        if end < 0:
            return value, best_G
        _augment(matching, via_J, free_row, end)


@njit(cache=True)
def _drop_edges(second_GJ: FloatArray, matching: Matching, best: float, threshold: float) -> int:
    """Removes the edges with which the sum would reach `best`; returns a free row, -1 if there is none."""
    column_G, row_J = matching
    free_row = -1
    for i in range(len(column_G)):
        if column_G[i] >= 0 and threshold + second_GJ[i, column_G[i]] >= best:
            row_J[column_G[i]] = -1
            column_G[i] = -1
        if column_G[i] < 0:
            free_row = i
    return free_row


@njit(cache=True)
def _bottleneck_sum(first_GJ: FloatArray, second_GJ: FloatArray, matching: Matching) -> float:
    """Returns the sum of the largest entries that the matching uses of each matrix."""
    first, second = 0.0, 0.0
    for i in range(len(first_GJ)):
        first = max(first, first_GJ[i, matching.column_G[i]])
        second = max(second, second_GJ[i, matching.column_G[i]])
    return first + second


@njit(cache=True)
def _bottleneck_path(
    first_GJ: FloatArray, second_GJ: FloatArray, matching: Matching, start: int, threshold: float, best: float
) -> tuple[float, int, IntArray]:
    """The augmenting path from row `start` whose largest entry of first_GJ is smallest, by edges whose sum is below `best`.

    Returns the first threshold that it takes, its last column (-1 if there is no path) and the row before each column.
    Dijkstra's algorithm with maxima in place of sums.
    """
    n, row_J = len(first_GJ), matching.row_J
    slack_J, via_J, done_J = np.full(n, np.inf), np.empty(n, dtype=np.int64), np.zeros(n, dtype=np.bool_)
    limit, i = threshold, start
    while True:
        for j in range(n):
            if not done_J[j] and first_GJ[i, j] < slack_J[j] and limit + second_GJ[i, j] < best:
                slack_J[j] = first_GJ[i, j]
                via_J[j] = i
        nearest = -1
        for j in range(n):
            if not done_J[j] and slack_J[j] < np.inf and (nearest < 0 or slack_J[j] < slack_J[nearest]):
                nearest = j
        if nearest < 0:
            return threshold, -1, via_J
        threshold = max(threshold, slack_J[nearest])
        done_J[nearest] = True
        if row_J[nearest] < 0:
            return threshold, nearest, via_J
        i = row_J[nearest]


@njit(cache=True)
def _augment(matching: Matching, via_J: IntArray, start: int, end: int) -> None:
    """Changes the matching along the path from row `start` to column `end`."""
    column_G, row_J = matching
    while end >= 0:
        i = via_J[end]
        following = column_G[i]
        column_G[i] = end
        row_J[end] = i
        end = following if i != start else -1


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
