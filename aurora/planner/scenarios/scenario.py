"""A scenario of planning, and what it returns: placements, the time that they take, and bounds on that time."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np

from aurora.algorithms.gpu_slots import replicas_fit
from aurora.algorithms.layers_in_threads import Progress, map_layers, no_progress
from aurora.algorithms.placement.cost_model import LayerCosts
from aurora.types import Cluster, Hierarchy, Placement, PlanOptions, Profile
from aurora.types.arrays import FloatArray, IntArray


@dataclass(frozen=True)
class PlacedModels:
    """The result of `Scenario.place`: one Placement per model, with its predicted time and lower bounds.

    Attributes:
        placements_M: one Placement per model.
        objective_s: predicted seconds of all layers, by the formulas that placements are chosen by.
        bound_s: lower bound on `objective_s` for all placements within the slots, with replicas where slots are left for any.
        assignment_bound_s: lower bound on `objective_s` for all assignments of the same groups of experts to GPUs or, over
            servers, for all placements without replicas; None where experts have replicas, or several traffic cases count.
        unseen_s: expected seconds on future traffic, drawn from a forecast; None if not estimated.
        slot_gain: share of `unseen_s` that one more slot on each GPU would save; None if memory has none, or not estimated.
        hierarchy_M: the Hierarchy of each model's all-to-alls; None for models whose all-to-alls are flat.
        estimated: whether `objective_s` is estimated from counts, see `rows_estimated`.
    """

    placements_M: tuple[Placement, ...]
    objective_s: float
    bound_s: float
    assignment_bound_s: float | None
    unseen_s: float | None = None
    slot_gain: float | None = None
    hierarchy_M: tuple[Hierarchy | None, ...] = ()
    estimated: bool = False


@dataclass(frozen=True)
class Scenario(ABC):
    """Way of sharing GPUs that is planned for (one subclass each): costs of layers, placement, lower bounds, predicted seconds.

    Layer l of the model with most layers runs beside layer l modulo each other model's length.

    Attributes:
        cluster: the GPUs; rank r is its r-th GPU.
        profiles: the traffic, one profile per model.
        options: the planning options after `resolve`, which replaces "auto" by names.
        domains: further profiles of a single model.
        hierarchy_M: the Hierarchy of each model's all-to-alls (None: flat); empty if not chosen yet, or all are flat.
    """

    cluster: Cluster
    profiles: Sequence[Profile]
    options: PlanOptions
    domains: Sequence[Profile] = ()
    hierarchy_M: tuple[Hierarchy | None, ...] = ()

    @property
    def layers(self) -> int:
        """The number of layers of the model with the most layers."""
        return max(profile.layers for profile in self.profiles)

    @cached_property
    def replicas_fit(self) -> bool:
        """True if bounds are of placements with replicas: for one model, or where memory holds an expert of several twice."""
        return len(self.profiles) == 1 or replicas_fit(self.cluster, self.profiles)

    @abstractmethod
    def costs(self, layer: int) -> list[LayerCosts]:
        """Returns the LayerCosts of a layer, one per model."""

    @abstractmethod
    def place(self, rng: np.random.Generator, progress: Progress = no_progress) -> PlacedModels:
        """Places all experts of all models; returns the placements with their predicted seconds and bounds.

        Args:
            rng: for strategies that draw.
            progress: called with (what is being done, layers done, layers in all).

        Raises:
            InfeasiblePlan: if the experts do not fit.
        """

    @abstractmethod
    def bounds(
        self, costs_M: Sequence[LayerCosts], split_MEG: Sequence[FloatArray], slots_G: IntArray | int = 0
    ) -> tuple[float, float | None]:
        """Returns lower bounds on the seconds of a layer: over all placements, and over those of a placement's own kind.

        The second is over all assignments of the same groups of experts to GPUs or, over servers, over all placements without
        replicas; None if it is not computed.

        Args:
            costs_M: the layer's costs, as `costs` returns them.
            split_MEG: the placement, as in `price`.
            slots_G: (G,) int64, with one model: slots that each GPU has at least, whatever memory and options allow.
        """

    @abstractmethod
    def price(self, costs_M: Sequence[LayerCosts], split_MEG: Sequence[FloatArray]) -> float:
        """Returns the predicted seconds of a layer under a placement.

        Args:
            costs_M: the layer's costs, as `costs` returns them.
            split_MEG: for each model (E, G) float64, the share of each expert's tokens that each GPU takes.
        """

    def for_placements(self, placements_M: Sequence[Placement], rng: np.random.Generator) -> Self:
        """Returns this scenario, set up to price the user's placements; `rng` is for orders that draw.

        Raises:
            InfeasiblePlan: if memory holds no placement of this scenario.
        """
        return self

    def unseen_s(self, placements_M: Sequence[Placement]) -> float | None:
        """Returns the expected seconds of all layers on future traffic, drawn from a forecast; None if not estimated."""
        return None

    def priced_layer(
        self, costs_M: Sequence[LayerCosts], split_MEG: Sequence[FloatArray], slots_G: IntArray | int = 0
    ) -> tuple[float, float, float | None]:
        """Returns (`price`, *`bounds`) of a layer; bounds that rounding brings above the price are lowered to it."""
        value_s, (bound_s, own_s) = self.price(costs_M, split_MEG), self.bounds(costs_M, split_MEG, slots_G)
        return value_s, min(bound_s, value_s), None if own_s is None else min(own_s, value_s)

    def priced(
        self, placements_M: Sequence[Placement], progress: Progress = no_progress, unseen_s: float | None = None
    ) -> PlacedModels:
        """Prices given placements: returns them with their predicted seconds and lower bounds.

        The bound holds for all placements within the slots that memory and options allow, or these placements use.

        Args:
            placements_M: one Placement per model.
            progress: called with (what is being done, layers done, layers in all).
            unseen_s: the result of the function of this name, if it is known.
        """

        def priced(layer: int) -> tuple[float, float, float | None]:
            used_G = [len(experts) for experts in placements_M[0].slots_LG[layer]] if len(placements_M) == 1 else 0
            return self.priced_layer(self.costs(layer), self.splits(placements_M, layer), np.array(used_G))

        value_s_L, bound_s_L, own_s_L = zip(*map_layers(priced, self.layers, "pricing layers", progress), strict=True)
        return PlacedModels(
            tuple(placements_M),
            sum(value_s_L),
            sum(bound_s_L),
            sum_if_all(own_s_L),
            unseen_s=self.unseen_s(placements_M) if unseen_s is None else unseen_s,
            hierarchy_M=self.hierarchy_M,
            estimated=rows_estimated(self.hierarchy_M, self.profiles),
        )

    def splits(self, placements_M: Sequence[Placement], layer: int) -> list[FloatArray]:
        """Returns, for each model, the (E, G) shares of each expert's tokens that each GPU takes in a layer."""
        return [placement.split_EG(layer % p.layers) for placement, p in zip(placements_M, self.profiles, strict=True)]

    def seconds(self, placements_M: Sequence[Placement]) -> FloatArray:
        """Returns (L,) predicted seconds of every layer; placements_M has one Placement per model."""
        return np.array([self.price(self.costs(layer), self.splits(placements_M, layer)) for layer in range(self.layers)])


def sum_if_all(seconds_L: Sequence[float | None]) -> float | None:
    """Returns the sum of the seconds of layers; None if that of a layer is None."""
    known_L = [seconds for seconds in seconds_L if seconds is not None]
    return sum(known_L) if len(known_L) == len(seconds_L) else None


def rows_estimated(hierarchy_M: Sequence[Hierarchy | None], profiles: Sequence[Profile]) -> bool:
    """Returns whether rows are estimated: of hierarchical all-to-alls whose profile has counts, but no token-level routing.

    Args:
        hierarchy_M: the Hierarchy of each model's all-to-alls; None for a model whose are flat. Empty if all are flat.
        profiles: the traffic, one profile per model.
    """
    pairs = zip(hierarchy_M or [None] * len(profiles), profiles, strict=True)
    return any(hierarchy is not None and profile.routing is None for hierarchy, profile in pairs)
