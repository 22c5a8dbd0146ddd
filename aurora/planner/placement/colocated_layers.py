"""Placement of two colocated models, layer by layer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from aurora.planner.network.lower_bounds import spread, spread_split
from aurora.planner.placement import objective
from aurora.planner.placement.assignment import ASSIGN
from aurora.planner.placement.colocation import COLOCATE
from aurora.planner.placement.colocation_problem import ColocationProblem
from aurora.planner.placement.cost_model import GroupCosts, LayerCosts, layer_costs
from aurora.planner.placement.grouping import grouped
from aurora.planner.placement.lp_relaxation import prove_bound
from aurora.planner.placement.placed_models import PlacedModels, unreplicated
from aurora.planner.placement.slot_counts import even_slots, replicas_fit
from aurora.types import Cluster, Placement, PlanOptions, Profile
from aurora.types.arrays import FloatArray, IntArray


@dataclass(frozen=True)
class GroupedLayer:
    """One layer of one model with its experts in groups of equal size, one group per GPU.

    Attributes:
        costs: the layer's costs, expert by expert.
        group_E: (E,) int64, the group of each expert.
        group_costs: the layer's costs, group by group.
    """

    costs: LayerCosts
    group_E: IntArray
    group_costs: GroupCosts


def place_colocated(
    cluster: Cluster,
    profiles: Sequence[Profile],
    options: PlanOptions,
    rng: np.random.Generator,
    clock: Callable[[], float],
) -> PlacedModels:
    """Places two models that share every GPU.

    Layer l of the model with more layers is paired with layer l modulo the other model's length. A layer of the shorter model
    keeps the place of its first pairing. Each layer gets an equal part of what is left of `options.time_limit_s`.

    Args:
        cluster: the GPUs.
        profiles: one profile for each of the two models.
        options: resolved, so `place`, `assign` and `colocate` name strategies.
        rng: for strategies that draw.
        clock: returns seconds; for searches with a time limit.
    """
    first, second = (0, 1) if profiles[0].layers <= profiles[1].layers else (1, 0)
    layers_ML = [[_grouped(cluster, p, layer, options.place, rng) for layer in range(p.layers)] for p in profiles]
    held_MLG: list[list[IntArray]] = [[], []]
    objective_s = bound_s = assignment_bound_s = 0.0
    below = spread_split if replicas_fit(cluster, profiles) else spread
    end_s = clock() + options.time_limit_s
    for layer in range(profiles[second].layers):
        partner = layer % profiles[first].layers
        a, b = layers_ML[first][partner], layers_ML[second][layer]
        movable = partner == layer
        held_G = ASSIGN[options.assign](a.group_costs, rng) if movable else held_MLG[first][partner]
        until_s = clock() + (end_s - clock()) / (profiles[second].layers - layer)
        problem = ColocationProblem(
            a.group_costs, b.group_costs, held_G, movable, options.objective, first == 0, clock, until_s
        )
        found = COLOCATE[options.colocate](problem, rng)
        if movable:
            held_MLG[first].append(found.a_G)
        held_MLG[second].append(found.b_G)
        value_s = problem.value_s(found.a_G, found.b_G)
        known_s = found.bound_s if movable else 0.0  # where a was fixed, the search did not try other places for it
        least_s = _placement_bound(below, options.objective, *((a.costs, b.costs) if first == 0 else (b.costs, a.costs)))
        objective_s += value_s
        bound_s += least_s
        assignment_bound_s += max(known_s or prove_bound(replace(problem, movable=True), value_s).bound_s, least_s)
    placements = tuple(
        Placement.stack([unreplicated(np.argsort(held_G)[layer.group_E], len(cluster)) for layer, held_G in both])
        for both in (zip(*own, strict=True) for own in zip(layers_ML, held_MLG, strict=True))
    )
    return PlacedModels(placements, objective_s, bound_s, assignment_bound_s)


def _grouped(cluster: Cluster, profile: Profile, layer: int, place: str, rng: np.random.Generator) -> GroupedLayer:
    """One layer with its experts grouped by the strategy `place` of PLACE."""
    costs = layer_costs(cluster, profile, layer)
    own_G = even_slots(profile.experts, np.full(len(cluster), profile.experts))
    group_E = grouped(place, costs.load_WE[0], own_G, rng)
    return GroupedLayer(costs, group_E, costs.grouped(group_E))


def _placement_bound(below: Callable[[FloatArray], float], name: str, a: LayerCosts, b: LayerCosts) -> float:
    """A lower bound on the seconds of a layer for every placement of both models' experts; a is the model Table 2 starts with.

    Each term of the objective is replaced by its own least value, so the bound is attained only if one placement minimises all
    terms. `below` bounds the largest sum of any GPU from (G, E) seconds of each expert.
    """
    fixed = [float(own_WG.max()) for own_WG in (a.gate_s_WG, b.gate_s_WG, a.aggregate_s_WG, b.aggregate_s_WG)]
    dispatch, combine = [], []
    for costs in (a, b):
        _, dispatch_GE, combine_GE, _ = (costs.load_WE[0] - costs.own_WGE[0]) * costs.port_s_XG[:, :, None]
        dispatch.append(dispatch_GE)
        combine.append(combine_GE)
    expert = [costs.expert_s_WGE[0] for costs in (a, b)]
    both_there, both_back = np.concatenate(dispatch, axis=1), np.concatenate(combine, axis=1)
    moved = [*dispatch, both_there, *expert, *combine, both_back]
    return objective.longest(name, np.array([*fixed, *map(below, moved)]))
