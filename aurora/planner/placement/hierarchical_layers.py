"""Placement of one model over servers, for hierarchical all-to-alls: a token crosses once to each server that it needs."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from aurora.planner.alltoall.hierarchical import hierarchical_rows, step_rows
from aurora.planner.layers_in_threads import Progress, of_layers, untold
from aurora.planner.network.lower_bounds import spread, spread_split
from aurora.planner.network.routes import Routes, route
from aurora.planner.placement.coactivation import coactivation_counts, deduplicated_bound, distinct_tokens
from aurora.planner.placement.cost_model import OWN, LayerCosts, expected_costs, layer_costs
from aurora.planner.placement.objective import formula
from aurora.planner.placement.placed_models import PlacedModels, unreplicated
from aurora.planner.placement.server_search import NONE, Limits, server_search
from aurora.planner.placement.slot_counts import slots_G
from aurora.planner.workload.forecast import Forecast, layer_forecast
from aurora.planner.workload.serving_gpus import served_split, serving_gpus
from aurora.types import Cluster, Hierarchy, Network, Placement, PlanOptions, Profile
from aurora.types.arrays import FloatArray, IntArray

GPU_LOAD = 1.02  # of the fullest GPU where placement looks at load alone
SERVER_LOAD = 1.05  # of the mean server


class ServerLayer(NamedTuple):
    """One layer's placement, its seconds, and a bound on them."""

    placement: Placement
    objective_s: float
    bound_s: float


def place_hierarchical(
    cluster: Cluster,
    profile: Profile,
    start: PlacedModels,
    options: PlanOptions,
    hierarchy: Hierarchy,
    progress: Progress = untold,
) -> PlacedModels:
    """Places one model whose all-to-alls are hierarchical, by server search.

    Each layer starts from `start`, which balances load alone. Experts that the same tokens choose then come to one server, as
    long as no GPU takes more than GPU_LOAD times the fullest one's seconds at the start, and no server more than SERVER_LOAD
    times the mean. The loads are those of the forecast, or as recorded if `options.aim` is "own". A layer keeps its start where
    that is as fast.

    Args:
        cluster: the GPUs.
        profile: the model's traffic, with token-level routing.
        start: an unreplicated placement of the model.
        options: `options.slots_per_gpu` limits the experts of a GPU.
        hierarchy: the servers, and the chunks of an all-to-all.
        progress: told of every layer that is placed.

    Raises:
        BadInput: if the profile holds no token-level routing.
        InfeasiblePlan: if the experts do not fit.
    """
    capacity_G = slots_G(cluster, profile, options)
    routes = route(cluster.network)

    def placed(layer: int) -> ServerLayer:
        costs = layer_costs(cluster, profile, layer, deduplicated=True)
        forecast = layer_forecast([profile], layer, summed=True)
        expected = costs
        if options.aim != OWN:
            expected = expected_costs(cluster, profile, forecast.expected_WSE, forecast.windows_W, 1)
        start_E = start.placements_M[0].gpu_E(layer)
        limits = _limits(expected, start_E, capacity_G, hierarchy, np.zeros(len(cluster)))
        rng = np.random.default_rng((options.seed, layer))
        gpu_E, value_s = _searched(costs, forecast, limits, start_E, hierarchy, routes, rng)
        least_s = server_bound_s(costs, profile.top_k, hierarchy, capacity_G, cluster.network)
        return ServerLayer(unreplicated(gpu_E, len(cluster)), value_s, min(least_s, value_s))

    layers = of_layers(placed, profile.layers, "placing experts over servers", progress)
    return PlacedModels(
        (Placement.stack([layer.placement for layer in layers]),),
        sum(layer.objective_s for layer in layers),
        sum(layer.bound_s for layer in layers),
        None,
        deduplicated=True,
    )


