"""ASSIGN: strategies that assign one model's groups of experts to GPUs.

Each strategy takes (costs, rng), the GroupCosts of a layer and a random generator, and returns group_G: (G,) int64, the group
that each GPU holds.
"""

from collections.abc import Callable

import numpy as np

from aurora.planner.placement.bottleneck_matching import bottleneck_matching, bottleneck_sum_matching
from aurora.planner.placement.cost_model import GroupCosts
from aurora.planner.placement.objective import exclusive
from aurora.types.arrays import IntArray

AssignmentStrategy = Callable[[GroupCosts, np.random.Generator], IntArray]


def exact(costs: GroupCosts, rng: np.random.Generator) -> IntArray:
    """Returns (G,) int64, the group on each GPU that minimises Eq. 1, exactly; `rng` is not used.

    Eq. 1 of Aurora (arXiv:2410.17043) is max(gate + dispatch) + max(experts + combine) + max(aggregate)."""
    return bottleneck_sum_matching(costs.gate_s_G[:, None] + costs.dispatch_s_GJ, costs.expert_s_GJ + costs.combine_s_GJ)


def by_load(costs: GroupCosts, rng: np.random.Generator) -> IntArray:
    """Assigns the busiest group to the strongest GPU, the next busiest to the next strongest, and so on. Returns as `exact`.

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
    """Returns the assignment, as `exact`, that minimises the largest dispatch + experts + combine seconds of a GPU, exactly."""
    return bottleneck_matching(costs.exclusive_s_GJ)


def contiguous(costs: GroupCosts, rng: np.random.Generator) -> IntArray:
    """Assigns group g to GPU g. Returns as `exact`."""
    return np.arange(len(costs.load_J))


def shuffled(costs: GroupCosts, rng: np.random.Generator) -> IntArray:
    """Assigns groups to GPUs at random (RGA of Aurora, arXiv:2410.17043, §8.1). Returns as `exact`."""
    return rng.permutation(len(costs.load_J))


ASSIGN: dict[str, AssignmentStrategy] = {
    "exact": exact,
    "by-load": by_load,
    "matching": matching,
    "contiguous": contiguous,
    "random": shuffled,
}


def best_exclusive_s(costs: GroupCosts) -> float:
    """Returns the seconds of Eq. 1 under the best assignment of these groups to GPUs."""
    return exclusive(costs.phase_times(exact(costs, np.random.default_rng(0))))
