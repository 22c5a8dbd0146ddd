"""Placement over servers, for hierarchical all-to-alls: a token crosses once to each server that it needs."""

from collections.abc import Sequence

import numpy as np

from aurora.planner.layers_in_threads import Progress, of_layers, untold
from aurora.planner.network.bounds import spread_split
from aurora.planner.placement.bounds import hierarchical_bound_s, server_counts
from aurora.planner.placement.cost_model import LayerCosts
from aurora.planner.placement.objective import exclusive, seconds
from aurora.planner.placement.placed_models import PlacedModels, unreplicated
from aurora.planner.placement.profile_costs import OWN, expected_costs, layer_costs
from aurora.planner.placement.server_search import NONE, Homes, Limits, levelled, server_replicas, server_search, some_tokens
from aurora.planner.placement.slot_counts import even_slots, memory_slots_G, replicas_fit, slots_G
from aurora.planner.replication.registry import REPLICAS, ReplicaStrategy
from aurora.planner.workload.estimated_rows import CountedTokens
from aurora.planner.workload.forecast import Forecast, layer_forecast
from aurora.planner.workload.serving_gpus import from_servers, served_split
from aurora.types import Cluster, Hierarchy, Placement, PlanOptions, Profile
from aurora.types.arrays import FloatArray, IntArray

GPU_LOAD = 1.02  # of the fullest GPU where placement looks at load alone
SERVER_LOAD = 1.05  # of the mean server
LEVEL = 0.995  # of the fullest GPU's limit that a server takes with replicas, so that its GPUs can be levelled below it
SPARE = (1.0, 0.5, 0.0)  # parts of a server's spare slots that are tried for replicas of experts from other servers


def place_hierarchical(
    cluster: Cluster,
    profile: Profile,
    start: PlacedModels,
    options: PlanOptions,
    hierarchy: Hierarchy,
    progress: Progress = untold,
) -> Placement:
    """Places one model whose all-to-alls are hierarchical, by server search.

    Each layer starts from `start`, which balances load alone. Experts that the same tokens choose then come to one server, as
    long as no GPU takes more than GPU_LOAD times the fullest one's seconds at the start, and no server more than SERVER_LOAD
    times the mean. The loads are those of the forecast, or as recorded if `options.aim` is "own". A layer keeps its start where
    that is as fast.

    If `options.place` puts replicas into spare slots, some of them are of experts that a server's own tokens choose
    (`server_replicas`), and the rest level its GPUs; it is tried how many. With `options.min_replicas` the replicas of an
    expert come to different servers first.

    Args:
        cluster: the GPUs.
        profile: the model's traffic, with token-level routing.
        start: a placement of the model; unreplicated unless `options` ask for replicas.
        options: `options.slots_per_gpu` limits the experts of a GPU.
        hierarchy: the servers, and the chunks of an all-to-all.
        progress: told of every layer that is placed.

    Raises:
        BadInput: if the profile holds no token-level routing.
        InfeasiblePlan: if the experts do not fit.
    """
    profile.required_routing  # noqa: B018
    capacity_G = slots_G(cluster, profile, options)
    replicated = "equal-split" if options.min_replicas is not None else options.place
    make = REPLICAS[replicated].make if replicated in REPLICAS else None

    def placed(layer: int) -> Placement:
        costs = layer_costs(cluster, profile, layer, deduplicated=True)
        forecast = layer_forecast([profile], layer, summed=True)
        expected = costs
        if options.aim != OWN:
            expected = expected_costs(cluster, profile, forecast.expected_WSE, forecast.windows_W, 1)
        begun, rng = start.placements_M[0].layer(layer), np.random.default_rng((options.seed, layer))
        start_E = begun.split_EG(0).argmax(axis=1)
        limits = _limits(expected, start_E, capacity_G, hierarchy, np.zeros(len(cluster)))
        if make is None:
            return unreplicated(_searched(costs, forecast, limits, start_E, hierarchy, rng), len(cluster))
        tokens = _tokens(costs, forecast, hierarchy)
        candidates = _replicated(expected, tokens, limits, begun, hierarchy, options.min_replicas or 1, make, rng)
        return min(candidates, key=lambda each: exclusive(costs.phase_times(each.split_EG(0), hierarchy)))

    return Placement.stack(of_layers(placed, profile.layers, "placing experts over servers", progress))


def place_colocated_over_servers(
    cluster: Cluster,
    profiles: Sequence[Profile],
    start: PlacedModels,
    options: PlanOptions,
    hierarchy_M: Sequence[Hierarchy],
    progress: Progress = untold,
) -> list[Placement]:
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
    placements, gpus = list(start.placements_M), len(cluster)
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
            return unreplicated(_searched(costs, forecast, limits, start_E, hierarchy, rng), gpus)

        placements[model] = Placement.stack(of_layers(placed, profile.layers, "placing experts over servers", progress))
    return placements


