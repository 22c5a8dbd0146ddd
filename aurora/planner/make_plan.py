"""Makes a Plan from a cluster and one profile or several, layer by layer."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from aurora.errors import BadInput, InfeasiblePlan
from aurora.planner.check.fit import check_profile
from aurora.planner.check.plans import check_plan
from aurora.planner.layers_in_threads import Progress, untold
from aurora.planner.placement.colocated_layers import place_colocated
from aurora.planner.placement.deduplicated_layers import place_deduplicated
from aurora.planner.placement.exclusive_layers import SWAP_SEARCH, place_exclusive
from aurora.planner.placement.hierarchical_layers import (
    place_colocated_over_servers,
    place_hierarchical,
    price_hierarchical,
)
from aurora.planner.placement.placed_models import PlacedModels
from aurora.planner.placement.slot_counts import failure_domains, memory_slots_G
from aurora.planner.plan_seconds import objective_between
from aurora.planner.replication.failure_resilient import DEFAULT
from aurora.planner.replication.survival_probability import held_by, survival
from aurora.planner.resolve_options import resolve
from aurora.planner.schedule_model import fastest_hierarchy, schedule_model
from aurora.types import Cluster, Hierarchy, Placement, Plan, PlanOptions, Profile
from aurora.types.arrays import FloatArray


def make_plan(
    cluster: Cluster,
    profiles: Sequence[Profile],
    options: PlanOptions = PlanOptions(),
    profile_paths: Sequence[str] = (),
    clock: Callable[[], float] = time.monotonic,
    domains: Sequence[Profile] = (),
    progress: Progress = untold,
) -> Plan:
    """Plans one model that has the GPUs to itself, or several that share every GPU; see `aurora.plan`.

    Requests stay on their ranks; only experts move. The clock returns seconds, for searches with a time limit.
    """
    if not profiles:
        raise BadInput("plan: expected a profile for each model, found none")
    colocated = len(profiles) > 1
    for profile in (*profiles, *domains):
        check_profile(cluster, profile)
    _check_domains(profiles, domains)
    options = resolve(options, cluster, profiles, domains)
    rng = np.random.default_rng(options.seed)
    hierarchical = options.all_to_all == "hierarchical"
    inside = replace(cluster, fabric=None) if hierarchical else cluster  # a placement over servers starts from balanced GPUs
    if colocated:
        _check_equal_shares(cluster, profiles)
        placed = place_colocated(inside, profiles, options, rng, clock)
    else:
        placed = place_exclusive(inside, profiles[0], domains, options, progress)
    if options.coactivation and not hierarchical:
        deduplicated = place_deduplicated(cluster, profiles[0], placed, options, rng)
        placed = min(placed, deduplicated, key=lambda each: each.objective_s)
    hierarchy_M: Sequence[Hierarchy | None] = [None] * len(profiles)
    if hierarchical:
        placed, hierarchy_M = _over_servers(cluster, profiles, options, rng, placed, progress)
    paths = list(profile_paths) or [""] * len(profiles)
    once = placed.deduplicated or hierarchical
    models = tuple(
        schedule_model(cluster, (profile, *domains), placement, options.order, rng, path, once, hierarchy, progress)
        for profile, placement, path, hierarchy in zip(profiles, placed.placements_M, paths, hierarchy_M, strict=True)
    )
    survival_LK = None if options.min_replicas is None else surviving(cluster, models[0].placement, options.seed)
    plan = Plan(
        cluster,
        models,
        options,
        placed.objective_s,
        placed.bound_s,
        placed.assignment_bound_s,
        survival_LK=survival_LK,
        unseen_s=placed.unseen_s,
        slot_gain=placed.slot_gain,
    )
    plan = replace(plan, between_s=objective_between(plan, profiles, domains))
    check_plan(plan)
    return plan


def surviving(cluster: Cluster, placement: Placement, seed: int) -> FloatArray:
    """Returns (L, D-1) how likely every expert of a layer is still held after 1, 2, ... of D nodes failed."""
    domains = failure_domains(cluster, np.array([max(1, len(held)) for held in placement.slots_LG[0]]))
    rng = np.random.default_rng(seed)
    return np.array([survival(held_by(held_G, domains, placement.experts), domains, rng).p_K for held_G in placement.slots_LG])


def _over_servers(
    cluster: Cluster,
    profiles: Sequence[Profile],
    options: PlanOptions,
    rng: np.random.Generator,
    start: PlacedModels,
    progress: Progress,
) -> tuple[PlacedModels, list[Hierarchy]]:
    """The models placed over servers and priced, and the servers and chunks of each model's all-to-alls."""

    def fastest(placements_M: Sequence[Placement]) -> list[Hierarchy]:
        pairs = zip(profiles, placements_M, strict=True)
        return [fastest_hierarchy(cluster, profile, placement, options.order, rng) for profile, placement in pairs]

    placements_M: Sequence[Placement] = start.placements_M
    hierarchy_M, colocated = fastest(placements_M), len(profiles) > 1
    known = all(profile.routing is not None for profile in profiles)  # counts alone tell loads, and nothing else
    if known and _searches_servers(cluster, options, colocated):
        if colocated:
            placements_M = place_colocated_over_servers(cluster, profiles, start, options, hierarchy_M, progress)
        else:
            placements_M = [place_hierarchical(cluster, profiles[0], start, options, hierarchy_M[0], progress)]
        hierarchy_M = fastest(placements_M)
    return price_hierarchical(cluster, profiles, placements_M, options, hierarchy_M, progress), hierarchy_M


