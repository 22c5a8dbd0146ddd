"""COLOCATE: strategies that assign the groups of two colocated models, a and b, to GPUs.

Each strategy takes (problem, rng), a ColocationProblem and a random generator, and returns a ColocatedPlacement. Those in JOINT
place both models; the others keep model a where it is and place model b.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from aurora.planner.placement.annealing import anneal
from aurora.planner.placement.assignment import ASSIGN
from aurora.planner.placement.bottleneck_matching import bottleneck_matching
from aurora.planner.placement.branch_and_bound import branch_and_bound
from aurora.planner.placement.colocation_problem import ColocationProblem
from aurora.types.arrays import IntArray


@dataclass(frozen=True)
class ColocatedPlacement:
    """Which groups of two models each GPU holds.

    Attributes:
        a_G: (G,) int64, the group of model a on each GPU.
        b_G: (G,) int64, the group of model b on each GPU.
        bound_s: seconds; no assignment that the problem allows takes less. Zero if the strategy proves no bound.
    """

    a_G: IntArray
    b_G: IntArray
    bound_s: float = 0.0


ColocationStrategy = Callable[[ColocationProblem, np.random.Generator], ColocatedPlacement]


def matching(problem: ColocationProblem, rng: np.random.Generator) -> ColocatedPlacement:
    """Places model b so that both models' joint dispatch, given the place of model a, is as short as possible, exactly.

    This is a bottleneck matching on the port time of both dispatches, max(send_a + send_b, recv_a + recv_b) on each GPU.

    Source:
        Aurora (arXiv:2410.17043) §6.2, case II.
    """
    gpus = np.arange(len(problem.held_G))
    held_XG = problem.a.seconds_XGJ[:2, gpus, problem.held_G]
    both_s_GJ = (held_XG[:, :, None] + problem.b.seconds_XGJ[:2]).max(axis=0)
    return ColocatedPlacement(problem.held_G, bottleneck_matching(both_s_GJ))


def sorted_pairs(problem: ColocationProblem, rng: np.random.Generator) -> ColocatedPlacement:
    """Pairs a's groups by rising load with b's groups by falling load; optimal where each GPU sends as much as it receives.

    Source:
        Aurora (arXiv:2410.17043) Thm 6.2, case I.
    """
    group_G = np.empty(len(problem.held_G), dtype=np.int64)
    group_G[np.argsort(problem.a.load_J[problem.held_G], kind="stable")] = np.argsort(-problem.b.load_J, kind="stable")
    return ColocatedPlacement(problem.held_G, group_G)


def decoupled(problem: ColocationProblem, rng: np.random.Generator) -> ColocatedPlacement:
    """Matches a's groups with b's groups first, then the pairs with GPUs. A heuristic.

    The first matching ignores which GPU a pair sits on; the second minimises the longest time of a pair on its GPU. If model a
    may not move, b's groups alone are matched with GPUs, which minimises the same time.

    Source:
        Aurora (arXiv:2410.17043) §7.2.
    """
    a, b, held_G = problem.a, problem.b, problem.held_G
    if not problem.movable:
        gpus = np.arange(len(held_G))
        return ColocatedPlacement(held_G, bottleneck_matching(a.exclusive_s_GJ[gpus, held_G][:, None] + b.exclusive_s_GJ))
    # A group's own bytes, averaged over the GPUs that it could sit on.
    send_a, recv_a, send_b, recv_b = (
        costs.dispatch_bytes * tokens_GJ.mean(axis=0) for costs in (a, b) for tokens_GJ in (costs.send_GJ, costs.recv_GJ)
    )
    partner_J = bottleneck_matching(np.maximum(send_a[:, None] + send_b[None, :], recv_a[:, None] + recv_b[None, :]))
    group_G = bottleneck_matching(a.exclusive_s_GJ + b.exclusive_s_GJ[:, partner_J])
    return ColocatedPlacement(group_G, partner_J[group_G])


def local_search(problem: ColocationProblem, rng: np.random.Generator) -> ColocatedPlacement:
    """Runs simulated annealing from three starts and returns the best result by the objective.

    The starts are `decoupled`, `matching` and each model's own optimum; the result is never worse than any of them. A step
    swaps the groups of a, of b or of both between two GPUs.
    """
    own_a_G = ASSIGN["exact"](problem.a, rng) if problem.movable else problem.held_G
    own_optima = ColocatedPlacement(own_a_G, ASSIGN["exact"](problem.b, rng))
    starts = decoupled(problem, rng), matching(problem, rng), own_optima
    found = [ColocatedPlacement(*anneal(problem, start.a_G, start.b_G, rng)) for start in starts]
    return min(found, key=lambda one: problem.value_s(one.a_G, one.b_G))


def exact(problem: ColocationProblem, rng: np.random.Generator) -> ColocatedPlacement:
    """Finds the optimum of the objective by branch and bound from `local_search`; returns the best found if time is up."""
    start = local_search(problem, rng)
    return ColocatedPlacement(*branch_and_bound(problem, start.a_G, start.b_G))


def contiguous(problem: ColocationProblem, rng: np.random.Generator) -> ColocatedPlacement:
    """Puts b's group g on GPU g."""
    return ColocatedPlacement(problem.held_G, np.arange(len(problem.held_G)))


def shuffled(problem: ColocationProblem, rng: np.random.Generator) -> ColocatedPlacement:
    """Puts b's groups on GPUs at random (REC of Aurora, arXiv:2410.17043, §8.1)."""
    return ColocatedPlacement(problem.held_G, rng.permutation(len(problem.held_G)))


COLOCATE: dict[str, ColocationStrategy] = {
    "matching": matching,
    "sorted": sorted_pairs,
    "decoupled": decoupled,
    "local-search": local_search,
    "exact": exact,
    "contiguous": contiguous,
    "random": shuffled,
}
JOINT = ("decoupled", "local-search", "exact")  # strategies that place both models, so that ASSIGN is not used
