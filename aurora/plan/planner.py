"""The wiring of planning: a cluster and one or two profiles become a Plan, layer by layer."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from aurora.errors import BadInput, InfeasiblePlan
from aurora.plan import objective
from aurora.plan.assign import ASSIGN
from aurora.plan.bounds import spread
from aurora.plan.check import check_plan, check_schedule
from aurora.plan.colocate import COLOCATE
from aurora.plan.costs import GroupCosts, group_costs, group_tokens
from aurora.plan.order import ORDER
from aurora.plan.place import PLACE
from aurora.plan.timing import timed
from aurora.types import Cluster, ModelPlan, Order, Placement, Plan, PlanOptions, Profile, Schedule
from aurora.types.arrays import FloatArray, IntArray, square_bytes

DEFAULT_BPS = 12.5e9  # 100 Gbps, Aurora §8.1
AUTO_ORDERS = ("openshop", "all-at-once")  # on mixed ports one partner at a time can cost twice the fluid bound


def make_plan(
    cluster: Cluster,
    profiles: Sequence[Profile],
    options: PlanOptions = PlanOptions(),
    profile_paths: Sequence[str] = (),
) -> Plan:
    """Plan one model alone or two that share every GPU; which scenario of Aurora's four it is follows from the inputs.

    Raises BadInput where profiles and cluster do not fit together, InfeasiblePlan where the experts do not fit.
    Source: Aurora §4-§7; the requests' ranks stay where they are and only experts move.
    """
    if not 1 <= len(profiles) <= 2:
        raise BadInput(f"plan: expected one or two profiles, found {len(profiles)}")
    for profile in profiles:
        _check_fits(cluster, profile, profiles)
    options = _resolved(options, cluster.equal)
    rng = np.random.default_rng(options.seed)
    costs_M = [[_costs(cluster, p, layer, options.place, rng) for layer in range(p.layers)] for p in profiles]
    place = _place_alone if len(profiles) == 1 else _place_together
    placed_M, objective_s, bound_s = place(cluster, profiles, costs_M, options, rng)
    paths = list(profile_paths) or [""] * len(profiles)
    models = tuple(
        _model_plan(cluster, profile, costs_M[m], placed_M[m], options.order, rng, paths[m])
        for m, profile in enumerate(profiles)
    )
    methods = {"place": options.place, "assign": options.assign}
    if len(profiles) == 2:
        methods["colocate"] = options.colocate
        if options.colocate == "decoupled":  # it decides both
            methods["assign"] = options.colocate
    methods["order"] = options.order
    scenario = f"{'exclusive' if len(profiles) == 1 else 'colocated'}, {'equal' if cluster.equal else 'mixed'} GPUs"
    plan = Plan(cluster, models, scenario, methods, options.seed, objective_s, bound_s)
    check_plan(plan)
    return plan


LayerCosts = tuple[GroupCosts, IntArray]  # of one layer, and its experts' groups (E,)
Placed = tuple[
    list[list[IntArray]], float, float
]  # by model and layer the group on each GPU (G,); objective and bound, seconds


def _place_alone(
    cluster: Cluster,
    profiles: Sequence[Profile],
    costs_M: list[list[LayerCosts]],
    options: PlanOptions,
    rng: np.random.Generator,
) -> Placed:
    placed, objective_s, bound_s = [], 0.0, 0.0
    for layer, (costs, _) in enumerate(costs_M[0]):
        placed.append(ASSIGN[options.assign](costs, rng))
        objective_s += objective.exclusive(costs.terms(placed[-1]))
        bound_s += _exclusive_bound(_alone_bounds(cluster, profiles[0], layer))
    return [placed], objective_s, bound_s


def _place_together(
    cluster: Cluster,
    profiles: Sequence[Profile],
    costs_M: list[list[LayerCosts]],
    options: PlanOptions,
    rng: np.random.Generator,
) -> Placed:
    """The model with fewer layers is placed first; layer l of the longer meets layer l mod the shorter's."""
    first, second = (0, 1) if profiles[0].layers <= profiles[1].layers else (1, 0)
    placed_M: list[list[IntArray]] = [[], []]
    objective_s = bound_s = 0.0
    for layer in range(profiles[second].layers):
        partner = layer % profiles[first].layers
        layers = {first: partner, second: layer}
        a, b = costs_M[first][partner][0], costs_M[second][layer][0]
        movable = partner == layer
        held_G = ASSIGN[options.assign](a, rng) if movable else placed_M[first][partner]
        held_a, held_b = COLOCATE[options.colocate](a, b, held_G, movable, rng)
        if movable:
            placed_M[first].append(held_a)
        placed_M[second].append(held_b)
        terms = {first: a.terms(held_a), second: b.terms(held_b)}
        objective_s += objective.causal(terms[0], terms[1])
        bound_s += _colocated_bound(*(_alone_bounds(cluster, profiles[m], layers[m]) for m in (0, 1)))
    return placed_M, objective_s, bound_s


