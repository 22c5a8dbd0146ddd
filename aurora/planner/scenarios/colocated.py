"""Models that share every GPU, layer by layer."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from aurora.algorithms.layers_in_threads import Progress, no_progress
from aurora.algorithms.placement.assignment import ASSIGN
from aurora.algorithms.placement.bounds import colocated_bound_s
from aurora.algorithms.placement.branch_and_bound import prove_bound
from aurora.algorithms.placement.colocation import COLOCATE
from aurora.algorithms.placement.colocation_problem import ColocationProblem
from aurora.algorithms.placement.cost_model import GroupCosts, LayerCosts, layer_costs
from aurora.algorithms.placement.gpu_slots import check_slots, even_slots, shared_slots_MG
from aurora.algorithms.placement.grouping import grouped
from aurora.algorithms.placement.objective import formula, seconds
from aurora.errors import InfeasiblePlan
from aurora.planner.scenarios.scenario import Clock, PlacedModels, Scenario
from aurora.types import Cluster, Placement, Profile
from aurora.types.arrays import FloatArray, IntArray


@dataclass(frozen=True)
class GroupedLayer:
    """One layer of one model with its experts in groups of equal size, one group per GPU.

    Attributes:
        costs: the layer's costs, expert by expert.
        group_E: (E,) int64, the group of each expert.
        group_costs: the layer's costs, group by group, without NICs.
        nics_as_ports: `group_costs` with port rates lowered to the NICs', for searches, which model ports but no NICs.
    """

    costs: LayerCosts
    group_E: IntArray
    group_costs: GroupCosts
    nics_as_ports: GroupCosts

    def gpu_E(self, held_G: IntArray) -> IntArray:
        """Returns (E,) int64, the GPU of each expert; GPU g holds the group held_G[g]."""
        return np.asarray(np.argsort(held_G)[self.group_E])


class Colocated(Scenario):
    """Places models that share every GPU, layer by layer. Layers of shorter models are placed once, and then reused in turn."""

    def costs(self, layer: int) -> list[LayerCosts]:
        """Returns the LayerCosts of a layer, one per model."""
        return [layer_costs(self.cluster, profile, layer % profile.layers) for profile in self.profiles]

    def place(self, rng: np.random.Generator, clock: Clock = time.monotonic, progress: Progress = no_progress) -> PlacedModels:
        """Places all models; the searches of the layers share `options.time_limit_s` evenly. See `Scenario.place`."""
        self._check_equal_shares()
        options, layers_M = self.options, [profile.layers for profile in self.profiles]
        shortest, longest = int(np.argmin(layers_M)), self.layers
        layers_ML = [[self._grouped(model, layer, rng) for layer in range(layers)] for model, layers in enumerate(layers_M)]
        held_MLG: list[list[IntArray]] = [[] for _ in self.profiles]
        objective_s = bound_s = assignment_bound_s = 0.0
        end_s = clock() + options.time_limit_s
        for layer in range(longest):
            at_M = [layer % layers for layers in layers_M]
            layer_M = [layers_L[at] for layers_L, at in zip(layers_ML, at_M, strict=True)]
            costs_M = [groups.costs for groups in layer_M]
            fixed = {model: held_MLG[model][at] for model, at in enumerate(at_M) if at < layer}
            problem = ColocationProblem(
                tuple(groups.nics_as_ports for groups in layer_M),
                fixed or {shortest: ASSIGN[options.assign](layer_M[shortest].nics_as_ports, rng)},
                movable=not fixed,
                objective=options.objective,
                clock=clock,
                until_s=clock() + (end_s - clock()) / (longest - layer),
            )
            placed = COLOCATE[options.colocate](problem, rng)
            for model in range(len(layers_M)):
                if model not in fixed:
                    held_MLG[model].append(placed.group_MG[model])
            gpus = np.eye(len(self.cluster))
            split_MEG = [gpus[groups.gpu_E(held_G)] for groups, held_G in zip(layer_M, placed.group_MG, strict=True)]
            value_s, least_s, _ = self.priced_layer(costs_M, split_MEG)
            # Where models were fixed, the search did not try other places for them; where there are NICs, it only estimated.
            known_s = 0.0 if fixed or costs_M[0].nics is not None else placed.bound_s
            on_ports = replace(problem, costs_M=tuple(groups.group_costs for groups in layer_M), movable=True)
            objective_s += value_s
            bound_s += least_s
            proved_s = max(known_s or prove_bound(on_ports, value_s).bound_s, least_s)
            assignment_bound_s += min(proved_s, value_s)
        placements = tuple(
            Placement.stack([Placement.unreplicated(layer.gpu_E(held_G), len(self.cluster)) for layer, held_G in both])
            for both in (zip(*pair, strict=True) for pair in zip(layers_ML, held_MLG, strict=True))
        )
        return PlacedModels(placements, objective_s, bound_s, assignment_bound_s)

    def bounds(
        self, costs_M: Sequence[LayerCosts], split_MEG: Sequence[FloatArray], slots_G: IntArray | int = 0
    ) -> tuple[float, None]:
        """Returns a lower bound on the seconds of a layer for any number of slots, and None; see `Scenario.bounds`."""
        return colocated_bound_s(formula(self.options.objective, len(self.profiles)), costs_M, self.replicas_fit), None

    def price(self, costs_M: Sequence[LayerCosts], split_MEG: Sequence[FloatArray]) -> float:
        """Returns the predicted seconds of a layer of all models by `options.objective`; see `Scenario.price`."""
        times_M = [costs.phase_times(split_EG) for costs, split_EG in zip(costs_M, split_MEG, strict=True)]
        return seconds(self.options.objective, times_M, costs_M[0].nics is not None)

    def for_placements(self, placements_M: Sequence[Placement], rng: np.random.Generator) -> Self:
        """Returns this scenario; raises InfeasiblePlan unless equal shares of the experts fit on every GPU."""
        self._check_equal_shares()
        return self

    def _check_equal_shares(self) -> None:
        """Raises InfeasiblePlan unless an equal share of all models' experts fits on every GPU."""
        cluster, profiles = self.cluster, self.profiles
        for profile, slots_G in zip(profiles, shared_slots_MG(cluster, profiles), strict=True):
            check_slots(cluster, profile, slots_G)
        if (short := lacking_memory(cluster, profiles)) is not None:
            raise InfeasiblePlan(short)

    def _grouped(self, model: int, layer: int, rng: np.random.Generator) -> GroupedLayer:
        """One layer of one model with its experts grouped by `options.place`."""
        profile = self.profiles[model]
        costs = layer_costs(self.cluster, profile, layer)
        own_G = even_slots(profile.experts, np.full(len(self.cluster), profile.experts))
        group_E = grouped(self.options.place, costs.load_WE[0], own_G, rng)
        return GroupedLayer(costs, group_E, costs.grouped(group_E), costs.nics_as_ports.grouped(group_E))


def share_bytes(profile: Profile, gpus: int) -> int:
    """Returns the bytes of a GPU that holds an equal share of every layer's experts, and all other weights, of a model."""
    return profile.other_bytes + -(-profile.experts // gpus) * profile.layers * profile.expert_bytes


def lacking_memory(cluster: Cluster, profiles: Sequence[Profile]) -> str | None:
    """Returns a sentence on the memory that a GPU lacks for an equal share of all models; None if each has enough."""
    weakest, need = min(cluster.gpus, key=lambda gpu: gpu.memory_bytes), sum(share_bytes(p, len(cluster)) for p in profiles)
    if need <= weakest.memory_bytes:
        return None
    return (
        f"gpu {weakest.name!r}: {weakest.memory_bytes} bytes of memory, but an equal share of every layer's experts "
        f"of {len(profiles)} models needs {need}"
    )
