"""Where experts sit: each layer of one model alone, or of two models that share the GPUs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from aurora.errors import BadInput, InfeasiblePlan
from aurora.planner.network.lower_bounds import spread
from aurora.planner.placement import objective
from aurora.planner.placement.assignment import ASSIGN
from aurora.planner.placement.colocation import COLOCATE
from aurora.planner.placement.colocation_problem import ColocationProblem
from aurora.planner.placement.cost_model import GroupCosts, group_costs
from aurora.planner.placement.grouping import PLACE
from aurora.planner.placement.lp_relaxation import proved
from aurora.planner.placement.scenarios import Scenarios, by_aim, scenarios, tail_mean
from aurora.planner.placement.swap_search import refined
from aurora.planner.replication.failure_resilient import SURVIVE, aim_of
from aurora.planner.replication.registry import REPLICAS, best_divided, place
from aurora.planner.replication.replica_counts import allocate, capped
from aurora.types import Cluster, FailureDomains, GpuSlots, Placement, PlanOptions, Profile
from aurora.types.arrays import FloatArray, IntArray

REFINED = "refined"


@dataclass(frozen=True)
class PlacedModels:
    """A placement of each model. Seconds: the objective, and its bounds as in Plan. once: a token counts once a GPU."""

    placements_M: tuple[Placement, ...]
    objective_s: float
    bound_s: float
    free_bound_s: float
    deduplicated: bool = False


def memory_room_G(cluster: Cluster, profiles: Sequence[Profile]) -> IntArray:
    """(G,) int64: how many experts of profiles[0] in every layer fit on each GPU beside all other weights.

    Raises InfeasiblePlan where not even those fit.
    """
    profile, others = profiles[0], sum(p.other_bytes for p in profiles)
    slot_bytes = profile.expert_bytes * profile.layers
    spare_G = np.array([gpu.memory_bytes - others for gpu in cluster.gpus])
    if (spare_G < 0).any():
        weakest = cluster.gpus[int(spare_G.argmin())]
        raise InfeasiblePlan(
            f"gpu {weakest.name!r}: {weakest.memory_bytes} bytes of memory, but the weights outside experts need {others}"
        )
    return np.minimum(spare_G // slot_bytes, profile.experts) if slot_bytes else np.full(len(spare_G), profile.experts)


def place_alone(
    cluster: Cluster, profile: Profile, domains: Sequence[Profile], options: PlanOptions, rng: np.random.Generator
) -> PlacedModels:
    """One model. domains: what else it must serve, profiles of the same model; how they count is options.aim."""
    room_G = slots_G(cluster, profile, options)
    placements: list[Placement] = []
    objective_s = bound_s = free_bound_s = 0.0
    for layer in range(profile.layers):
        costs, worst = by_aim(cluster, profile, domains, layer, options.aim)
        placement = _layer(cluster, profile, layer, costs, worst, room_G, options, rng)
        split_EG = placement.split_EG(0)
        value_s = tail_mean(costs.seconds(split_EG), worst)
        free_s = min(tail_mean(costs.bounds(options.place in (*REPLICAS, *SURVIVE)), worst), value_s)
        objective_s += value_s
        free_bound_s += free_s
        plain = placement.split_LG is None and len(costs.own_WGE) == 1 and not domains
        bound_s += min(_same_groups_s(cluster, profile, layer, placement), value_s) if plain else free_s
        placements.append(placement)
    return PlacedModels((Placement.stack(placements),), objective_s, bound_s, free_bound_s)


def slots_G(cluster: Cluster, profile: Profile, options: PlanOptions) -> IntArray:
    """(G,) int64: the slots of each GPU, as asked for or as memory allows."""
    memory_G = memory_room_G(cluster, [profile])
    if options.slots_per_gpu is None:
        room_G = memory_G
    elif (short_G := memory_G < min(options.slots_per_gpu, profile.experts)).any():
        gpu = int(short_G.argmax())
        raise InfeasiblePlan(
            f"gpu {cluster.gpus[gpu].name!r}: `slots_per_gpu` {options.slots_per_gpu}, but its memory holds {memory_G[gpu]} "
            f"experts of {profile.model!r} in every layer"
        )
    else:
        room_G = np.full(len(cluster), min(options.slots_per_gpu, profile.experts))
    if room_G.sum() < profile.experts:
        raise InfeasiblePlan(
            f"cluster {cluster.name!r} has {room_G.sum()} expert slots a layer for {profile.model!r}, its {profile.experts} "
            f"experts need {profile.experts}"
        )
    return room_G


def _token_s_G(costs: Scenarios) -> FloatArray:
    """(G,) what a token costs on each GPU, to compute and move: 1 on average, or everywhere where it is nothing somewhere."""
    tokens = max(1, int(costs.load_WE.sum()))
    token_s_G = costs.expert_s_WGE.sum(axis=(0, 2)) / tokens + costs.recv_s_G + costs.csend_s_G
    return np.asarray(token_s_G / token_s_G.mean()) if token_s_G.all() else np.ones(len(token_s_G))


def _layer(
    cluster: Cluster,
    profile: Profile,
    layer: int,
    costs: Scenarios,
    worst: int,
    room_G: IntArray,
    options: PlanOptions,
    rng: np.random.Generator,
) -> Placement:
    """The placement of one layer by options.place; with replicas where they make it shorter."""
    if options.place in SURVIVE:
        return _surviving(cluster, costs, room_G, options, rng)
    if options.place not in REPLICAS:
        return _unreplicated(cluster, profile, layer, costs, worst, room_G, options, rng)
    alone = _unreplicated(cluster, profile, layer, costs, worst, room_G, replace(options, place=REFINED), rng)
    cost_G = np.ones(len(cluster)) if options.place == "eplb" else _token_s_G(costs)  # EPLB takes GPUs to be alike
    placed = place(costs.load_WE.sum(axis=0), GpuSlots(room_G, cost_G), options.place, seed=options.seed).placement
    copies = _refined_copies(costs, placed, room_G, worst, REPLICAS[options.place].divided_evenly, rng)
    return min(alone, placed, copies, key=lambda each: tail_mean(costs.seconds(each.split_EG(0)), worst))


def _surviving(
    cluster: Cluster, costs: Scenarios, room_G: IntArray, options: PlanOptions, rng: np.random.Generator
) -> Placement:
    """One layer placed for failures of nodes, no expert twice on a GPU, its load divided as is best."""
    assert options.min_replicas is not None, "who resolves the options sees to it"
    hosts, load_E = hosts_of(cluster, room_G), costs.load_WE.sum(axis=0)
    count_E = capped(allocate(load_E, hosts, options.min_replicas), load_E, len(cluster))
    held_EG = SURVIVE[options.place](count_E, hosts, aim_of(options.min_replicas, hosts), rng)
    return best_divided(held_EG.T, load_E, _token_s_G(costs))


def hosts_of(cluster: Cluster, room_G: IntArray) -> FailureDomains:
    """The GPUs with room_G (G,) slots each, which fail with their nodes; a node's rate is the sum of its GPUs', equal where one
    has none."""
    node_G = np.unique([gpu.node for gpu in cluster.gpus], return_inverse=True)[1]
    rate_G = [gpu.failure_rate for gpu in cluster.gpus if gpu.failure_rate is not None]
    known = len(rate_G) == len(cluster)
    odds_D = np.bincount(node_G, weights=rate_G) if known else np.ones(int(node_G.max()) + 1)
    return FailureDomains(room_G, node_G, odds_D.astype(np.float64))


def _unreplicated(
    cluster: Cluster,
    profile: Profile,
    layer: int,
    costs: Scenarios,
    worst: int,
    room_G: IntArray,
    options: PlanOptions,
    rng: np.random.Generator,
) -> Placement:
    """Every expert on one GPU."""
    own_G = even_rooms(profile.experts, room_G)
    alike = (room_G >= -(-profile.experts // len(cluster))).all()  # any group fits on any GPU
    if not alike and options.place != REFINED:
        raise InfeasiblePlan(
            f"`place` {options.place}: an equal share of {profile.model!r}'s experts does not fit on every GPU; "
            f"`place` {REFINED} gives the larger GPUs more"
        )
    load_E = costs.load_WE.sum(axis=0)
    gpu_E = PLACE["balanced" if options.place == REFINED else options.place](load_E, own_G, rng)
    if alike:
        held_G = ASSIGN[options.assign](group_costs(cluster, profile, layer, gpu_E), rng)
        gpu_E = np.argsort(held_G)[gpu_E]
    if options.place == REFINED:
        gpu_E = refined(costs, gpu_E, room_G, worst, rng)
    return unreplicated(gpu_E, len(cluster))


def _refined_copies(
    costs: Scenarios, placement: Placement, room_G: IntArray, worst: int, evenly: bool, rng: np.random.Generator
) -> Placement:
    """The replicas of one layer, each with its share, moved and swapped as if they were experts; two that meet become one.

    evenly: where some have met, those of one expert share its load evenly again.
    """
    expert_P, gpu_P = (np.array(column) for column in zip(*_copies(placement), strict=True))
    share_P = placement.split_EG(0)[expert_P, gpu_P]
    found_P = refined(costs.divided(expert_P, share_P), gpu_P, room_G, worst, rng)
    split_EG = np.zeros((placement.experts, placement.gpus))
    np.add.at(split_EG, (expert_P, found_P), share_P)
    if evenly:
        split_EG = (split_EG > 0) / (split_EG > 0).sum(axis=1, keepdims=True)
    held = [sorted(set(expert_P[found_P == gpu].tolist())) for gpu in range(placement.gpus)]
    split = [split_EG[experts, gpu].tolist() for gpu, experts in enumerate(held)]
    return Placement((tuple(map(tuple, held)),), (tuple(map(tuple, split)),))


def _copies(placement: Placement) -> list[tuple[int, int]]:
    """(expert, GPU) of each slot of one layer."""
    return [(expert, gpu) for gpu, held in enumerate(placement.slots_LG[0]) for expert in held]


def unreplicated(gpu_E: IntArray, gpus: int) -> Placement:
    """One layer, expert e on GPU gpu_E[e]."""
    return Placement((tuple(tuple(np.flatnonzero(gpu_E == gpu).tolist()) for gpu in range(gpus)),))


def _same_groups_s(cluster: Cluster, profile: Profile, layer: int, placement: Placement) -> float:
    """Seconds of the best assignment of the placement's groups to GPUs."""
    costs = group_costs(cluster, profile, layer, placement.gpu_E(0))
    return objective.exclusive(costs.terms(ASSIGN["exact"](costs, np.random.default_rng(0))))