def place_colocated_over_servers(
    cluster: Cluster,
    profiles: Sequence[Profile],
    start: PlacedModels,
    options: PlanOptions,
    hierarchy_M: Sequence[Hierarchy],
    progress: Progress = untold,
) -> PlacedModels:
    """Places models that share every GPU and whose all-to-alls are hierarchical, one model after the other, by server search.

    A GPU holds as many experts of each model as in `start`. The limits are those of `place_hierarchical`, on the seconds of all
    models together.

    Args:
        cluster: the GPUs.
        profiles: one profile for each model, two or more, with token-level routing.
        start: the models' placements.
        options: resolved; `options.objective` says how the seconds of models add up.
        hierarchy_M: of each model, the servers and the chunks of an all-to-all.
        progress: told of every layer that is placed.
    """
    routes, placements, gpus = route(cluster.network), list(start.placements_M), len(cluster)
    costs_ML = [[layer_costs(cluster, each, layer, deduplicated=True) for layer in range(each.layers)] for each in profiles]
    for model, (profile, hierarchy) in enumerate(zip(profiles, hierarchy_M, strict=True)):

        def placed(layer: int, model: int = model, profile: Profile = profile, hierarchy: Hierarchy = hierarchy) -> Placement:
            others = [other for other in range(len(profiles)) if other != model]
            at_M = [layer % each.layers for each in profiles]
            beside_s_G = sum(
                (_gpu_seconds(costs_ML[other][at_M[other]], placements[other].gpu_E(at_M[other])) for other in others),
                start=np.zeros(gpus),
            )
            costs, start_E = costs_ML[model][layer], placements[model].gpu_E(layer)
            forecast = layer_forecast([profile], layer, summed=True)
            limits = _limits(costs, start_E, np.bincount(start_E, minlength=gpus), hierarchy, beside_s_G)
            rng = np.random.default_rng((options.seed, model, layer))
            return unreplicated(_searched(costs, forecast, limits, start_E, hierarchy, routes, rng)[0], gpus)

        placements[model] = Placement.stack(of_layers(placed, profile.layers, "placing experts over servers", progress))
    sums, objective_s = formula(options.objective, len(profiles)), 0.0
    for layer in range(max(each.layers for each in profiles)):
        at_M = [layer % each.layers for each in profiles]
        times_M = [
            layer_costs(cluster, each, at).phase_times(placement.split_EG(at))
            for each, placement, at in zip(profiles, placements, at_M, strict=True)
        ]
        objective_s += sums.seconds(times_M)
    return PlacedModels(tuple(placements), objective_s, start.bound_s, None)


def price_hierarchical(
    cluster: Cluster, profile: Profile, placement: Placement, options: PlanOptions, hierarchy: Hierarchy
) -> PlacedModels:
    """Returns a given placement of one model with its seconds in hierarchical all-to-alls, and their bound.

    Args:
        cluster: the GPUs.
        profile: the model's traffic, with token-level routing.
        placement: the placement, which the bound does not depend on.
        options: `options.slots_per_gpu` limits the experts of a GPU in other placements.
        hierarchy: the servers, and the chunks of an all-to-all.
    """
    capacity_G, routes = slots_G(cluster, profile, options), route(cluster.network)
    objective_s = bound_s = 0.0
    for layer in range(profile.layers):
        costs = layer_costs(cluster, profile, layer, deduplicated=True)
        value_s = hierarchical_seconds(costs, placement.split_EG(layer), hierarchy, routes)
        objective_s += value_s
        bound_s += min(server_bound_s(costs, profile.top_k, hierarchy, capacity_G, cluster.network), value_s)
    return PlacedModels((placement,), objective_s, bound_s, None, deduplicated=True)


def hierarchical_seconds(costs: LayerCosts, split_EG: FloatArray, hierarchy: Hierarchy, routes: Routes) -> float:
    """Returns the seconds of a layer of one model whose all-to-alls are hierarchical, phase after phase, as in Eq. 1.

    A step of an all-to-all takes as long as the busiest port, NIC or link. So a step takes the larger of the NICs' time and the
    time inside the servers, and the first and the last step are the parts of the hops that do not overlap.

    Args:
        costs: one layer, with deduplicated tokens.
        split_EG: (E, G) float64, the share of each expert's tokens that each GPU takes, as in `server_split`.
        hierarchy: the servers, and the chunks of an all-to-all.
        routes: of the network.
    """
    assert costs.routing is not None, "layer_costs counts deduplicated tokens"
    experts_UK, source_U = costs.routing
    rank_UK = serving_gpus(experts_UK, source_U, split_EG, hierarchy.server_G)
    steps_SGG = step_rows(hierarchical_rows(rank_UK, source_U, hierarchy), hierarchy)
    there_s = sum(routes.seconds(rows_GG * costs.dispatch_bytes) for rows_GG in steps_SGG)
    back_s = sum(routes.seconds(rows_GG.T * costs.combine_bytes) for rows_GG in steps_SGG)
    computed_s = float(_served_seconds(costs, split_EG, hierarchy).max())
    return float(costs.gate_s_WG.max() + there_s + computed_s + back_s + costs.aggregate_s_WG.max())


