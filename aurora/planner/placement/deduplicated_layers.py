"""Where the experts of one model sit when tokens that choose several experts of a GPU travel to it once."""

from collections.abc import Sequence

import numpy as np

from aurora.errors import BadInput
from aurora.planner.placement import objective
from aurora.planner.placement.assignment import ASSIGN
from aurora.planner.placement.coactivation import chosen_together, clustered, deduplicated_bound, merged
from aurora.planner.placement.coactivation_search import gathered
from aurora.planner.placement.cost_model import expert_seconds, group_costs
from aurora.planner.placement.layers import REFINED, PlacedModels, slots_G, unreplicated
from aurora.types import Cluster, Placement, PlanOptions, Profile
from aurora.types.arrays import IntArray


def check_coactivation(options: PlanOptions, profiles: Sequence[Profile], domains: Sequence[Profile]) -> None:
    """BadInput unless there is one model alone, planned for the sum of one profile's windows, with token-level routing."""
    if len(profiles) > 1:
        raise BadInput("`coactivation`: expected one model alone, found two that share the GPUs")
    for taken, what in (
        (options.place not in ("auto", REFINED), f"`place` {options.place}"),
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
    """One model, a token counted once a GPU: never longer than the placement of `start`, which is `REFINED`, counted so.

    From there and from groups of experts that tokens choose together, single experts are moved and swapped.
    """
    room_G = slots_G(cluster, profile, options)
    placements: list[Placement] = []
    objective_s = bound_s = free_bound_s = 0.0
    for layer in range(profile.layers):
        gpu_E, least_s = _layer(cluster, profile, layer, start.placements_M[0].gpu_E(layer), room_G, rng)
        value_s = deduplicated_seconds(cluster, profile, layer, gpu_E)
        free_s = min(least_s, value_s)
        costs = group_costs(cluster, profile, layer, gpu_E, deduplicated=True)
        same_groups_s = objective.exclusive(costs.terms(ASSIGN["exact"](costs, rng)))
        objective_s += value_s
        free_bound_s += free_s
        bound_s += max(min(same_groups_s, value_s), free_s)
        placements.append(unreplicated(gpu_E, len(cluster)))
    return PlacedModels((Placement.stack(placements),), objective_s, bound_s, free_bound_s, deduplicated=True)


def deduplicated_seconds(cluster: Cluster, profile: Profile, layer: int, gpu_E: IntArray) -> float:
    """Seconds of Eq. 1 with expert e on GPU gpu_E[e], a token counted once a GPU. Source: Aurora Eq. 1."""
    costs = group_costs(cluster, profile, layer, gpu_E, deduplicated=True)
    return objective.exclusive(costs.terms(np.arange(len(cluster))))


def _layer(
    cluster: Cluster, profile: Profile, layer: int, start_E: IntArray, room_G: IntArray, rng: np.random.Generator
) -> tuple[IntArray, float]:
    """(E,) int64: the best that is found from start_E and from groups, never longer than start_E; and a bound in seconds.

    A search ends where the bound is met.
    """
    tokens = merged(*profile.required_routing.layer(layer))
    together_SEE = chosen_together(*tokens, profile.experts, len(cluster))
    costs = group_costs(cluster, profile, layer, start_E, deduplicated=True)
    work_GE = expert_seconds(cluster, profile, layer)
    least_s = deduplicated_bound(
        together_SEE, profile.top_k, room_G, work_GE, costs.gate_s_G, costs.aggregate_s_G, costs.port_s_XG
    )
    groups_E = clustered(together_SEE.sum(axis=0), room_G)
    best_E, best_s = start_E, deduplicated_seconds(cluster, profile, layer, start_E)
    for begun_E in (start_E, _settled(cluster, profile, layer, groups_E, room_G, rng)):
        if best_s <= least_s * (1 + 1e-9):
            break
        searched_E = gathered(*tokens, begun_E, room_G, work_GE, costs.gate_s_G, costs.port_s_XG, rng)
        for found_E in (searched_E, _settled(cluster, profile, layer, searched_E, room_G, rng)):
            if (found_s := deduplicated_seconds(cluster, profile, layer, found_E)) < best_s:
                best_E, best_s = found_E, found_s
    return best_E, least_s


def _settled(
    cluster: Cluster, profile: Profile, layer: int, gpu_E: IntArray, room_G: IntArray, rng: np.random.Generator
) -> IntArray:
    """The same groups on the GPUs that suit them best, where every GPU has room for any of them."""
    if np.bincount(gpu_E, minlength=len(cluster)).max() > room_G.min():
        return gpu_E
    held_G = ASSIGN["exact"](group_costs(cluster, profile, layer, gpu_E, deduplicated=True), rng)
    return np.argsort(held_G)[gpu_E]