def place_together(
    cluster: Cluster,
    profiles: Sequence[Profile],
    options: PlanOptions,
    rng: np.random.Generator,
    clock: Callable[[], float],
) -> PlacedModels:
    """Two models. The one with fewer layers is placed first; layer l of the longer meets layer l mod the shorter's.

    The time limit is shared out evenly among the layers that are left.
    """
    first, second = (0, 1) if profiles[0].layers <= profiles[1].layers else (1, 0)
    costs_M = [[_grouped(cluster, p, layer, options.place, rng) for layer in range(p.layers)] for p in profiles]
    held_MLG: list[list[IntArray]] = [[], []]
    objective_s = bound_s = free_bound_s = 0.0
    end_s = clock() + options.time_limit_s
    for layer in range(profiles[second].layers):
        partner = layer % profiles[first].layers
        layers = {first: partner, second: layer}
        a, b = costs_M[first][partner][0], costs_M[second][layer][0]
        movable = partner == layer
        held_G = ASSIGN[options.assign](a, rng) if movable else held_MLG[first][partner]
        until_s = clock() + (end_s - clock()) / (profiles[second].layers - layer)
        sharing = ColocationProblem(a, b, held_G, movable, options.objective, first == 0, partial(_before, clock, until_s))
        found = COLOCATE[options.colocate](sharing, rng)
        if movable:
            held_MLG[first].append(found.a_G)
        held_MLG[second].append(found.b_G)
        value_s = sharing.value_s(found.a_G, found.b_G)
        known_s = found.bound_s if movable else 0.0  # where a is held, other places for a were not looked at
        whole = [scenarios(cluster, [(profiles[m], layers[m], slice(None))]) for m in (0, 1)]
        free_s = _together_bound(options.objective, *whole)
        objective_s += value_s
        free_bound_s += free_s
        bound_s += max(known_s or proved(replace(sharing, movable=True), value_s).bound_s, free_s)
    placements = tuple(
        Placement.stack(
            [unreplicated(np.argsort(held_G)[group_E], len(cluster)) for (_, group_E), held_G in zip(*both, strict=True)]
        )
        for both in zip(costs_M, held_MLG, strict=True)
    )
    return PlacedModels(placements, objective_s, bound_s, free_bound_s)