def _searches_servers(cluster: Cluster, options: PlanOptions, colocated: bool) -> bool:
    """Whether experts are placed over servers: unless another placement is asked for, or nodes that fail are no servers."""
    if options.min_replicas is None:
        return options.place in (("balanced",) if colocated else (SWAP_SEARCH, "equal-split", "free-split"))
    assert cluster.fabric is not None, "resolve_options refuses others"
    node_G, server_G = np.array([gpu.node for gpu in cluster.gpus]), np.array(cluster.fabric.server_G)
    return options.place == DEFAULT and np.array_equal(node_G[:, None] == node_G, server_G[:, None] == server_G)


def _check_domains(profiles: Sequence[Profile], domains: Sequence[Profile]) -> None:
    """Raises BadInput unless there is one model and `domains` are further profiles of it, at the same precision."""
    if domains and len(profiles) > 1:
        raise BadInput(f"`domain`: is for a plan of one model, found {len(profiles)} models that share the GPUs")
    for domain in domains:
        found, expected = ((p.layers, p.experts, p.dispatch_bytes, p.combine_bytes) for p in (domain, profiles[0]))
        if found != expected:
            raise BadInput(
                f"`domain`: expected another profile of the one model {profiles[0].model!r} (layers, experts, bytes there and "
                f"back {expected}), found {domain.model!r} with {found}"
            )
        domain.identity.check_same(
            profiles[0].identity, f"`domain`: expected another profile of the one model {profiles[0].model!r}"
        )


def _check_equal_shares(cluster: Cluster, profiles: Sequence[Profile]) -> None:
    """Raises InfeasiblePlan unless an equal share of all models' experts fits on every GPU."""
    n = len(cluster)
    for model, profile in enumerate(profiles):
        others = [*profiles[:model], *profiles[model + 1 :]]
        if (slots := int(memory_slots_G(cluster, [profile, *others]).sum())) < profile.experts:
            raise InfeasiblePlan(
                f"cluster {cluster.name!r} has {slots} expert slots a layer for {profile.model!r}, its {profile.experts} "
                f"experts need {profile.experts}"
            )
    weakest = min(cluster.gpus, key=lambda gpu: gpu.memory_bytes)
    need = sum(p.other_bytes + -(-p.experts // n) * p.layers * p.expert_bytes for p in profiles)
    if weakest.memory_bytes < need:
        raise InfeasiblePlan(
            f"gpu {weakest.name!r}: {weakest.memory_bytes} bytes of memory, but an equal share of every layer's experts "
            f"of {len(profiles)} models needs {need}"
        )
