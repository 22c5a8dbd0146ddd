"""COLOCATE: strategies that assign the groups of colocated models to GPUs.

Each strategy takes (problem, rng), a ColocationProblem and a random generator, and returns group_MG: (M, G) int64, the group of
each model on each GPU. Strategies in JOINT place all models at once; the others keep the models that are placed already, and
place the rest one after another.
"""

from collections.abc import Callable

import numpy as np

from aurora.algorithms.placement.assignment import ASSIGN, bottleneck_matching
from aurora.algorithms.placement.colocation_problem import ColocationProblem, search
from aurora.algorithms.placement.cost_model import LayerCosts
from aurora.algorithms.placement.phase_times import SIDES
from aurora.types.arrays import IntArray

ColocationStrategy = Callable[[ColocationProblem, np.random.Generator], IntArray]


def _one_by_one(problem: ColocationProblem, place: Callable[[dict[int, IntArray], LayerCosts], IntArray]) -> IntArray:
    """Places the models that have no place, in sequence; `place` returns a model's groups (G,) beside those placed so far."""
    placed = dict(problem.held)
    for model, costs in enumerate(problem.costs_M):
        if model not in placed:
            placed[model] = place(placed, costs)
    return np.stack([placed[model] for model in range(len(placed))])


def matching(problem: ColocationProblem, rng: np.random.Generator) -> IntArray:
    """Places models one by one, each so that the joint dispatch of it and the models placed before is the shortest possible.

    Each step is a bottleneck matching on the port seconds of the joint dispatch. For two models they are
    max(send_a + send_b, recv_a + recv_b) on each GPU.

    Source:
        Aurora (arXiv:2410.17043) §6.2, case II.
    """

    def beside(placed: dict[int, IntArray], costs: LayerCosts) -> IntArray:
        held_XG = np.sum([problem.costs_M[model].times_alone(group_G).port_4G[:2] for model, group_G in placed.items()], axis=0)
        beside_s = [held_G[:, None] + costs.alone_s_GE(side) for held_G, side in zip(held_XG, SIDES[:2], strict=True)]
        return bottleneck_matching(np.maximum(*beside_s))

    return _one_by_one(problem, beside)


def local_search(problem: ColocationProblem, rng: np.random.Generator) -> IntArray:
    """Runs a slot search from two starts and returns the assignment with the lowest objective.

    The starts are `matching` and each model's own optimum; the result is never worse than either. Ties, as when one resource
    limits all assignments, go to the assignment that would be fastest if the models ran one after the other.
    """
    own_optima = [ASSIGN["exact"](costs, rng) for costs in problem.costs_M]
    for model in set(range(len(own_optima))) - set(problem.movers_M.tolist()):
        own_optima[model] = problem.held[model]
    starts = matching(problem, rng), np.stack(own_optima)
    candidates = [*(search(problem, start_MG, rng) for start_MG in starts), *starts]
    return min(candidates, key=lambda group_MG: (problem.value_s(group_MG), problem.sequential_s(group_MG)))


def contiguous(problem: ColocationProblem, rng: np.random.Generator) -> IntArray:
    """Puts group g of each model on GPU g."""
    return _one_by_one(problem, lambda placed, costs: np.arange(problem.gpus))


def shuffled(problem: ColocationProblem, rng: np.random.Generator) -> IntArray:
    """Puts the groups of each model on GPUs at random (REC of Aurora, arXiv:2410.17043, §8.1)."""
    return _one_by_one(problem, lambda placed, costs: rng.permutation(problem.gpus))


COLOCATE: dict[str, ColocationStrategy] = {
    "matching": matching,
    "local-search": local_search,
    "contiguous": contiguous,
    "random": shuffled,
}
JOINT = ("local-search",)  # strategies that place all models, so that ASSIGN is not used