def _before(clock: Callable[[], float], until_s: float) -> bool:
    return clock() < until_s


def _grouped(
    cluster: Cluster, profile: Profile, layer: int, place: str, rng: np.random.Generator
) -> tuple[GroupCosts, IntArray]:
    """The costs of one layer's groups, and its experts' groups (E,)."""
    own_G = even_rooms(profile.experts, np.full(len(cluster), profile.experts))
    group_E = PLACE[place](profile.tokens_TLSE[:, layer].sum(axis=(0, 1)), own_G, rng)
    return group_costs(cluster, profile, layer, group_E), group_E


def even_rooms(experts: int, room_G: IntArray) -> IntArray:
    """(G,) int64: how many experts each GPU holds, as equal as room_G (G,) allows."""
    own_G = np.zeros_like(room_G)
    while (left := experts - int(own_G.sum())) > 0:
        open_G = np.flatnonzero(own_G < room_G)
        if not len(open_G):
            raise BadInput(f"expected room for {experts} experts, found {room_G.sum()}")
        share = max(1, min(left // len(open_G), int((room_G - own_G)[open_G].min())))
        own_G[open_G[: left if share == 1 else None]] += share
    return own_G


def _together_bound(name: str, a: Scenarios, b: Scenarios) -> float:
    """Below Table 2 for any placement of both models; each is one scenario."""
    fixed = [float(own_WG.max()) for own_WG in (a.gate_s_WG, b.gate_s_WG, a.aggregate_s_WG, b.aggregate_s_WG)]
    arriving = [costs.load_WE[0] - costs.own_WGE[0] for costs in (a, b)]
    dispatch = [each * costs.recv_s_G[:, None] for each, costs in zip(arriving, (a, b), strict=True)]
    combine = [each * costs.csend_s_G[:, None] for each, costs in zip(arriving, (a, b), strict=True)]
    expert = [costs.expert_s_WGE[0] for costs in (a, b)]
    both_there, both_back = np.concatenate(dispatch, axis=1), np.concatenate(combine, axis=1)
    moved = [*dispatch, both_there, *expert, *combine, both_back]
    return objective.longest(name, np.array([*fixed, *map(spread, moved)]))