def _resolved(options: PlanOptions, equal: bool) -> PlanOptions:
    """Names instead of "auto"; BadInput for a name that no strategy has."""
    if options.colocate == "decoupled" and options.assign != "auto":
        raise BadInput(f"--assign {options.assign}: has no effect with --colocate decoupled, which decides both")
    if options.colocate == "auto":
        options = replace(options, colocate="matching" if equal or options.assign != "auto" else "decoupled")
    if options.assign == "auto":
        options = replace(options, assign="matching" if equal else "by-load")
    if options.order == "auto" and equal:
        options = replace(options, order="openshop")
    for name, known in (("place", PLACE), ("assign", ASSIGN), ("colocate", COLOCATE), ("order", ORDER)):
        if getattr(options, name) not in known and (name, getattr(options, name)) != ("order", "auto"):
            raise BadInput(f"--{name}: expected one of {', '.join(known)}, found {getattr(options, name)!r}")
    return options


def _check_fits(cluster: Cluster, profile: Profile, profiles: Sequence[Profile]) -> None:
    n = len(cluster)
    if profile.sources != n:
        raise BadInput(
            f"profile of {profile.model!r}: its prompts were dealt to {profile.sources} source ranks, but cluster "
            f"{cluster.name!r} has {n} GPUs; profile with --sources {n}"
        )
    weakest = min(cluster.gpus, key=lambda gpu: gpu.memory_bytes)
    others = sum(p.other_bytes for p in profiles)
    if weakest.memory_bytes < others:
        raise InfeasiblePlan(
            f"gpu {weakest.name!r}: {weakest.memory_bytes} bytes of memory, but the weights outside experts need {others}"
        )
    if slot_bytes := profile.expert_bytes * profile.layers:
        slots = sum(int((gpu.memory_bytes - others) // slot_bytes) for gpu in cluster.gpus)
        if slots < profile.experts:
            raise InfeasiblePlan(
                f"cluster {cluster.name!r} has {slots} expert slots a layer for {profile.model!r}, its {profile.experts} "
                f"experts need {profile.experts}"
            )
    need = others + sum(-(-p.experts // n) * p.layers * p.expert_bytes for p in profiles)
    if weakest.memory_bytes < need:
        raise InfeasiblePlan(
            f"gpu {weakest.name!r}: {weakest.memory_bytes} bytes of memory, but an equal share of every layer's experts "
            f"needs {need}"
        )


def _costs(cluster: Cluster, profile: Profile, layer: int, place: str, rng: np.random.Generator) -> LayerCosts:
    n = len(cluster)
    room_J = _equal_room(profile.experts, n)
    group_E = PLACE[place](profile.tokens_TLSE[:, layer].sum(axis=(0, 1)), room_J, rng)
    return group_costs(cluster, profile, layer, group_E), group_E


def _model_plan(
    cluster: Cluster,
    profile: Profile,
    layers: list[LayerCosts],
    placed: list[IntArray],
    order_name: str,
    rng: np.random.Generator,
    path: str,
) -> ModelPlan:
    slots, dispatches, combines, schedules = [], [], [], []
    out, into, startup = cluster.out_Bps_G, cluster.in_Bps_G, cluster.startup_s_G
    for layer, ((_, group_E), held_G) in enumerate(zip(layers, placed, strict=True)):
        slots.append(tuple(tuple(np.flatnonzero(group_E == group).tolist()) for group in held_G))
        tokens_GG = exchanged_tokens(profile, layer, np.argsort(held_G)[group_E])
        there, back = tokens_GG * profile.dispatch_bytes, tokens_GG.T * profile.combine_bytes
        made, schedule = _scheduled(there, out, into, startup, order_name, rng)
        if made.one_to_one:
            returned = made.reversed
            check_schedule(timed(returned, back, out, into, startup), back, out, into)
        else:  # receivers take what comes: each direction is ordered by its own senders
            returned, _ = _scheduled(back, out, into, startup, order_name, rng)
        dispatches.append(made)
        combines.append(returned)
        schedules.append(schedule)
    return ModelPlan(
        profile.model,
        profile.fingerprint,
        path,
        profile.digest,
        Placement(tuple(slots)),
        tuple(dispatches),
        tuple(combines),
        np.array([schedule.makespan_s for schedule in schedules]),
        np.array([schedule.fluid_bound_s for schedule in schedules]),
        np.array([schedule.one_to_one_bound_s for schedule in schedules]),
    )


def order(
    bytes_GG: ArrayLike,
    cluster: Cluster | None = None,
    method: str = "openshop",
    seed: int = 0,
    startup_s: float | None = None,
) -> Schedule:
    """The checked schedule of one all-to-all, by a method of ORDER or "auto".

    bytes_GG (G, G) integers: i to j; the diagonal does not travel. Without a cluster every port has DEFAULT_BPS. startup_s:
    what a message costs, instead of the cluster's. Raises BadInput for a matrix that is not square, whole or non-negative, or
    does not fit the cluster. Source: Aurora Thm 4.2.
    """
    matrix = square_bytes("traffic", bytes_GG)
    n = len(matrix)
    if cluster is not None and len(cluster) != n:
        raise BadInput(f"order: cluster {cluster.name!r} has {len(cluster)} GPUs, the traffic matrix {n} rows")
    if method not in ORDER and method != "auto":
        raise BadInput(f"--method: expected one of auto, {', '.join(ORDER)}, found {method!r}")
    if seed < 0:
        raise BadInput(f"--seed: expected zero or more, found {seed}")
    if startup_s is not None and not 0 <= startup_s < float("inf"):
        raise BadInput(f"--startup: expected seconds of zero or more, found {startup_s}")
    out, into = (cluster.out_Bps_G, cluster.in_Bps_G) if cluster else (np.full(n, DEFAULT_BPS),) * 2
    own = cluster.startup_s_G if cluster else np.zeros(n)
    startup = own if startup_s is None else np.full(n, startup_s)
    _, schedule = _scheduled(matrix, out, into, startup, method, np.random.default_rng(seed))
    return schedule


def contiguous_bytes(profile: Profile, layer: int) -> IntArray:
    """(S, S) int64: the dispatch of `layer` over the whole profile when each rank holds an equal share of experts in order."""
    load_E = profile.tokens_TLSE[:, layer].sum(axis=(0, 1))
    gpu_E = PLACE["contiguous"](load_E, _equal_room(profile.experts, profile.sources), np.random.default_rng(0))
    return exchanged_tokens(profile, layer, gpu_E) * profile.dispatch_bytes


def _equal_room(experts: int, gpus: int) -> IntArray:
    """(G,) int64: how many experts each GPU holds, as equal as can be."""
    room_J = np.full(gpus, experts // gpus, dtype=np.int64)
    room_J[: experts % gpus] += 1
    return room_J


def _scheduled(
    bytes_GG: IntArray, out: FloatArray, into: FloatArray, startup: FloatArray, method: str, rng: np.random.Generator
) -> tuple[Order, Schedule]:
    """An order and its schedule, which the checker has seen; "auto" is the shortest of AUTO_ORDERS."""
    best: tuple[Order, Schedule] | None = None
    for name in AUTO_ORDERS if method == "auto" else (method,):
        made = ORDER[name](bytes_GG, out, into, rng, startup)
        schedule = timed(made, bytes_GG, out, into, startup)
        check_schedule(schedule, bytes_GG, out, into)
        if best is None or schedule.makespan_s < best[1].makespan_s:
            best = made, schedule
    assert best is not None
    return best


def exchanged_tokens(profile: Profile, layer: int, gpu_E: IntArray) -> IntArray:
    """(G, G) int64, zero diagonal: tokens from each rank to each over the whole profile when gpu_E[e] holds expert e."""
    tokens_GG = group_tokens(profile.tokens_TLSE[:, layer].sum(axis=0), gpu_E, profile.sources)
    np.fill_diagonal(tokens_GG, 0)
    return tokens_GG


@dataclass(frozen=True)
class _Bounds:
    """Per-expert costs and per-GPU certainties of one model's layer, from which any placement's time is bounded below."""

    gate_G: FloatArray
    aggregate_G: FloatArray
    dispatch_GE: FloatArray
    combine_GE: FloatArray
    expert_GE: FloatArray


def _alone_bounds(cluster: Cluster, profile: Profile, layer: int) -> _Bounds:
    tokens_TSE = profile.tokens_TLSE[:, layer]
    tokens_SE = tokens_TSE.sum(axis=0)
    arriving_GE = tokens_SE.sum(axis=0)[None, :] - tokens_SE  # an expert on GPU g spares the tokens that start there
    gpus = cluster.gpus
    own_TG = tokens_TSE.sum(axis=2) // profile.top_k
    return _Bounds(
        np.array([profile.seconds("gate", gpu, own_TG[:, g]).sum() for g, gpu in enumerate(gpus)]),
        np.array([profile.seconds("aggregate", gpu, own_TG[:, g]).sum() for g, gpu in enumerate(gpus)]),
        arriving_GE * profile.dispatch_bytes / cluster.in_Bps_G[:, None],
        arriving_GE * profile.combine_bytes / cluster.out_Bps_G[:, None],
        np.array([profile.seconds("expert", gpu, tokens_TSE.sum(axis=1)).sum(axis=0) for gpu in gpus]),
    )


def _exclusive_bound(a: _Bounds) -> float:
    first = max(float(a.gate_G.max()), float(a.gate_G.min()) + spread(a.dispatch_GE))
    return first + spread(a.expert_GE + a.combine_GE) + float(a.aggregate_G.max())


def _colocated_bound(a: _Bounds, b: _Bounds) -> float:
    return objective.causal_timeline(
        gate=(float(a.gate_G.max()), float(b.gate_G.max())),
        dispatch=(spread(a.dispatch_GE), spread(b.dispatch_GE)),
        both_dispatch=spread(np.concatenate([a.dispatch_GE, b.dispatch_GE], axis=1)),
        expert=(spread(a.expert_GE), spread(b.expert_GE)),
        combine=(spread(a.combine_GE), spread(b.combine_GE)),
        both_combine=spread(np.concatenate([a.combine_GE, b.combine_GE], axis=1)),
        aggregate=(float(a.aggregate_G.max()), float(b.aggregate_G.max())),
    )