def price_hierarchical(
    cluster: Cluster,
    profiles: Sequence[Profile],
    placements: Sequence[Placement],
    options: PlanOptions,
    hierarchy_M: Sequence[Hierarchy],
    progress: Progress = untold,
) -> PlacedModels:
    """Returns given placements with their seconds in hierarchical all-to-alls, and bounds of all placements.

    The assignment bound is that of all placements that hold every expert once.

    Args:
        cluster: the GPUs.
        profiles: one profile for each model, with token-level routing.
        placements: one for each model; the bound does not depend on them.
        options: `options.objective` says how the seconds of models add up, `options.slots_per_gpu` limits the experts of a GPU
            in other placements of one model.
        hierarchy_M: of each model, the servers and the chunks of an all-to-all.
        progress: told of every layer that is priced.
    """
    if len(profiles) == 1:
        slots_MG, replicas = [slots_G(cluster, profiles[0], options)], True
    else:
        slots_MG = [memory_slots_G(cluster, [each, *profiles[:m], *profiles[m + 1 :]]) for m, each in enumerate(profiles)]
        replicas = replicas_fit(cluster, profiles)

    def priced(layer: int) -> tuple[float, float, float]:
        at_M = [layer % each.layers for each in profiles]
        costs_M = [layer_costs(cluster, each, at, deduplicated=True) for each, at in zip(profiles, at_M, strict=True)]
        times_M = [
            costs.phase_times(placement.split_EG(at), hierarchy)
            for costs, placement, at, hierarchy in zip(costs_M, placements, at_M, hierarchy_M, strict=True)
        ]
        counts_M, top_k_M = [server_counts(costs) for costs in costs_M], [each.top_k for each in profiles]
        value_s = seconds(options.objective, times_M, nics=True)
        given = options.objective, costs_M, counts_M, top_k_M, slots_MG
        bound_s, unreplicated_s = (min(hierarchical_bound_s(*given, allowed), value_s) for allowed in (replicas, False))
        return value_s, bound_s, unreplicated_s

    layers = of_layers(priced, max(each.layers for each in profiles), "bounding layers over servers", progress)
    objective_s, bound_s, unreplicated_s = (sum(column) for column in zip(*layers, strict=True))
    once = all(placement.split_LG is None for placement in placements)
    return PlacedModels(tuple(placements), objective_s, bound_s, unreplicated_s if once else None, deduplicated=True)


def _searched(
    costs: LayerCosts,
    forecast: Forecast,
    limits: Limits,
    start_E: IntArray,
    hierarchy: Hierarchy,
    rng: np.random.Generator,
) -> IntArray:
    """(E,) the GPU of each expert after a server search; the start where that is as fast."""
    found_E = server_search(*_tokens(costs, forecast, hierarchy), limits, start_E, rng)
    each_GG = np.eye(len(limits.slots_G))
    start_s, found_s = (exclusive(costs.phase_times(each_GG[gpu_E], hierarchy)) for gpu_E in (start_E, found_E))
    return found_E if found_s < start_s else start_E


def _replicated(
    expected: LayerCosts,
    tokens: tuple[IntArray, IntArray],
    limits: Limits,
    begun: Placement,
    hierarchy: Hierarchy,
    least: int,
    make: ReplicaStrategy,
    rng: np.random.Generator,
) -> list[Placement]:
    """Placements of a layer with replicas: the start, and those within its limits that spend slots on rows or on load.

    The server search leaves equally many slots on every GPU. Replicas are chosen after it, so only servers limit it, not GPUs
    with an expert of much load.
    """
    full_s = GPU_LOAD * float(np.einsum("wge,eg->g", expected.expert_s_WGE, begun.split_EG(0)).max())
    servers_only = limits._replace(most_gpu_s=np.inf, most_server_s=min(limits.most_server_s, LEVEL * full_s))
    even_G = even_slots(begun.experts, limits.slots_G)
    start_E = np.repeat(np.arange(hierarchy.ranks), even_G)
    gpu_E = server_search(*tokens, servers_only._replace(slots_G=even_G), start_E, rng)
    from_NE = from_servers(expected.own_WGE.sum(axis=0), hierarchy.server_G)
    layer, found = Homes(*some_tokens(*tokens, rng), servers_only, hierarchy.server_G[gpu_E], from_NE), [begun]
    for part in SPARE:
        share_NE = server_replicas(layer, (part * layer.spare_N).astype(np.int64), least)
        if share_NE is not None:
            placement = levelled(layer, share_NE, make, rng)
            if _served_seconds(expected, placement.split_EG(0), hierarchy).max() <= full_s:
                found.append(placement)
    return found


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
    return np.asarray(np.einsum("wge,eg->g", costs.expert_s_WGE, served_EG))


def _divided(gpu_s_GE: FloatArray, hierarchy: Hierarchy) -> FloatArray:
    """(N, E) seconds of each expert on each server, if it is divided over the server's GPUs so that all take equally long."""
    with np.errstate(divide="ignore", over="ignore"):
        speed_GE = 1 / gpu_s_GE
        return np.stack([1 / speed_GE[hierarchy.server_G == server].sum(axis=0) for server in range(hierarchy.servers)])


def _tokens(costs: LayerCosts, forecast: Forecast, hierarchy: Hierarchy) -> tuple[IntArray, IntArray]:
    """(U, K) the experts of tokens and (U,) the server that each starts on, which counts if sources' preferences come again."""
    assert costs.routing is not None, "layer_costs counts deduplicated tokens"
    assert not isinstance(costs.routing, CountedTokens), "counts alone do not tell which experts tokens chose together"
    experts_UK, source_U = costs.routing
    lasting = bool((forecast.affinity_SE != 1).any())
    return experts_UK, hierarchy.server_G[source_U] if lasting else np.full(len(source_U), NONE)
