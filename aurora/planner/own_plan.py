"""Plans of placements that somebody else made, priced and checked like our own."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from aurora.errors import BadInput
from aurora.planner.check.fit import check_profile
from aurora.planner.check.plans import check_plan
from aurora.planner.make_plan import make_plan
from aurora.planner.placement.bounds import placement_bound_s
from aurora.planner.placement.exclusive_layers import unseen_seconds
from aurora.planner.placement.hierarchical_layers import price_hierarchical
from aurora.planner.plan_seconds import layer_seconds, objective_between
from aurora.planner.resolve_options import GIVEN, remade, resolve
from aurora.planner.schedule_model import fastest_hierarchy, schedule_model
from aurora.types import Cluster, Placement, Plan, PlanOptions, Profile


def price_plan(
    cluster: Cluster,
    profiles: Sequence[Profile],
    placements: Sequence[Placement],
    options: PlanOptions,
    paths: Sequence[str] = (),
) -> Plan:
    """Makes a plan of given placements; see `aurora.price`."""
    if len(placements) != len(profiles) or not profiles:
        raise BadInput(f"expected one placement for each of one or more profiles, found {len(placements)} and {len(profiles)}")
    for profile, placement in zip(profiles, placements, strict=True):
        check_profile(cluster, profile)
        found = (len(placement.slots_LG), placement.experts, placement.gpus)
        if found != (expected := (profile.layers, profile.experts, len(cluster))):
            raise BadInput(f"placement of {profile.model!r}: expected (layers, experts, GPUs) {expected}, found {found}")
        if len(profiles) > 1 and placement.split_LG is not None:
            raise BadInput(
                f"placement of {profile.model!r}: replicas are for a plan of one model, found {len(profiles)} models"
            )
    for name in ("coactivation", "min_replicas"):
        if getattr(options, name):
            raise BadInput(f"`{name}`: decides a placement, found placements that are given")
    options = replace(resolve(replace(options, place="auto"), cluster, profiles), place=GIVEN)
    rng = np.random.default_rng(options.seed)
    hierarchical, models = options.all_to_all == "hierarchical", []
    for profile, placement, path in zip(profiles, placements, list(paths) or [""] * len(profiles), strict=True):
        hierarchy = fastest_hierarchy(cluster, profile, placement, options.order, rng) if hierarchical else None
        models.append(schedule_model(cluster, [profile], placement, options.order, rng, path, hierarchical, hierarchy))
    unpriced = Plan(cluster, tuple(models), options, 0.0, 0.0)
    took_s = float(layer_seconds(unpriced, placements, profiles).sum())
    bound_s = min(_bound_s(unpriced, profiles, placements), took_s)
    unseen_s = None
    if len(profiles) == 1 and not hierarchical:
        unseen_s = unseen_seconds(cluster, profiles[0], (), placements[0], options.aim)
    plan = replace(unpriced, objective_s=took_s, bound_s=bound_s, unseen_s=unseen_s)
    plan = replace(plan, between_s=objective_between(plan, profiles))
    check_plan(plan)
    return plan


def _bound_s(unpriced: Plan, profiles: Sequence[Profile], placements: Sequence[Placement]) -> float:
    """Seconds that no placement beats."""
    cluster, options = unpriced.cluster, unpriced.options
    if hierarchy_M := [each.hierarchy for each in unpriced.models if each.hierarchy is not None]:
        return price_hierarchical(cluster, profiles, placements, options, hierarchy_M).bound_s
    if len(profiles) > 1:
        return make_plan(cluster, profiles, remade(options)).bound_s
    return placement_bound_s(cluster, profiles[0], (), options, placements[0])
