"""Seconds of placements by a plan's objective, and between which seconds estimates lie."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from aurora.errors import BadInput
from aurora.planner.placement.objective import seconds
from aurora.planner.placement.profile_costs import aimed_costs, layer_costs
from aurora.types import Placement, Plan, Profile
from aurora.types.arrays import FloatArray


def layer_seconds(
    plan: Plan, placements: Sequence[Placement], profiles: Sequence[Profile], domains: Sequence[Profile] = ()
) -> FloatArray:
    """Returns the seconds of each layer by the plan's objective and aim under given placements.

    Args:
        plan: gives the cluster, the objective, the aim, and whether tokens are deduplicated.
        placements: one Placement per model.
        profiles: one profile per model.
        domains: further profiles that the placement of a single model must serve.

    Returns:
        (L,) float64; L is the number of layers, of several models the largest one.

    Raises:
        BadInput: with deduplicated tokens, if the profile holds no token-level routing or, where all-to-alls are flat, the
            placement has replicas.
    """
    first = plan.models[0]
    if first.deduplicated and first.hierarchy is None and placements[0].split_LG is not None:
        raise BadInput("a plan with deduplicated tokens: expected a placement without replicas, found replicas")
    found, objective = [], plan.options.objective
    for layer in range(max(profile.layers for profile in profiles)):
        if len(profiles) == 1 and not first.deduplicated:
            aimed = aimed_costs(plan.cluster, profiles[0], domains, layer, plan.options.aim)
            found.append(aimed.value_s(placements[0].split_EG(layer)))
            continue
        at_M = [layer % profile.layers for profile in profiles]
        costs_M = [
            layer_costs(plan.cluster, profile, at, model.deduplicated)
            for profile, model, at in zip(profiles, plan.models, at_M, strict=True)
        ]
        times_M = [
            costs.phase_times(placement.split_EG(at), model.hierarchy)
            for costs, placement, model, at in zip(costs_M, placements, plan.models, at_M, strict=True)
        ]
        found.append(seconds(objective, times_M, costs_M[0].nics is not None))
    return np.array(found)


def seconds_between(
    plan: Plan, profiles: Sequence[Profile], seconds_of: Callable[[list[Profile]], float]
) -> tuple[float, float] | None:
    """Returns the seconds between which an estimate lies: at the fewest rows that counts allow, and at the most.

    Args:
        plan: gives the models whose all-to-alls are hierarchical.
        profiles: the traffic, one profile per model.
        seconds_of: returns the seconds of given profiles.

    Returns:
        (lower, higher) seconds; None if nothing is estimated, since tokens are known or all-to-alls are flat.
    """
    pairs = list(zip(plan.models, profiles, strict=True))
    if not any(model.hierarchy is not None and profile.routing is None for model, profile in pairs):
        return None

    def at(spread: str) -> float:
        return seconds_of([each if each.routing is not None else replace(each, token_spread=spread) for each in profiles])

    low_s, high_s = sorted((at("least"), at("most")))
    return low_s, high_s


def objective_between(plan: Plan, profiles: Sequence[Profile], domains: Sequence[Profile] = ()) -> tuple[float, float] | None:
    """Returns the seconds between which a plan's objective lies, as `seconds_between`.

    Args:
        plan: the plan.
        profiles: the traffic, one profile per model.
        domains: further profiles of a single model.
    """
    placements = [model.placement for model in plan.models]
    return seconds_between(plan, profiles, lambda given: float(layer_seconds(plan, placements, given, domains).sum()))