def server_bound_s(costs: LayerCosts, top_k: int, hierarchy: Hierarchy, slots_G: IntArray, network: Network) -> float:
    """Returns a lower bound on the seconds of a layer by the cuts around servers, for all placements within the slots.

    What a server sends and receives crosses its NICs. It sends at least the tokens that cannot find all of their experts there.
    Where no slot is left for replicas, it receives at least what `deduplicated_bound` says of a GPU with all of its slots.

    Args:
        costs: one layer, with deduplicated tokens.
        top_k: experts per token.
        hierarchy: the servers.
        slots_G: (G,) int64, how many experts each GPU can hold.
        network: gives the rates of the NICs; without a fabric of servers, ports are NICs.
    """
    assert costs.routing is not None, "layer_costs counts deduplicated tokens"
    (experts_UK, source_U), expert_s_GE = costs.routing, costs.expert_s_WGE[0]
    server_G, servers, experts = hierarchy.server_G, hierarchy.servers, expert_s_GE.shape[1]
    tokens = distinct_tokens(experts_UK, server_G[source_U])
    counts_NEE = coactivation_counts(*tokens, experts, servers)
    slots_N = np.bincount(server_G, weights=slots_G).astype(np.int64)
    out_Bps_N, in_Bps_N = (np.bincount(server_G, weights=Bps_G) for Bps_G in (costs.out_Bps, costs.in_Bps))
    fabric = network.fabric
    if fabric is not None and fabric.nic_Bps is not None:
        nics_N = np.ones(servers) if fabric.shared_nic else np.bincount(server_G)
        out_Bps_N, in_Bps_N = (np.minimum(Bps_N, fabric.nic_Bps * nics_N) for Bps_N in (out_Bps_N, in_Bps_N))
    dispatch_bytes, combine_bytes, spare = costs.dispatch_bytes, costs.combine_bytes, slots_G.sum() > experts
    came_bytes, back_bytes = (0, 0) if spare else (dispatch_bytes, combine_bytes)
    nic_s_XN = np.stack([dispatch_bytes / out_Bps_N, came_bytes / in_Bps_N, back_bytes / out_Bps_N, combine_bytes / in_Bps_N])
    moved_s = deduplicated_bound(counts_NEE, top_k, slots_N, np.zeros((servers, experts)), np.zeros(servers), nic_s_XN)
    computed_s = (spread_split if spare else spread)(expert_s_GE)
    return float(costs.gate_s_WG.max()) + moved_s + computed_s + float(costs.aggregate_s_WG.max())


def _searched(
    costs: LayerCosts,
    forecast: Forecast,
    limits: Limits,
    start_E: IntArray,
    hierarchy: Hierarchy,
    routes: Routes,
    rng: np.random.Generator,
) -> tuple[IntArray, float]:
    """(E,) the GPU of each expert after a server search, and the layer's seconds; the start where that is as fast."""
    found_E = server_search(*_tokens(costs, forecast, hierarchy), limits, start_E, rng)
    every_GG = np.eye(hierarchy.ranks)
    start_s, found_s = (hierarchical_seconds(costs, every_GG[gpu_E], hierarchy, routes) for gpu_E in (start_E, found_E))
    return (found_E, found_s) if found_s < start_s else (start_E, start_s)


def _limits(costs: LayerCosts, start_E: IntArray, slots_G: IntArray, hierarchy: Hierarchy, beside_s_G: FloatArray) -> Limits:
    """What the search is held to, by the seconds of the start and of an even division over servers."""
    gpu_s_GE = np.ascontiguousarray(costs.expert_s_WGE.sum(axis=0))
    server_s_NE = _divided(gpu_s_GE, hierarchy)
    beside_s_N = np.bincount(hierarchy.server_G, weights=beside_s_G) / np.bincount(hierarchy.server_G)
    return Limits(
        hierarchy.server_G.copy(),  # locked arrays would compile a second version of the search
        slots_G.copy(),
        gpu_s_GE,
        server_s_NE,
        GPU_LOAD * float((beside_s_G + _gpu_seconds(costs, start_E)).max()),
        SERVER_LOAD * (spread_split(server_s_NE) + float(beside_s_G.mean())),
        beside_s_G,
        beside_s_N,
    )


def _gpu_seconds(costs: LayerCosts, gpu_E: IntArray) -> FloatArray:
    """(G,) seconds of the experts on each GPU, in all scenarios."""
    gpu_s_GE = costs.expert_s_WGE.sum(axis=0)
    return np.asarray(np.bincount(gpu_E, gpu_s_GE[gpu_E, np.arange(len(gpu_E))], len(gpu_s_GE)), dtype=np.float64)


def _served_seconds(costs: LayerCosts, split_EG: FloatArray, hierarchy: Hierarchy) -> FloatArray:
    """(G,) seconds of what each GPU serves in hierarchical all-to-alls, in all scenarios."""
    served_EG = served_split(costs.own_WGE.sum(axis=0), split_EG, hierarchy.server_G)
    return np.asarray(np.einsum("ge,eg->g", costs.expert_s_WGE.sum(axis=0), served_EG))


def _divided(gpu_s_GE: FloatArray, hierarchy: Hierarchy) -> FloatArray:
    """(N, E) seconds of each expert on each server, if it is divided over the server's GPUs so that all take equally long."""
    with np.errstate(divide="ignore", over="ignore"):
        speed_GE = 1 / gpu_s_GE
        return np.stack([1 / speed_GE[hierarchy.server_G == server].sum(axis=0) for server in range(hierarchy.servers)])


def _tokens(costs: LayerCosts, forecast: Forecast, hierarchy: Hierarchy) -> tuple[IntArray, IntArray]:
    """(U, K) the experts of tokens and (U,) the server that each starts on, which counts if sources' preferences come again."""
    assert costs.routing is not None, "layer_costs counts deduplicated tokens"
    experts_UK, source_U = costs.routing
    lasting = bool((forecast.affinity_SE != 1).any())
    return experts_UK, hierarchy.server_G[source_U] if lasting else np.full(len(source_U), NONE)
