"""The wiring of planning: a cluster and one or two profiles become a Plan, layer by layer."""

import time
from collections.abc import Callable, Sequence

import numpy as np

from aurora.errors import BadInput, InfeasiblePlan
from aurora.planner.alltoall.schedule import both_ways
from aurora.planner.check.plans import check_plan
from aurora.planner.placement.coactivation import deduplicated_GG
from aurora.planner.placement.cost_model import exchanged
from aurora.planner.placement.deduplicated_layers import place_deduplicated
from aurora.planner.placement.layers import even_rooms, hosts_of, memory_room_G, place_alone, place_together
from aurora.planner.replication.survival_probability import held_by, survival
from aurora.planner.resolve_options import resolve
from aurora.planner.workload.load_statistics import LoadIntervals, load_intervals
from aurora.types import Cluster, ModelPlan, Placement, Plan, PlanOptions, Profile
from aurora.types.arrays import FloatArray, IntArray
from aurora.types.profile import same_model


def make_plan(
    cluster: Cluster,
    profiles: Sequence[Profile],
    options: PlanOptions = PlanOptions(),
    profile_paths: Sequence[str] = (),
    clock: Callable[[], float] = time.monotonic,
    domains: Sequence[Profile] = (),
) -> Plan:
    """Plan one model alone or two that share every GPU; which scenario of Aurora's four it is follows from the inputs.

    domains: further profiles of one model alone, which the placement must serve as well; options.aim says how they count.
    clock gives seconds, for searches with a time limit. Raises BadInput where profiles and cluster do not fit together,
    InfeasiblePlan where the experts do not fit.
    Source: Aurora §4-§7; the requests' ranks stay where they are and only experts move.
    """
    if not 1 <= len(profiles) <= 2:
        raise BadInput(f"plan: expected one or two profiles, found {len(profiles)}")
    colocated = len(profiles) == 2
    for profile in (*profiles, *domains):
        check_sources(cluster, profile)
    _check_domains(profiles, domains)
    options = resolve(options, cluster, profiles, domains)
    rng = np.random.default_rng(options.seed)
    if colocated:
        _check_equal_shares(cluster, profiles)
        placed = place_together(cluster, profiles, options, rng, clock)
    else:
        placed = place_alone(cluster, profiles[0], domains, options, rng)
    if options.coactivation:
        placed = min(placed, place_deduplicated(cluster, profiles[0], placed, options, rng), key=lambda each: each.objective_s)
    paths = list(profile_paths) or [""] * len(profiles)
    models = tuple(
        model_plan(cluster, (profile, *domains), placement, options.order, rng, path, placed.deduplicated)
        for profile, placement, path in zip(profiles, placed.placements_M, paths, strict=True)
    )
    survival_LK = None if options.min_replicas is None else surviving(cluster, models[0].placement, options.seed)
    plan = Plan(cluster, models, options, placed.objective_s, placed.bound_s, placed.free_bound_s, survival_LK=survival_LK)
    check_plan(plan)
    return plan


def surviving(cluster: Cluster, placement: Placement, seed: int) -> FloatArray:
    """(L, D-1) how likely every expert of each layer is still held after 1, 2, ... of the cluster's D nodes failed."""
    hosts = hosts_of(cluster, np.array([max(1, len(held)) for held in placement.slots_LG[0]]))
    rng = np.random.default_rng(seed)
    return np.array([survival(held_by(held_G, hosts, placement.experts), hosts, rng).p_K for held_G in placement.slots_LG])


def check_sources(cluster: Cluster, profile: Profile) -> None:
    """BadInput unless the profile's requests come from as many ranks as the cluster has."""
    if profile.sources != len(cluster):
        raise BadInput(
            f"profile of {profile.model!r}: its prompts were dealt to {profile.sources} source ranks, but cluster "
            f"{cluster.name!r} has {len(cluster)} GPUs; profile with `sources` {len(cluster)}"
        )


def _check_domains(profiles: Sequence[Profile], domains: Sequence[Profile]) -> None:
    for domain in domains:
        found, expected = ((p.layers, p.experts, p.dispatch_bytes, p.combine_bytes) for p in (domain, profiles[0]))
        if len(profiles) > 1 or found != expected or not same_model(domain.fingerprint, profiles[0].fingerprint):
            raise BadInput(
                f"`domain`: expected another profile of the one model {profiles[0].model!r} (layers, experts, bytes there and "
                f"back {expected}), found {domain.model!r} with {found}"
            )


