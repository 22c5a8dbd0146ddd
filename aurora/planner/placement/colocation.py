"""COLOCATE: where the second model's groups sit, given the first's, or both models' at once.

Each takes (sharing, rng): both models' GroupCosts, the group of a on each GPU and whether a may still move, and the objective;
and gives a ColocatedPlacement.
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
    """a_G, b_G (G,) int64: each model's group on every GPU. bound_s: below what none gets where a may sit as it could; zero
    where the method proves nothing itself."""

    a_G: IntArray
    b_G: IntArray
    bound_s: float = 0.0


ColocationStrategy = Callable[[ColocationProblem, np.random.Generator], ColocatedPlacement]


def matching(sharing: ColocationProblem, rng: np.random.Generator) -> ColocatedPlacement:
    """Bottleneck matching on the port time of both models' dispatches, max(send_a + send_b, recv_a + recv_b).

    Optimal for |N_a + N_b| given a's place. Source: Aurora §6.2, case II.
    """
    gpus = np.arange(len(sharing.held_G))
    held_XG = sharing.a.seconds_XGJ[:2, gpus, sharing.held_G]
    return ColocatedPlacement(
        sharing.held_G, bottleneck_matching((held_XG[:, :, None] + sharing.b.seconds_XGJ[:2]).max(axis=0))
    )


def sorted_pairs(sharing: ColocationProblem, rng: np.random.Generator) -> ColocatedPlacement:
    """a's groups by rising load meet b's by falling load. Optimal where sends equal receives (Aurora Thm 6.2, case I)."""
    group_G = np.empty(len(sharing.held_G), dtype=np.int64)
    group_G[np.argsort(sharing.a.load_J[sharing.held_G], kind="stable")] = np.argsort(-sharing.b.load_J, kind="stable")
    return ColocatedPlacement(sharing.held_G, group_G)


def decoupled(sharing: ColocationProblem, rng: np.random.Generator) -> ColocatedPlacement:
    """Two matchings, one after the other: a's groups with b's, blind to GPUs; then pairs with GPUs by the pair's time.

    Where a may not move, only b's groups are matched with GPUs, by the same time. Source: Aurora §7.2 (a heuristic).
    """
    a, b, held_G = sharing.a, sharing.b, sharing.held_G
    if not sharing.movable:
        gpus = np.arange(len(held_G))
        return ColocatedPlacement(held_G, bottleneck_matching(a.exclusive_s_GJ[gpus, held_G][:, None] + b.exclusive_s_GJ))
    # A group's own bytes, averaged over the GPUs that it could sit on.
    send_a, recv_a, send_b, recv_b = (
        costs.dispatch_bytes * tokens_GJ.mean(axis=0) for costs in (a, b) for tokens_GJ in (costs.send_GJ, costs.recv_GJ)
    )
    partner_J = bottleneck_matching(np.maximum(send_a[:, None] + send_b[None, :], recv_a[:, None] + recv_b[None, :]))
    group_G = bottleneck_matching(a.exclusive_s_GJ + b.exclusive_s_GJ[:, partner_J])
    return ColocatedPlacement(group_G, partner_J[group_G])


def local_search(sharing: ColocationProblem, rng: np.random.Generator) -> ColocatedPlacement:
    """Annealed three-way swaps of a's groups, b's, or both between two GPUs, from `decoupled`, from `matching` and from each
    model's own optimum; the best by the objective. Never worse than those three."""
    alone = ColocatedPlacement(
        ASSIGN["exact"](sharing.a, rng) if sharing.movable else sharing.held_G, ASSIGN["exact"](sharing.b, rng)
    )
    starts = decoupled(sharing, rng), matching(sharing, rng), alone
    found = [ColocatedPlacement(*anneal(sharing, start.a_G, start.b_G, rng)) for start in starts]
    return min(found, key=lambda one: sharing.value_s(one.a_G, one.b_G))


def exact(sharing: ColocationProblem, rng: np.random.Generator) -> ColocatedPlacement:
    """The optimum by the objective, by branch and bound from `local_search`; where its time ends first, the best found."""
    start = local_search(sharing, rng)
    return ColocatedPlacement(*branch_and_bound(sharing, start.a_G, start.b_G))


def contiguous(sharing: ColocationProblem, rng: np.random.Generator) -> ColocatedPlacement:
    """b's group g on GPU g."""
    return ColocatedPlacement(sharing.held_G, np.arange(len(sharing.held_G)))


def shuffled(sharing: ColocationProblem, rng: np.random.Generator) -> ColocatedPlacement:
    """REC, random expert colocation (Aurora §8.1)."""
    return ColocatedPlacement(sharing.held_G, rng.permutation(len(sharing.held_G)))


COLOCATE: dict[str, ColocationStrategy] = {
    "matching": matching,
    "sorted": sorted_pairs,
    "decoupled": decoupled,
    "local-search": local_search,
    "exact": exact,
    "contiguous": contiguous,
    "random": shuffled,
}
JOINT = ("decoupled", "local-search", "exact")  # they place both models: ASSIGN has no say
