"""ASSIGN: which GPU holds which group of one model's experts. Each takes (costs, rng) and gives group_G (G,) int64."""

from collections.abc import Callable

import numpy as np

from aurora.planner.placement.bottleneck_matching import bottleneck_matching
from aurora.planner.placement.bottleneck_sum_matching import bottleneck_sum_matching
from aurora.planner.placement.cost_model import GroupCosts
from aurora.types.arrays import IntArray

AssignmentStrategy = Callable[[GroupCosts, np.random.Generator], IntArray]


def exact(costs: GroupCosts, rng: np.random.Generator) -> IntArray:
    """The optimum of Eq. 1, max(G + N) + max(F + C) + max(A), where experts move and the requests' ranks stay."""
    return bottleneck_sum_matching(costs.gate_s_G[:, None] + costs.dispatch_s_GJ, costs.expert_s_GJ + costs.combine_s_GJ)


def by_load(costs: GroupCosts, rng: np.random.Generator) -> IntArray:
    """The busiest group on the strongest GPU, and so on down. Source: Aurora Thm 5.1, which holds only where rows and
    columns are proportional."""
    group_G = np.empty(len(costs.load_J), dtype=np.int64)
    group_G[costs.strongest_first] = np.argsort(-costs.load_J, kind="stable")
    return group_G


def matching(costs: GroupCosts, rng: np.random.Generator) -> IntArray:
    """Minimises the largest dispatch + experts + combine of any GPU, exactly."""
    return bottleneck_matching(costs.exclusive_s_GJ)


def contiguous(costs: GroupCosts, rng: np.random.Generator) -> IntArray:
    """Group g on GPU g."""
    return np.arange(len(costs.load_J))


def shuffled(costs: GroupCosts, rng: np.random.Generator) -> IntArray:
    """RGA, random GPU assignment (Aurora §8.1)."""
    return rng.permutation(len(costs.load_J))


ASSIGN: dict[str, AssignmentStrategy] = {
    "exact": exact,
    "by-load": by_load,
    "matching": matching,
    "contiguous": contiguous,
    "random": shuffled,
}
