"""Where the experts of one model sit when a token travels once to a GPU that holds several of its experts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from aurora.errors import BadInput
from aurora.planner.placement import objective
from aurora.planner.placement.assignment import ASSIGN
from aurora.planner.placement.coactivation import (
    coactivation_counts,
    coactivation_groups,
    deduplicated_bound,
    distinct_tokens,
)
from aurora.planner.placement.coactivation_search import coactivation_search
from aurora.planner.placement.cost_model import GroupCosts, LayerCosts, layer_costs
from aurora.planner.placement.exclusive_layers import SWAP_SEARCH
from aurora.planner.placement.placed_models import PlacedModels, unreplicated
from aurora.planner.placement.slots import slots_G
from aurora.planner.workload.traffic import deduplicated_tokens
from aurora.types import Cluster, Placement, PlanOptions, Profile
from aurora.types.arrays import IntArray


@dataclass(frozen=True)
class DeduplicatedProblem:
    """One layer with token-level routing, a token counted once for a GPU that holds several of its experts.

    Args:
        costs: the layer over the whole profile; dispatch_bytes are those of a deduplicated token.
        experts_UK: (U, K), the experts of each token.
        source_U: (U,), the rank that each token starts on.
        top_k: experts a token.
    """

    costs: LayerCosts
    experts_UK: IntArray
    source_U: IntArray
    top_k: int

    @classmethod
    def of(cls, cluster: Cluster, profile: Profile, layer: int) -> "DeduplicatedProblem":
        """Raises BadInput if the profile holds no token-level routing."""
        costs = replace(layer_costs(cluster, profile, layer), dispatch_bytes=profile.row_bytes(True))
        return cls(costs, *profile.required_routing.layer(layer), profile.top_k)

    def group_costs(self, gpu_E: IntArray) -> GroupCosts:
        """The costs of the groups of experts that gpu_E (E,) makes, on whichever GPU each group sits."""
        gpus = len(self.costs.out_Bps)
        return self.costs.grouped(gpu_E, deduplicated_tokens(self.experts_UK, self.source_U, gpu_E, gpus))

    def value_s(self, gpu_E: IntArray) -> float:
        """Seconds of Eq. 1 with expert e on GPU gpu_E[e]. Source: Aurora Eq. 1."""
        return objective.exclusive(self.group_costs(gpu_E).phase_times(np.arange(len(self.costs.out_Bps))))

    def best_assignment(self, gpu_E: IntArray) -> IntArray:
        """(G,) int64: the best group for each GPU, of the groups of experts that gpu_E (E,) makes."""
        return ASSIGN["exact"](self.group_costs(gpu_E), np.random.default_rng(0))


def check_coactivation(options: PlanOptions, profiles: Sequence[Profile], domains: Sequence[Profile]) -> None:
    """Checks that `coactivation` is asked for one model that has the GPUs to itself, and the sum of one profile's windows.

    Raises:
        BadInput: if not, or if the profile holds no token-level routing.
    """
    if len(profiles) > 1:
        raise BadInput("`coactivation`: expected one model alone, found two that share the GPUs")
    for taken, what in (
        (options.place not in ("auto", SWAP_SEARCH), f"`place` {options.place}"),
        (options.assign not in ("auto", "exact"), f"`assign` {options.assign}"),
        (options.aim != "sum", f"`aim` {options.aim}"),
        (options.min_replicas is not None, "`min_replicas`, as it holds no replicas"),
        (bool(domains), "`domain`"),
    ):
        if taken:
            raise BadInput(f"`coactivation`: expected no {what}; it is a placement for the sum of one profile's windows")
    try:
        profiles[0].required_routing  # noqa: B018
    except BadInput as error:
        raise BadInput(f"`coactivation`: {error}") from None


def place_deduplicated(
    cluster: Cluster, profile: Profile, start: PlacedModels, options: PlanOptions, rng: np.random.Generator
) -> PlacedModels:
    """Places one model for deduplicated tokens: never longer than the placement of `start`, counted so.

    A co-activation local search moves and swaps single experts, from `start` and from groups of experts that are often chosen
    together.
    """
    capacity_G = slots_G(cluster, profile, options)
    placements: list[Placement] = []
    objective_s = bound_s = free_bound_s = 0.0
    for layer in range(profile.layers):
        problem = DeduplicatedProblem.of(cluster, profile, layer)
        gpu_E, least_s = _layer(problem, start.placements_M[0].gpu_E(layer), capacity_G, rng)
        value_s = problem.value_s(gpu_E)
        free_s = min(least_s, value_s)
        same_groups_s = objective.exclusive(problem.group_costs(gpu_E).phase_times(problem.best_assignment(gpu_E)))
        objective_s += value_s
        free_bound_s += free_s
        bound_s += max(min(same_groups_s, value_s), free_s)
        placements.append(unreplicated(gpu_E, len(cluster)))
    return PlacedModels((Placement.stack(placements),), objective_s, bound_s, free_bound_s, deduplicated=True)


def deduplicated_seconds(cluster: Cluster, profile: Profile, layer: int, gpu_E: IntArray) -> float:
    """Seconds of Eq. 1 for one layer with expert e on GPU gpu_E[e], tokens deduplicated. Source: Aurora Eq. 1.

    Raises BadInput if the profile holds no token-level routing.
    """
    return DeduplicatedProblem.of(cluster, profile, layer).value_s(gpu_E)


def _layer(
    problem: DeduplicatedProblem, start_E: IntArray, slots_G: IntArray, rng: np.random.Generator
) -> tuple[IntArray, float]:
    """(E,) int64 the best placement found, never longer than start_E; and a bound in seconds. Stops where the bound is met."""
    tokens = distinct_tokens(problem.experts_UK, problem.source_U)
    counts_SEE = coactivation_counts(*tokens, len(start_E), len(slots_G))
    costs = problem.group_costs(start_E)
    work_GE = problem.costs.expert_s_WGE[0]
    least_s = deduplicated_bound(
        counts_SEE, problem.top_k, slots_G, work_GE, costs.gate_s_G, costs.aggregate_s_G, costs.port_s_XG
    )
    groups_E = coactivation_groups(counts_SEE.sum(axis=0), slots_G)
    best_E, best_s = start_E, problem.value_s(start_E)
    for begun_E in (start_E, _reassigned(problem, groups_E, slots_G)):
        if best_s <= least_s * (1 + 1e-9):
            break
        searched_E = coactivation_search(*tokens, begun_E, slots_G, work_GE, costs.gate_s_G, costs.port_s_XG, rng)
        for found_E in (searched_E, _reassigned(problem, searched_E, slots_G)):
            if (found_s := problem.value_s(found_E)) < best_s:
                best_E, best_s = found_E, found_s
    return best_E, least_s


def _reassigned(problem: DeduplicatedProblem, gpu_E: IntArray, slots_G: IntArray) -> IntArray:
    """The same groups of experts on the GPUs that suit them best, if every GPU has slots for the largest of them."""
    if np.bincount(gpu_E, minlength=len(slots_G)).max() > slots_G.min():
        return gpu_E
    return np.argsort(problem.best_assignment(gpu_E))[gpu_E]
