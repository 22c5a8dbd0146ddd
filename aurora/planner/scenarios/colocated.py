"""Models that share every GPU, layer by layer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from aurora.algorithms.gpu_slots import check_slots, even_slots, shared_slots_MG
from aurora.algorithms.layers_in_threads import Progress, no_progress
from aurora.algorithms.placement.assignment import ASSIGN
from aurora.algorithms.placement.colocation import COLOCATE
from aurora.algorithms.placement.colocation_problem import ColocationProblem
from aurora.algorithms.placement.cost_model import LayerCosts, layer_costs
from aurora.algorithms.placement.grouping import grouped
from aurora.algorithms.placement.objective import formula, seconds
from aurora.algorithms.placement.placement_bounds import colocated_bound_s
from aurora.errors import InfeasiblePlan
from aurora.planner.scenarios.scenario import PlacedModels, Scenario
from aurora.types import Cluster, Placement, Profile
from aurora.types.arrays import FloatArray, IntArray


@dataclass(frozen=True)
class GroupedLayer:
    """One layer of one model with its experts in groups of equal size, one group per GPU.

    Attributes:
        group_E: (E,) int64, the group of each expert.
        nics_as_ports: the layer's costs, group by group, with port rates lowered to the NICs', for searches, which model ports
            but no NICs.
    """

    group_E: IntArray
    nics_as_ports: LayerCosts

    def gpu_E(self, held_G: IntArray) -> IntArray:
        """Returns (E,) int64, the GPU of each expert; GPU g holds the group held_G[g]."""
        return np.asarray(np.argsort(held_G)[self.group_E])


class Colocated(Scenario):
    """Places models that share every GPU, layer by layer. Layers of shorter models are placed once, and then reused in turn."""

    def costs(self, layer: int) -> list[LayerCosts]:
        """Returns the LayerCosts of a layer, one per model."""
        return [layer_costs(self.cluster, profile, layer % profile.layers) for profile in self.profiles]

    def place(self, rng: np.random.Generator, progress: Progress = no_progress) -> PlacedModels:
        """Places all models, layer by layer, by `options.assign` and `options.colocate`. See `Scenario.place`."""
        return self.priced(self.placements(rng), progress)

    def placements(self, rng: np.random.Generator, progress: Progress = no_progress) -> tuple[Placement, ...]:
        """Returns the placements of `place`, without their prices."""
        self._check_equal_shares()
        options, layers_M = self.options, [profile.layers for profile in self.profiles]
        shortest, longest = int(np.argmin(layers_M)), self.layers
        layers_ML = [[self._grouped(model, layer, rng) for layer in range(layers)] for model, layers in enumerate(layers_M)]
        held_MLG: list[list[IntArray]] = [[] for _ in self.profiles]
        for layer in range(longest):
            at_M = [layer % layers for layers in layers_M]
            costs_M = tuple(layers_L[at].nics_as_ports for layers_L, at in zip(layers_ML, at_M, strict=True))
            fixed = {model: held_MLG[model][at] for model, at in enumerate(at_M) if at < layer}
            start = fixed or {shortest: ASSIGN[options.assign](costs_M[shortest], rng)}
            problem = ColocationProblem(costs_M, start, movable=not fixed)
            for model, held_G in enumerate(COLOCATE[options.colocate](problem, rng)):
                if model not in fixed:
                    held_MLG[model].append(held_G)
        return tuple(
            Placement.stack([Placement.unreplicated(layer.gpu_E(held_G), len(self.cluster)) for layer, held_G in both])
            for both in (zip(*pair, strict=True) for pair in zip(layers_ML, held_MLG, strict=True))
        )

    def bounds(
        self, costs_M: Sequence[LayerCosts], split_MEG: Sequence[FloatArray], slots_G: IntArray | int = 0
    ) -> tuple[float, None]:
        """Returns a lower bound on the seconds of a layer for any number of slots, and None; see `Scenario.bounds`."""
        return colocated_bound_s(formula(len(self.profiles)), costs_M, self.replicas_fit), None

    def price(self, costs_M: Sequence[LayerCosts], split_MEG: Sequence[FloatArray]) -> float:
        """Returns the predicted seconds of a layer of all models by the `formula` of as many; see `Scenario.price`."""
        times_M = [costs.phase_times(split_EG) for costs, split_EG in zip(costs_M, split_MEG, strict=True)]
        return seconds(times_M, costs_M[0].nics is not None)

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
        return GroupedLayer(group_E, costs.nics_as_ports.grouped(group_E))


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
