"""COLOCATE: strategies that assign the groups of colocated models to GPUs.

Each strategy takes (problem, rng), a ColocationProblem and a random generator, and returns group_MG: (M, G) int64, the group of
each model on each GPU. Strategies in JOINT place all models at once; the others keep the models that are placed already, and
place the rest one after another.
"""

from collections.abc import Callable

import numpy as np

from aurora.algorithms.placement.assignment import ASSIGN, bottleneck_matching
from aurora.algorithms.placement.colocation_problem import ColocationProblem, anneal
from aurora.algorithms.placement.cost_model import GroupCosts
from aurora.types.arrays import FloatArray, IntArray

ColocationStrategy = Callable[[ColocationProblem, np.random.Generator], IntArray]


def _one_by_one(problem: ColocationProblem, place: Callable[[dict[int, IntArray], GroupCosts], IntArray]) -> IntArray:
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
    gpus = np.arange(problem.gpus)

    def beside(placed: dict[int, IntArray], costs: GroupCosts) -> IntArray:
        held_XG = np.sum([problem.costs_M[model].port_s_4GJ[:2, gpus, group_G] for model, group_G in placed.items()], axis=0)
        return bottleneck_matching((held_XG[:, :, None] + costs.port_s_4GJ[:2]).max(axis=0))

    return _one_by_one(problem, beside)


def decoupled(problem: ColocationProblem, rng: np.random.Generator) -> IntArray:
    """Bundles one group of each model first, then matches the bundles with GPUs. A heuristic.

    The matchings that form bundles, one for each further model, ignore the GPU that a bundle will be on. The last matching
    minimises the longest time of a bundle on its GPU, together with the models that may not move.

    Source:
        Aurora (arXiv:2410.17043) §7.2, for two models.
    """
    first, *others = problem.movers_M.tolist()
    bundle_MJ = {first: np.arange(problem.gpus)}
    port_XJ = _mean_bytes_XJ(problem.costs_M[first])
    for model in others:
        own_XJ = _mean_bytes_XJ(problem.costs_M[model])
        bundle_MJ[model] = bottleneck_matching((port_XJ[:, :, None] + own_XJ[:, None, :]).max(axis=0))
        port_XJ = port_XJ + own_XJ[:, bundle_MJ[model]]
    gpus, group_MG = np.arange(problem.gpus), dict(problem.held)
    seconds_GJ = np.sum([problem.costs_M[model].exclusive_s_GJ[:, group_J] for model, group_J in bundle_MJ.items()], axis=0)
    for model in group_MG.keys() - bundle_MJ.keys():
        seconds_GJ = seconds_GJ + problem.costs_M[model].exclusive_s_GJ[gpus, group_MG[model]][:, None]
    bundle_G = bottleneck_matching(seconds_GJ)
    group_MG |= {model: group_J[bundle_G] for model, group_J in bundle_MJ.items()}
    return np.stack([group_MG[model] for model in range(len(group_MG))])


def _mean_bytes_XJ(costs: GroupCosts) -> FloatArray:
    """(2, J) bytes that each group sends and receives in the dispatch, averaged over the GPUs that it could sit on."""
    return costs.dispatch_bytes * np.stack([costs.send_GJ.mean(axis=0), costs.recv_GJ.mean(axis=0)])


def local_search(problem: ColocationProblem, rng: np.random.Generator) -> IntArray:
    """Runs simulated annealing from three starts and returns the assignment with the lowest objective.

    The starts are `decoupled`, `matching` and each model's own optimum; the result is never worse than any of them. A step
    swaps the groups of one model, or of all, between two GPUs. Ties, as when one resource limits all assignments, go to the
    assignment that would be fastest if the models ran one after the other.
    """
    own_optima = [ASSIGN["exact"](costs, rng) for costs in problem.costs_M]
    for model in set(range(len(own_optima))) - set(problem.movers_M.tolist()):
        own_optima[model] = problem.held[model]
    starts = decoupled(problem, rng), matching(problem, rng), np.stack(own_optima)
    candidates = [*(anneal(problem, start_MG, rng) for start_MG in starts), *starts]
    return min(candidates, key=lambda group_MG: (problem.value_s(group_MG), problem.sequential_s(group_MG)))


def contiguous(problem: ColocationProblem, rng: np.random.Generator) -> IntArray:
    """Puts group g of each model on GPU g."""
    return _one_by_one(problem, lambda placed, costs: np.arange(problem.gpus))


def shuffled(problem: ColocationProblem, rng: np.random.Generator) -> IntArray:
    """Puts the groups of each model on GPUs at random (REC of Aurora, arXiv:2410.17043, §8.1)."""
    return _one_by_one(problem, lambda placed, costs: rng.permutation(problem.gpus))


COLOCATE: dict[str, ColocationStrategy] = {
    "matching": matching,
    "decoupled": decoupled,
    "local-search": local_search,
    "contiguous": contiguous,
    "random": shuffled,
}
JOINT = ("decoupled", "local-search")  # strategies that place all models, so that ASSIGN is not used
