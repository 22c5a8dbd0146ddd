"""The wiring of planning: a cluster and one or two profiles become a Plan, layer by layer."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from aurora.errors import BadInput, InfeasiblePlan
from aurora.plan import objective
from aurora.plan.assign import ASSIGN
from aurora.plan.bounds import fluid, one_to_one, spread
from aurora.plan.check import check_plan, check_schedule
from aurora.plan.colocate import COLOCATE
from aurora.plan.costs import GroupCosts, group_costs
from aurora.plan.order import ORDER
from aurora.plan.place import PLACE
from aurora.plan.switch import timed
from aurora.types import Cluster, ModelPlan, Placement, Plan, Profile
from aurora.types.arrays import FloatArray, IntArray


@dataclass(frozen=True)
class PlanOptions:
    """Strategies by name. "auto" follows the scenario: Aurora's own methods for it.

    place: experts into GPU-sized groups. assign: groups of one model onto GPUs. colocate: the second model's groups onto
    the first's GPUs. order: one all-to-all. seed: for the random strategies.
    """

    place: str = "balanced"
    assign: str = "auto"
    colocate: str = "auto"
    order: str = "openshop"
    seed: int = 0

    def __post_init__(self) -> None:
        choices = {"place": PLACE, "assign": ASSIGN, "colocate": COLOCATE, "order": ORDER}
        for field in fields(self):
            value = getattr(self, field.name)
            known = sorted(choices.get(field.name, {}))
            if known and value not in known and not (value == "auto" and field.default == "auto"):
                raise BadInput(f"--{field.name}: expected one of {', '.join(known)}, found {value!r}")


def make_plan(
    cluster: Cluster,
    profiles: Sequence[Profile],
    options: PlanOptions = PlanOptions(),
    profile_paths: Sequence[str] = (),
) -> Plan:
    """Plan one model alone or two that share every GPU; which scenario of Aurora's four it is follows from the inputs.

    Raises BadInput where profiles and cluster do not fit together, InfeasiblePlan where the experts do not fit.
    Source: Aurora §4-§7; the requests' ranks stay where they are and only experts move (THEORY §2).
    """
    if not 1 <= len(profiles) <= 2:
        raise BadInput(f"plan: expected one or two profiles, found {len(profiles)}")
    for profile in profiles:
        _check_fits(cluster, profile, profiles)
    equal = cluster.equal
    assign = options.assign if options.assign != "auto" else ("matching" if equal else "by-load")
    colocate = options.colocate if options.colocate != "auto" else ("matching" if equal else "decoupled")
    rng = np.random.default_rng(options.seed)

    paths = list(profile_paths) or [""] * len(profiles)
    if len(profiles) == 1:
        layers = [_costs(cluster, profiles[0], layer, options.place, rng) for layer in range(profiles[0].layers)]
        placed = [ASSIGN[assign](costs, rng) for costs, _ in layers]
        total = sum(objective.exclusive(c.terms(held_G)) for (c, _), held_G in zip(layers, placed, strict=True))
        bound = sum(_exclusive_bound(_alone_bounds(cluster, profiles[0], layer)) for layer in range(len(layers)))
        models = [_model_plan(cluster, profiles[0], layers, placed, options.order, rng, paths[0])]
        methods = {"place": options.place, "assign": assign, "order": options.order}
    else:
        # The model with fewer layers is placed first; layer l of the longer meets layer l mod the shorter's.
        first, second = (0, 1) if profiles[0].layers <= profiles[1].layers else (1, 0)
        costs_M = [[_costs(cluster, p, layer, options.place, rng) for layer in range(p.layers)] for p in profiles]
        placed_M: list[list[IntArray]] = [[], []]
        total = bound = 0.0
        for layer in range(profiles[second].layers):
            partner = layer % profiles[first].layers
            (a, _), (b, _) = costs_M[first][partner], costs_M[second][layer]
            movable = partner == layer
            held_G = ASSIGN[assign](a, rng) if movable else placed_M[first][partner]
            held_a, held_b = COLOCATE[colocate](a, b, held_G, movable, rng)
            if movable:
                placed_M[first].append(held_a)
            placed_M[second].append(held_b)
            pair = (a.terms(held_a), b.terms(held_b))
            total += objective.causal(*(pair if first == 0 else pair[::-1]))
            layer_M = (partner, layer) if first == 0 else (layer, partner)
            bound += _colocated_bound(*(_alone_bounds(cluster, profiles[m], layer_M[m]) for m in (0, 1)))
        models = [
            _model_plan(cluster, profiles[m], costs_M[m], placed_M[m], options.order, rng, paths[m]) for m in (0, 1)
        ]
        methods = {"place": options.place, "assign": assign, "colocate": colocate, "order": options.order}

    scenario = f"{'exclusive' if len(profiles) == 1 else 'colocated'}, {'equal' if equal else 'mixed'} GPUs"
    plan = Plan(cluster, tuple(models), scenario, methods, options.seed, float(total), float(bound))
    check_plan(plan)
    return plan


def _check_fits(cluster: Cluster, profile: Profile, profiles: Sequence[Profile]) -> None:
    n = len(cluster)
    if profile.sources != n:
        raise BadInput(
            f"profile of {profile.model!r}: its prompts were dealt to {profile.sources} source ranks, but cluster "
            f"{cluster.name!r} has {n} GPUs; profile with --sources {n}"
        )
    others = sum(p.other_bytes for p in profiles)
    shares = [p.experts / n * p.layers * p.expert_bytes for p in profiles]
    most = {id(p): -(-p.experts // n) for p in profiles}
    if sum(shares) and any(g.memory_bytes < others for g in cluster.gpus):
        worst = min(cluster.gpus, key=lambda g: g.memory_bytes)
        raise InfeasiblePlan(
            f"gpu {worst.name!r}: {worst.memory_bytes} bytes of memory, but the weights outside experts need {others}"
        )
    slot_bytes = profile.expert_bytes * profile.layers
    slots = sum(int((g.memory_bytes - others) // slot_bytes) for g in cluster.gpus) if slot_bytes else profile.experts
    if slots < profile.experts:
        raise InfeasiblePlan(
            f"cluster {cluster.name!r} has {slots} expert slots a layer for {profile.model!r}, its {profile.experts} "
            f"experts need {profile.experts}"
        )
    for gpu in cluster.gpus:
        need = others + sum(most[id(p)] * p.layers * p.expert_bytes for p in profiles)
        if gpu.memory_bytes < need:
            raise InfeasiblePlan(
                f"gpu {gpu.name!r}: {gpu.memory_bytes} bytes of memory, but an equal share of every layer's experts "
                f"needs {need}"
            )


def _costs(
    cluster: Cluster, profile: Profile, layer: int, place: str, rng: np.random.Generator
) -> tuple[GroupCosts, IntArray]:
    n = len(cluster)
    room_J = np.full(n, profile.experts // n, dtype=np.int64)
    room_J[: profile.experts % n] += 1
    group_E = PLACE[place](profile.tokens_TLSE[:, layer].sum(axis=(0, 1)), room_J, rng)
    return group_costs(cluster, profile, layer, group_E), group_E


def _model_plan(
    cluster: Cluster,
    profile: Profile,
    layers: list[tuple[GroupCosts, IntArray]],
    placed: list[IntArray],
    order: str,
    rng: np.random.Generator,
    path: str,
) -> ModelPlan:
    out, into, startup = cluster.out_Bps_G, cluster.in_Bps_G, cluster.startup_s_G
    slots, orders, seconds, fluids, one_to_ones = [], [], [], [], []
    for layer, ((_, group_E), held_G) in enumerate(zip(layers, placed, strict=True)):
        slots.append(tuple(tuple(np.flatnonzero(group_E == group).tolist()) for group in held_G))
        bytes_GG = dispatch_bytes(profile, layer, np.argsort(held_G)[group_E])
        made = ORDER[order](bytes_GG, out, into, rng)
        schedule = timed(made, bytes_GG, out, into, startup)
        check_schedule(schedule, bytes_GG, out, into)
        orders.append(made)
        seconds.append(schedule.makespan_s)
        fluids.append(fluid(bytes_GG, out, into))
        one_to_ones.append(one_to_one(bytes_GG, out, into))
    return ModelPlan(
        profile.model,
        profile.fingerprint,
        path,
        profile.digest,
        Placement(tuple(slots)),
        tuple(orders),
        np.array(seconds),
        np.array(fluids),
        np.array(one_to_ones),
    )


def dispatch_bytes(profile: Profile, layer: int, gpu_E: IntArray) -> IntArray:
    """(G, G) int64, zero diagonal: what each rank sends to each over the whole profile when gpu_E[e] holds expert e."""
    tokens_SE = profile.tokens_TLSE[:, layer].sum(axis=0)
    bytes_GG = np.zeros((profile.sources, profile.sources), dtype=np.int64)
    np.add.at(bytes_GG.T, gpu_E, tokens_SE.T * profile.dispatch_bytes)
    np.fill_diagonal(bytes_GG, 0)
    return bytes_GG


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

