"""Where the experts of one model sit when tokens that choose several experts of a GPU travel to it once."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from aurora.errors import BadInput
from aurora.plan import objective
from aurora.plan.affinity import chosen_together, clustered, merged, once_bound
from aurora.plan.assign import ASSIGN
from aurora.plan.costs import expert_seconds, group_costs
from aurora.plan.gather import gathered
from aurora.plan.placing import REFINED, Placed, place_alone, placed_once, slots_G
from aurora.types import Cluster, Placement, PlanOptions, Profile
from aurora.types.arrays import IntArray

AFFINITY = "affinity"


def affinity_options(options: PlanOptions, profiles: Sequence[Profile], domains: Sequence[Profile]) -> PlanOptions:
    """The options of the plan to start from. BadInput unless there is one model alone, by itself, with its tokens' choices."""
    if len(profiles) > 1:
        raise BadInput("--affinity: expected one model alone, found two that share the GPUs")
    for taken, what in (
        (options.place not in ("auto", REFINED), f"--place {options.place}"),
        (options.assign != "auto", f"--assign {options.assign}"),
        (options.aim != "sum", f"--aim {options.aim}"),
        (bool(domains), "--domain"),
    ):
        if taken:
            raise BadInput(f"--affinity: expected no {what}, it is a placement for the sum of one profile's windows")
    try:
        profiles[0].known_choices  # noqa: B018
    except BadInput as error:
        raise BadInput(f"--affinity: {error}") from None
    return replace(options, place=REFINED)


def place_once(cluster: Cluster, profile: Profile, options: PlanOptions, rng: np.random.Generator) -> Placed:
    """One model, a token counted once a GPU: never longer than the placement that `REFINED` gives, counted so.

    From there and from groups of experts that tokens choose together, single experts are moved and swapped.
    """
    start = place_alone(cluster, profile, (), options, rng).placements_M[0]
    room_G = slots_G(cluster, profile, options)
    placements: list[Placement] = []
    objective_s = bound_s = free_bound_s = 0.0
    for layer in range(profile.layers):
        gpu_E = _layer(cluster, profile, layer, start.gpu_E(layer), room_G, rng)
        value_s = once_seconds(cluster, profile, layer, gpu_E)
        free_s = min(_free_bound(cluster, profile, layer, room_G), value_s)
        objective_s += value_s
        free_bound_s += free_s
        costs = group_costs(cluster, profile, layer, gpu_E, once=True)
        best_s = objective.exclusive(costs.terms(ASSIGN["exact"](costs, rng)))
        bound_s += max(min(best_s, value_s), free_s)
        placements.append(placed_once(gpu_E, len(cluster)))
    return Placed((Placement.stack(placements),), objective_s, bound_s, free_bound_s)


def once_seconds(cluster: Cluster, profile: Profile, layer: int, gpu_E: IntArray) -> float:
    """Seconds of Eq. 1 with expert e on GPU gpu_E[e], a token counted once a GPU. Source: Aurora Eq. 1."""
    costs = group_costs(cluster, profile, layer, gpu_E, once=True)
    return objective.exclusive(costs.terms(np.arange(len(cluster))))


def _layer(
    cluster: Cluster, profile: Profile, layer: int, start_E: IntArray, room_G: IntArray, rng: np.random.Generator
) -> IntArray:
    """(E,) int64: the best that is found from start_E and from groups, never longer than start_E."""
    tokens = merged(*profile.known_choices.layer(layer))
    together_EE = chosen_together(tokens[0], tokens[2], profile.experts)
    costs = group_costs(cluster, profile, layer, start_E, once=True)
    expert_s_GE = expert_seconds(cluster, profile, layer)
    found = [start_E]
    for begun_E in (start_E, _settled(cluster, profile, layer, clustered(together_EE, room_G), room_G, rng)):
        search = gathered(*tokens, begun_E, room_G, expert_s_GE, costs.gate_s_G, costs.port_s_XG, rng)
        found += [search, _settled(cluster, profile, layer, search, room_G, rng)]
    return min(found, key=lambda gpu_E: once_seconds(cluster, profile, layer, gpu_E))


def _settled(
    cluster: Cluster, profile: Profile, layer: int, gpu_E: IntArray, room_G: IntArray, rng: np.random.Generator
) -> IntArray:
    """The same groups on the GPUs that suit them best, where every GPU has room for any of them."""
    if np.bincount(gpu_E, minlength=len(cluster)).max() > room_G.min():
        return gpu_E
    held_G = ASSIGN["exact"](group_costs(cluster, profile, layer, gpu_E, once=True), rng)
    return np.argsort(held_G)[gpu_E]


def _free_bound(cluster: Cluster, profile: Profile, layer: int, room_G: IntArray) -> float:
    """Seconds below every placement of this layer."""
    costs = group_costs(cluster, profile, layer, np.zeros(profile.experts, dtype=np.int64), once=True)
    own_GE = profile.tokens_TLSE[:, layer].sum(axis=0)
    work_GE = expert_seconds(cluster, profile, layer)
    return once_bound(
        own_GE, profile.top_k, room_G, work_GE, costs.gate_s_G, costs.aggregate_s_G, *costs.port_s_XG,
    )  # fmt: skip
