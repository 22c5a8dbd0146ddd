"""Placement of colocated models, layer by layer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from aurora.planner.placement.assignment import ASSIGN
from aurora.planner.placement.bounds import colocated_bound_s
from aurora.planner.placement.branch_and_bound import prove_bound
from aurora.planner.placement.colocation import COLOCATE
from aurora.planner.placement.colocation_problem import ColocationProblem
from aurora.planner.placement.cost_model import GroupCosts, LayerCosts
from aurora.planner.placement.grouping import grouped
from aurora.planner.placement.objective import PhaseTimes, seconds
from aurora.planner.placement.placed_models import PlacedModels, unreplicated
from aurora.planner.placement.profile_costs import layer_costs
from aurora.planner.placement.slot_counts import even_slots, replicas_fit
from aurora.types import Cluster, Placement, PlanOptions, Profile
from aurora.types.arrays import IntArray


@dataclass(frozen=True)
class GroupedLayer:
    """One layer of one model with its experts in groups of equal size, one group per GPU.

    Attributes:
        costs: the layer's costs, expert by expert.
        group_E: (E,) int64, the group of each expert.
        group_costs: the layer's costs, group by group, on ports alone.
        searched: the same as searches see them, with ports as slow as NICs make them.
    """

    costs: LayerCosts
    group_E: IntArray
    group_costs: GroupCosts
    searched: GroupCosts

    def phase_times(self, held_G: IntArray) -> PhaseTimes:
        """The seconds of each phase, NICs included, with group held_G[g] on GPU g."""
        return self.costs.phase_times(np.eye(len(held_G))[np.argsort(held_G)[self.group_E]])


def place_colocated(
    cluster: Cluster,
    profiles: Sequence[Profile],
    options: PlanOptions,
    rng: np.random.Generator,
    clock: Callable[[], float],
) -> PlacedModels:
    """Places models that share every GPU.

    Layer l of the model with most layers is paired with layer l modulo each other model's length. A layer of a shorter model
    keeps the place of its first pairing. Each layer gets an equal part of what is left of `options.time_limit_s`.

    Args:
        cluster: the GPUs.
        profiles: one profile for each model, two or more.
        options: resolved, so `place`, `assign` and `colocate` name strategies.
        rng: for strategies that draw.
        clock: returns seconds; for searches with a time limit.
    """
    layers_M = [profile.layers for profile in profiles]
    shortest, longest = int(np.argmin(layers_M)), max(layers_M)
    layers_ML = [[_grouped(cluster, p, layer, options.place, rng) for layer in range(p.layers)] for p in profiles]
    held_MLG: list[list[IntArray]] = [[] for _ in profiles]
    objective_s = bound_s = assignment_bound_s = 0.0
    replicas = replicas_fit(cluster, profiles)
    end_s = clock() + options.time_limit_s
    for layer in range(longest):
        at_M = [layer % layers for layers in layers_M]
        layer_M = [layers_L[at] for layers_L, at in zip(layers_ML, at_M, strict=True)]
        fixed = {model: held_MLG[model][at] for model, at in enumerate(at_M) if at < layer}
        until_s = clock() + (end_s - clock()) / (longest - layer)
        problem = ColocationProblem(
            tuple(each.searched for each in layer_M),
            fixed or {shortest: ASSIGN[options.assign](layer_M[shortest].searched, rng)},
            movable=not fixed,
            objective=options.objective,
            clock=clock,
            until_s=until_s,
        )
        found = COLOCATE[options.colocate](problem, rng)
        for model in range(len(profiles)):
            if model not in fixed:
                held_MLG[model].append(found.group_MG[model])
        times_M = [each.phase_times(held_G) for each, held_G in zip(layer_M, found.group_MG, strict=True)]
        nics = layer_M[0].costs.nics is not None
        value_s = seconds(options.objective, times_M, nics)
        # Where models were fixed, the search did not try other places for them; where there are NICs, it only estimated them.
        known_s = 0.0 if fixed or nics else found.bound_s
        on_ports = replace(problem, costs_M=tuple(each.group_costs for each in layer_M), movable=True)
        least_s = colocated_bound_s(problem.formula, [each.costs for each in layer_M], replicas)
        objective_s += value_s
        bound_s += least_s
        assignment_bound_s += max(known_s or prove_bound(on_ports, value_s).bound_s, least_s)
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
    return GroupedLayer(costs, group_E, costs.grouped(group_E), costs.nics_as_ports.grouped(group_E))
