"""Placement of one model whose tokens are deduplicated: a token is sent once to a GPU that holds several of its experts."""

from collections.abc import Sequence

import numpy as np

from aurora.errors import BadInput
from aurora.planner.placement.assignment import ASSIGN, best_exclusive_s
from aurora.planner.placement.bounds import deduplicated_bound, layer_bound_s
from aurora.planner.placement.coactivation import (
    coactivation_counts,
    coactivation_groups,
    coactivation_search,
    distinct_tokens,
)
from aurora.planner.placement.cost_model import LayerCosts
from aurora.planner.placement.exclusive_layers import SWAP_SEARCH
from aurora.planner.placement.objective import exclusive
from aurora.planner.placement.placed_models import PlacedModels, unreplicated
from aurora.planner.placement.profile_costs import OWN, layer_costs
from aurora.planner.placement.slot_counts import slots_G
from aurora.types import Cluster, Placement, PlanOptions, Profile
from aurora.types.arrays import IntArray


def coactivation_reason(options: PlanOptions, profiles: Sequence[Profile], domains: Sequence[Profile]) -> str | None:
    """Returns why `coactivation` does not go with the other options, the models or their profiles; None if it does."""
    if len(profiles) > 1:
        return f"is for a plan of one model, found {len(profiles)} models that share the GPUs"
    for taken, what in (
        (options.place not in ("auto", SWAP_SEARCH), f"`place` {options.place}"),
        (options.assign not in ("auto", "exact"), f"`assign` {options.assign}"),
        (options.aim not in ("auto", OWN), f"`aim` {options.aim}"),
        (options.min_replicas is not None, "`min_replicas`, as it holds no replicas"),
        (bool(domains), "`domain`"),
    ):
        if taken:
            return f"expected no {what}; it is a placement for the sum of one profile's windows"
    try:
        profiles[0].required_routing  # noqa: B018
    except BadInput as error:
        return str(error)
    return None


def place_deduplicated(
    cluster: Cluster, profile: Profile, start: PlacedModels, options: PlanOptions, rng: np.random.Generator
) -> PlacedModels:
    """Places one model for deduplicated tokens by co-activation local search.

    The search moves and swaps single experts. It starts from `start` and from groups of experts that the same tokens choose.
    With deduplicated tokens the result never takes longer than `start`.

    Args:
        cluster: the GPUs.
        profile: the model's traffic, with token-level routing.
        start: an unreplicated placement of the model.
        options: `options.slots_per_gpu` limits the experts of a GPU.
        rng: for restarts of the search.

    Raises:
        BadInput: if the profile holds no token-level routing.
        InfeasiblePlan: if the experts do not fit.
    """
    capacity_G = slots_G(cluster, profile, options)
    placements: list[Placement] = []
    objective_s = bound_s = assignment_bound_s = 0.0
    for layer in range(profile.layers):
        costs = layer_costs(cluster, profile, layer, deduplicated=True)
        gpu_E, least_s = _place_layer(costs, profile.top_k, start.placements_M[0].gpu_E(layer), capacity_G, rng)
        value_s = _seconds(costs, gpu_E)
        with_replicas_s = layer_bound_s(layer_costs(cluster, profile, layer), capacity_G)  # replicas cost deduplication
        objective_s += value_s
        bound_s += min(least_s, with_replicas_s, value_s)
        assignment_bound_s += min(best_exclusive_s(costs.grouped(gpu_E)), value_s)
        placements.append(unreplicated(gpu_E, len(cluster)))
    return PlacedModels((Placement.stack(placements),), objective_s, bound_s, assignment_bound_s, deduplicated=True)


def _seconds(costs: LayerCosts, gpu_E: IntArray) -> float:
    """The seconds of Eq. 1 with expert e on GPU gpu_E[e]."""
    return exclusive(costs.phase_times(np.eye(len(costs.out_Bps))[gpu_E]))


def _place_layer(
    layer: LayerCosts, top_k: int, start_E: IntArray, slots_G: IntArray, rng: np.random.Generator
) -> tuple[IntArray, float]:
    """(E,) int64, the best placement found, never longer than start_E; and a bound in seconds. Ends when the bound is met."""
    assert layer.routing is not None, "layer_costs counts deduplicated tokens"
    tokens = distinct_tokens(*layer.routing)
    counts_SEE = coactivation_counts(*tokens, len(start_E), len(slots_G))
    costs = layer.expert_s_WGE[0], layer.gate_s_WG[0]
    least_s = deduplicated_bound(counts_SEE, top_k, slots_G, *costs, layer.port_s_XG) + float(layer.aggregate_s_WG.max())
    groups_E = coactivation_groups(counts_SEE.sum(axis=0), slots_G)
    best_E, best_s = start_E, _seconds(layer, start_E)
    for begun_E in (start_E, _reassigned(layer, groups_E, slots_G)):
        if best_s <= least_s * (1 + 1e-9):
            break
        searched_E = coactivation_search(*tokens, begun_E, slots_G, *costs, layer.nics_as_ports.port_s_XG, rng)
        for found_E in (searched_E, _reassigned(layer, searched_E, slots_G)):
            if (found_s := _seconds(layer, found_E)) < best_s:
                best_E, best_s = found_E, found_s
    return best_E, least_s


def _reassigned(layer: LayerCosts, gpu_E: IntArray, slots_G: IntArray) -> IntArray:
    """The best assignment of the same groups of experts to GPUs; unchanged unless every GPU has slots for the largest group."""
    if np.bincount(gpu_E, minlength=len(slots_G)).max() > slots_G.min():
        return gpu_E
    return np.argsort(ASSIGN["exact"](layer.nics_as_ports.grouped(gpu_E), np.random.default_rng(0)))[gpu_E]
