"""Placement of one model whose tokens are deduplicated: a token is sent once to a GPU that holds several of its experts."""

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
from aurora.planner.placement.slot_counts import slots_G
from aurora.planner.workload.traffic import deduplicated_tokens
from aurora.types import Cluster, Placement, PlanOptions, Profile
from aurora.types.arrays import IntArray


@dataclass(frozen=True)
class DeduplicatedProblem:
    """One layer with token-level routing and deduplicated tokens.

    Args:
        costs: the layer over the whole profile; dispatch_bytes are the bytes of a deduplicated token.
        experts_UK: (U, K) int64, the experts of each token.
        source_U: (U,) int64, the rank that each token starts on.
        top_k: experts a token.
    """

    costs: LayerCosts
    experts_UK: IntArray
    source_U: IntArray
    top_k: int

    @classmethod
    def of(cls, cluster: Cluster, profile: Profile, layer: int) -> "DeduplicatedProblem":
        """Builds the problem of one layer of a profile.

        Args:
            cluster: the GPUs.
            profile: the model's traffic.
            layer: which MoE layer.

        Raises:
            BadInput: if the profile holds no token-level routing.
        """
        costs = replace(layer_costs(cluster, profile, layer), dispatch_bytes=profile.row_bytes(True))
        return cls(costs, *profile.required_routing.layer(layer), profile.top_k)

    def group_costs(self, gpu_E: IntArray) -> GroupCosts:
        """Returns the costs of the groups of experts that share a GPU, for each group on each GPU.

        Args:
            gpu_E: (E,) int64, the GPU of each expert.
        """
        gpus = len(self.costs.out_Bps)
        return self.costs.grouped(gpu_E, deduplicated_tokens(self.experts_UK, self.source_U, gpu_E, gpus))

    def value_s(self, gpu_E: IntArray) -> float:
        """Returns the seconds of Eq. 1.

        Args:
            gpu_E: (E,) int64, the GPU of each expert.

        Source:
            Aurora (arXiv:2410.17043) Eq. 1.
        """
        return objective.exclusive(self.group_costs(gpu_E).phase_times(np.arange(len(self.costs.out_Bps))))

    def best_assignment(self, gpu_E: IntArray) -> IntArray:
        """Returns the best assignment of the same groups of experts to GPUs.

        Args:
            gpu_E: (E,) int64, the GPU of each expert, which makes the groups.

        Returns:
            (G,) int64, the group on each GPU.
        """
        return ASSIGN["exact"](self.group_costs(gpu_E), np.random.default_rng(0))


def check_coactivation(options: PlanOptions, profiles: Sequence[Profile], domains: Sequence[Profile]) -> None:
    """Checks that `options.coactivation` goes with the other options, the number of models and their profiles.

    Args:
        options: with `coactivation` set.
        profiles: one profile a model.
        domains: further profiles of the model.

    Raises:
        BadInput: if there are two models, further profiles, or another strategy, aim or `min_replicas`; or if the profile holds
            no token-level routing.
    """
    if len(profiles) > 1:
        raise BadInput("`coactivation`: is for a plan of one model, found two models that share the GPUs")
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
    """Places one model for deduplicated tokens by co-activation local search.

    The search moves and swaps single experts. It starts from `start` and from groups of experts that the same tokens choose.

    Args:
        cluster: the GPUs.
        profile: the model's traffic, with token-level routing.
        start: an unreplicated placement of the model.
        options: `options.slots_per_gpu` limits the experts of a GPU.
        rng: for restarts of the search.

    Returns:
        The placement, its time and bounds; with deduplicated tokens it is never longer than `start`.

    Raises:
        BadInput: if the profile holds no token-level routing.
        InfeasiblePlan: if the experts do not fit.
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
    """Returns the seconds of Eq. 1 for one layer with deduplicated tokens.

    Args:
        cluster: the GPUs.
        profile: the model's traffic.
        layer: which MoE layer.
        gpu_E: (E,) int64, the GPU of each expert.

    Raises:
        BadInput: if the profile holds no token-level routing.

    Source:
        Aurora (arXiv:2410.17043) Eq. 1.
    """
    return DeduplicatedProblem.of(cluster, profile, layer).value_s(gpu_E)


def _layer(
    problem: DeduplicatedProblem, start_E: IntArray, slots_G: IntArray, rng: np.random.Generator
) -> tuple[IntArray, float]:
    """(E,) int64, the best placement found, never longer than start_E; and a bound in seconds. Ends when the bound is met."""
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
    """The best assignment of the same groups of experts to GPUs; unchanged unless every GPU has slots for the largest group."""
    if np.bincount(gpu_E, minlength=len(slots_G)).max() > slots_G.min():
        return gpu_E
    return np.argsort(problem.best_assignment(gpu_E))[gpu_E]