def _check_equal_shares(cluster: Cluster, profiles: Sequence[Profile]) -> None:
    """InfeasiblePlan unless an equal share of both models' experts fits on every GPU."""
    n = len(cluster)
    for ahead in (profiles, profiles[::-1]):
        if (slots := int(memory_room_G(cluster, ahead).sum())) < ahead[0].experts:
            raise InfeasiblePlan(
                f"cluster {cluster.name!r} has {slots} expert slots a layer for {ahead[0].model!r}, its {ahead[0].experts} "
                f"experts need {ahead[0].experts}"
            )
    weakest = min(cluster.gpus, key=lambda gpu: gpu.memory_bytes)
    need = sum(p.other_bytes + -(-p.experts // n) * p.layers * p.expert_bytes for p in profiles)
    if weakest.memory_bytes < need:
        raise InfeasiblePlan(
            f"gpu {weakest.name!r}: {weakest.memory_bytes} bytes of memory, but an equal share of every layer's experts "
            f"needs {need}"
        )


def model_plan(
    cluster: Cluster,
    profiles: Sequence[Profile],
    placement: Placement,
    order: str,
    rng: np.random.Generator,
    path: str,
    deduplicated: bool = False,
) -> ModelPlan:
    """A placed model with its orders, made for the traffic of all of `profiles`, which are of one model.

    once: a token counts once a GPU.
    """
    profile = profiles[0]
    made = []
    for layer in range(profile.layers):
        tokens_GG = np.sum(
            [exchanged_tokens(each, layer, placement.split_EG(layer), deduplicated) for each in profiles], axis=0
        )
        made.append(
            both_ways(
                tokens_GG * profile.row_bytes(deduplicated),
                tokens_GG.T * profile.combine_bytes,
                cluster.network,
                order,
                rng=rng,
            )
        )
    dispatches, combines, schedules = zip(*made, strict=True)
    return ModelPlan(
        profile.model,
        profile.fingerprint,
        path,
        profile.digest,
        placement,
        dispatches,
        combines,
        np.array([schedule.makespan_s for schedule in schedules]),
        np.array([schedule.fluid_bound_s for schedule in schedules]),
        np.array([schedule.one_to_one_bound_s for schedule in schedules]),
        tuple(schedule.cut for schedule in schedules if schedule.cut),
        deduplicated,
    )


def contiguous_bytes(profile: Profile, layer: int) -> IntArray:
    """(S, S) int64: the dispatch of `layer` over the whole profile when each rank holds an equal share of experts in order."""
    return exchanged_tokens(profile, layer, contiguous_split(profile.experts, profile.sources)) * profile.dispatch_bytes


def contiguous_intervals(profile: Profile, seed: int = 0) -> LoadIntervals:
    """How far the profile's loads are known, and the bottleneck's with an equal share of experts on each source rank, in order:
    a placement that knows no counts."""
    split_EG = contiguous_split(profile.experts, profile.sources)
    split_LEG = np.broadcast_to(split_EG, (profile.layers, *split_EG.shape))
    return load_intervals(profile.tokens_TLSE, profile.stage_T, split_LEG, np.random.default_rng(seed))


def contiguous_split(experts: int, gpus: int) -> FloatArray:
    """(E, G) float64: an equal share of experts on each GPU, in order."""
    own_G = even_rooms(experts, np.full(gpus, experts))
    return np.eye(gpus)[np.repeat(np.arange(gpus), own_G)]


def exchanged_tokens(profile: Profile, layer: int, split_EG: FloatArray, deduplicated: bool = False) -> IntArray:
    """(G, G) int64, zero diagonal: tokens from each rank to each over the whole profile, experts divided by split_EG (E, G).

    once: a token counts once a GPU, every expert whole; BadInput where the profile holds no choices.
    """
    if deduplicated:
        tokens_GG = deduplicated_GG(*profile.required_routing.layer(layer), split_EG.argmax(axis=1), split_EG.shape[1])
    else:
        tokens_GG = exchanged(profile.tokens_TLSE[:, layer].sum(axis=0), split_EG)
    np.fill_diagonal(tokens_GG, 0)
    return tokens_GG
