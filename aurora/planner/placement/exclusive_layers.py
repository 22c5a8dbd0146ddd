"""Placement of one model that has the GPUs to itself, layer by layer."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from aurora.errors import InfeasiblePlan
from aurora.planner.placement.assignment import ASSIGN, best_exclusive_s
from aurora.planner.placement.cost_model import LayerCosts, aimed_costs, layer_costs
from aurora.planner.placement.grouping import PLACE, grouped
from aurora.planner.placement.placed_models import PlacedModels, unreplicated
from aurora.planner.placement.placement_bound import layer_bound_s
from aurora.planner.placement.slot_counts import even_slots, failure_domains, slots_G
from aurora.planner.placement.swap_search import swap_search
from aurora.planner.replication.failure_resilient import SURVIVE, aim_of
from aurora.planner.replication.registry import REPLICAS, best_divided, place
from aurora.planner.replication.replica_counts import allocate, capped
from aurora.types import Cluster, FailureDomains, GpuSlots, Placement, PlanOptions, Profile
from aurora.types.arrays import IntArray

SWAP_SEARCH = "swap-search"  # not in PLACE, as it places experts one by one


@dataclass(frozen=True)
class ExclusiveProblem:
    """One layer of a model that has the GPUs to itself, as placement strategies see it.

    Attributes:
        costs: the layer in every scenario that the placement must serve.
        own_costs: the layer over the whole profile, without the profiles of further domains.
        slots_G: (G,) int64, how many experts each GPU can hold.
        domains: which GPUs fail together.
    """

    costs: LayerCosts
    own_costs: LayerCosts
    slots_G: IntArray
    domains: FailureDomains

    @property
    def load_E(self) -> IntArray:
        """(E,) int64 tokens of each expert in all scenarios."""
        return np.asarray(self.costs.load_WE.sum(axis=0), dtype=np.int64)

    @property
    def any_group_fits(self) -> bool:
        """Whether every GPU has slots for any group if experts are divided into one group per GPU, as equally as possible."""
        return bool((self.slots_G >= -(-len(self.load_E) // len(self.slots_G))).all())


def place_exclusive(
    cluster: Cluster, profile: Profile, domains: Sequence[Profile], options: PlanOptions, rng: np.random.Generator
) -> PlacedModels:
    """Places one model that has the GPUs to itself.

    Args:
        cluster: the GPUs.
        profile: the model's traffic.
        domains: further profiles of the same model that the placement must serve; `options.aim` says how they count.
        options: resolved, so `options.place` names a strategy.
        rng: for random strategies and restarts of searches.

    Raises:
        InfeasiblePlan: if the experts do not fit.
    """
    capacity_G = slots_G(cluster, profile, options)
    nodes = failure_domains(cluster, capacity_G)
    placements: list[Placement] = []
    objective_s = bound_s = assignment_bound_s = 0.0
    grouped_once = not domains
    for layer in range(profile.layers):
        costs = aimed_costs(cluster, profile, domains, layer, options.aim)
        problem = ExclusiveProblem(costs, layer_costs(cluster, profile, layer), capacity_G, nodes)
        if options.place in PLACE and not problem.any_group_fits:
            raise InfeasiblePlan(
                f"`place` {options.place}: an equal share of {profile.model!r}'s experts does not fit on every GPU; "
                f"`place` {SWAP_SEARCH} gives the larger GPUs more"
            )
        placement = _place_layer(problem, options, rng)
        value_s = costs.value_s(placement.split_EG(0))
        objective_s += value_s
        bound_s += min(layer_bound_s(costs, capacity_G), value_s)
        grouped_once = grouped_once and placement.split_LG is None and len(costs.own_WGE) == 1
        if grouped_once:
            assignment_bound_s += min(best_exclusive_s(problem.own_costs.grouped(placement.gpu_E(0))), value_s)
        placements.append(placement)
    stacked = Placement.stack(placements)
    return PlacedModels((stacked,), objective_s, bound_s, assignment_bound_s if grouped_once else None)


def _place_layer(problem: ExclusiveProblem, options: PlanOptions, rng: np.random.Generator) -> Placement:
    """One layer placed by the strategy `options.place`."""
    if options.place in SURVIVE:
        return _failure_resilient(problem, options, rng)
    if options.place in REPLICAS:
        return _replicated(problem, options, rng)
    return _unreplicated(problem, options.place, options.assign, rng)


def _unreplicated(problem: ExclusiveProblem, place: str, assign: str, rng: np.random.Generator) -> Placement:
    """Each expert on one GPU: groups of equal size assigned to GPUs; then the swap search if `place` names it."""
    own_G = even_slots(len(problem.load_E), problem.slots_G)
    gpu_E = grouped("balanced" if place == SWAP_SEARCH else place, problem.load_E, own_G, rng)
    if problem.any_group_fits:
        held_G = ASSIGN[assign](problem.own_costs.grouped(gpu_E), rng)
        gpu_E = np.argsort(held_G)[gpu_E]
    if place == SWAP_SEARCH:
        gpu_E = swap_search(problem.costs, gpu_E, problem.slots_G, rng)
    return unreplicated(gpu_E, len(problem.slots_G))


def _replicated(problem: ExclusiveProblem, options: PlanOptions, rng: np.random.Generator) -> Placement:
    """The shortest of three placements: no replicas, replicas as the strategy packs them, and these after the swap search."""
    single = _unreplicated(problem, SWAP_SEARCH, options.assign, rng)
    cost_G = np.ones(len(problem.slots_G)) if options.place == "eplb" else problem.costs.token_s_G  # EPLB treats GPUs as equal
    packed = place(problem.load_E, GpuSlots(problem.slots_G, cost_G), options.place, seed=options.seed).placement
    searched = _swapped_replicas(problem, packed, REPLICAS[options.place].divided_evenly, rng)
    return min(single, packed, searched, key=lambda each: problem.costs.value_s(each.split_EG(0)))


def _swapped_replicas(problem: ExclusiveProblem, placement: Placement, evenly: bool, rng: np.random.Generator) -> Placement:
    """One layer's replicas after a swap search that moves each replica with its share, as if it were an expert.

    Replicas of one expert that end up on the same GPU are merged. evenly: the replicas of an expert then share its load evenly.
    """
    slots = [(expert, gpu) for gpu, held in enumerate(placement.slots_LG[0]) for expert in held]
    expert_P, gpu_P = (np.array(column) for column in zip(*slots, strict=True))
    share_P = placement.split_EG(0)[expert_P, gpu_P]
    found_P = swap_search(problem.costs.of_replicas(expert_P, share_P), gpu_P, problem.slots_G, rng)
    split_EG = np.zeros((placement.experts, placement.gpus))
    np.add.at(split_EG, (expert_P, found_P), share_P)
    if evenly:
        split_EG = (split_EG > 0) / (split_EG > 0).sum(axis=1, keepdims=True)
    held = [sorted(set(expert_P[found_P == gpu].tolist())) for gpu in range(placement.gpus)]
    split = [split_EG[experts, gpu].tolist() for gpu, experts in enumerate(held)]
    return Placement((tuple(map(tuple, held)),), (tuple(map(tuple, split)),))


def _failure_resilient(problem: ExclusiveProblem, options: PlanOptions, rng: np.random.Generator) -> Placement:
    """Replicas that survive failures of nodes, no two of an expert on one GPU, with the best token split."""
    assert options.min_replicas is not None, "resolving the options sees to it"
    domains, load_E = problem.domains, problem.load_E
    count_E = capped(allocate(load_E, domains, options.min_replicas), load_E, len(problem.slots_G))
    held_EG = SURVIVE[options.place](count_E, domains, aim_of(options.min_replicas, domains), rng)
    return best_divided(held_EG.T, load_E.astype(np.float64), problem.costs.token_s_G)
