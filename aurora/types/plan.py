"""Plan: where experts sit and in which order tokens travel, for one model or for several that share the GPUs."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import numpy as np

from aurora.errors import BadInput
from aurora.types.arrays import FloatArray, IntArray, Value, check_arrays, check_name, gap, layer_numbers
from aurora.types.cluster import Cluster
from aurora.types.model_identity import ModelIdentity
from aurora.types.network import Cut
from aurora.types.options import PlanOptions
from aurora.types.placement import Placement
from aurora.types.profile import Profile
from aurora.types.schedule import Hierarchy, Order


@dataclass(frozen=True, eq=False, repr=False)
class ModelPlan(Value):
    """One model's placement, orders and predicted times in a Plan.

    Args:
        model: the model's name.
        fingerprint: hashes of its router weights, as in Profile.
        profile_path: file of the model's profile, relative to the plan's file; empty if the profile was not read from a file.
        profile_digest: the profile's digest.
        top_k: experts per token, as in Profile.
        dispatch_bytes: payload of one (token, expert) pair, as in Profile.
        expert_bytes: weights of one expert in one layer.
        other_bytes: all other weights, which every rank holds.
        placement: which GPU holds which experts.
        dispatch_L: the order of each layer's dispatch.
        combine_L: the order of each layer's combine.
        dispatch_s_L: (L,) float64, seconds of each layer's dispatch when the traffic of the whole profile is one all-to-all.
        fluid_bound_s_L: (L,) float64, the fluid bound on dispatch_s_L.
        one_to_one_bound_s_L: (L,) float64, the one-to-one bound on dispatch_s_L.
        cut_L: the port or NIC that limits each layer's dispatch between servers; empty on a big switch.
        load_LE: (L, E) int64, the tokens of each expert in the traffic that the plan was made for.
        dense_layers: indices, among all decoder layers, of the layers without experts, as in Profile.
        hierarchy: the servers and chunks of its hierarchical all-to-alls, whose tokens are deduplicated; None if they are flat.
        traffic_digest: the profile's `traffic_digest`.

    Raises:
        BadInput: if a layer lacks loads or one of its two orders, top_k or a size is out of range, or the hierarchy has another
            number of ranks.
    """

    model: str
    fingerprint: str
    profile_path: str
    profile_digest: str
    top_k: int
    dispatch_bytes: int
    expert_bytes: int
    other_bytes: int
    placement: Placement
    dispatch_L: tuple[Order, ...]
    combine_L: tuple[Order, ...]
    dispatch_s_L: FloatArray
    fluid_bound_s_L: FloatArray
    one_to_one_bound_s_L: FloatArray
    load_LE: IntArray
    dense_layers: tuple[int, ...] = ()
    cut_L: tuple[Cut, ...] = ()
    hierarchy: Hierarchy | None = None
    traffic_digest: str = ""

    def __post_init__(self) -> None:
        what, layers, experts = f"plan of {self.model!r}", len(self.placement.slots_LG), self.placement.experts
        check_arrays(self, f"{what}, ")
        for name in ("expert_bytes", "other_bytes"):
            if getattr(self, name) < 0:
                raise BadInput(f"{what}: expected {name} of zero or more, found {getattr(self, name)}")
        if not 1 <= self.top_k <= experts or self.dispatch_bytes < 1:
            sizes = f"found {self.top_k} and {self.dispatch_bytes}"
            raise BadInput(f"{what}: expected top_k from 1 to {experts} and dispatch_bytes above zero, {sizes}")
        for name in (self.model, self.fingerprint):
            check_name("plan: model and fingerprint", name)
        object.__setattr__(self, "dense_layers", layer_numbers(f"{what}, dense_layers", self.dense_layers))
        if self.load_LE.shape != (layers, experts):
            raise BadInput(f"{what}: expected loads of {layers} layers x {experts} experts, found {self.load_LE.shape}")
        if not len(self.dispatch_L) == len(self.combine_L) == layers:
            orders = f"{len(self.dispatch_L)} and {len(self.combine_L)}"
            raise BadInput(f"{what}: expected two orders for each of {layers} layers, found {orders}")
        if self.hierarchy is not None and self.hierarchy.ranks != self.placement.gpus:
            raise BadInput(f"{what}: expected the servers of {self.placement.gpus} ranks, found {self.hierarchy.ranks}")

    @property
    def deduplicated(self) -> bool:
        """True if a token is sent once to a server that holds several of its experts: all-to-alls are hierarchical."""
        return self.hierarchy is not None

    @property
    def identity(self) -> ModelIdentity:
        """Sizes and fingerprint that distinguish the model from others."""
        sizes = (len(self.dispatch_L), self.placement.experts, self.top_k, self.dispatch_bytes, self.expert_bytes)
        return ModelIdentity(self.model, self.fingerprint, *sizes)

    def made_from(self, profile: Profile) -> bool:
        """Returns whether the plan was made from the traffic of `profile`; the compute curves may differ."""
        return profile.traffic_digest == self.traffic_digest

    @property
    def bound_s_L(self) -> FloatArray:
        """(L,) float64: lower bounds on dispatch_s_L: each layer's fluid bound, or its cut's bound if that is larger."""
        return np.maximum(self.fluid_bound_s_L, [cut.bound_s for cut in self.cut_L] or 0.0)


@dataclass(frozen=True, eq=False, repr=False)
class Plan(Value):
    """A placement of experts and the orders of all-to-alls, for one model or several that share the GPUs.

    Args:
        cluster: the machines that the plan is for.
        models: each model's placement and orders.
        options: the options that the plan was made with, each "auto" replaced by the chosen name. `assign` and `order` stay
            "auto" if they have no effect, or were chosen for each layer separately.
        objective_s: predicted seconds of all layers by the formula that `objective` names; windows and domains are summed, or
            weighted as `options.aim` says. The formula covers ports and the NICs of servers, but not the links of other
            fabrics; the times of orders (`dispatch_s_L`) cover these too.
        bound_s: lower bound on objective_s over all placements within each GPU's slots, with replicas if there are more slots
            than experts. The slots are `options.slots_per_gpu`, or what memory holds.
        assignment_bound_s: lower bound on objective_s over all assignments of one model's groups of experts, one group per GPU;
            with hierarchical all-to-alls, over all placements without replicas. None if experts have replicas, or the plan
            serves several traffic cases or, flat, several models.
        survival_LK: (L, D-1) float64: with `options.min_replicas`, the probability that every expert is still held after 1, 2,
            ... of the D nodes failed; None if failures were not planned for.
        unseen_s: expected seconds on future windows of the same traffic (drawn from a forecast), weighted as `objective_s`;
            None if not estimated: for several models or domains, and for hierarchical all-to-alls.
        slot_gain: share of `unseen_s` that one more slot on each GPU would save; if aurora chose the slots, share of the
            simulated step on held-out windows. None if memory has no room for a slot, or if not estimated.
        notes: remarks on how the plan was made.
        estimated: whether objective_s is estimated from counts: without token-level routing, the rows of hierarchical
            all-to-alls are not known.

    Raises:
        BadInput: if the models do not fit the cluster or each other.
    """

    cluster: Cluster
    models: tuple[ModelPlan, ...]
    options: PlanOptions
    objective_s: float
    bound_s: float
    assignment_bound_s: float | None = None
    survival_LK: FloatArray | None = None
    unseen_s: float | None = None
    slot_gain: float | None = None
    notes: tuple[str, ...] = ()
    estimated: bool = False

    def __post_init__(self) -> None:
        if not self.models:
            raise BadInput("plan: expected at least one model, found none")
        if self.colocated and self.options.micro_batches > 1:
            raise BadInput(f"`micro_batches`: cut the batches of a single model, expected 1, found {len(self.models)} models")
        if (priorities := self.options.priorities) and len(priorities) != len(self.models):
            raise BadInput(f"`priorities`: expected one for each of {len(self.models)} models, found {len(priorities)}")
        if (self.options.min_replicas is None) != (self.survival_LK is None):
            raise BadInput("plan: expected min_replicas and survival together or neither")
        check_arrays(self, "plan, ")
        for model in self.models:
            if model.placement.gpus != len(self.cluster.gpus):
                mismatch = f"expected a placement on {len(self.cluster.gpus)} GPUs, found one on {model.placement.gpus}"
                raise BadInput(f"plan of {model.model!r}: {mismatch}")

    def __repr__(self) -> str:
        models = ", ".join(f"{m.model!r} ({len(m.dispatch_L)} layers x {m.placement.experts} experts)" for m in self.models)
        return (
            f"Plan({self.scenario}: {models} on {self.cluster.name!r} ({len(self.cluster.gpus)}), {self.objective} objective "
            f"{self.objective_s:.4g} s, gap {self.gap:.1%})"
        )

    @cached_property
    def colocated(self) -> bool:
        """True if several models share the GPUs."""
        return len(self.models) > 1

    @property
    def served_names(self) -> tuple[str, ...]:
        """Names of the plan's models, or of the micro-batches of its only model, as in programs and traces."""
        if self.options.micro_batches < 2:
            return tuple(model.model for model in self.models)
        return tuple(f"{model.model}/{part}" for model in self.models for part in range(self.options.micro_batches))

    def with_micro_batches(self, parts: int) -> Self:
        """Returns the plan with each rank's batches cut into `parts` micro-batches."""
        return replace(self, options=replace(self.options, micro_batches=parts))

    @property
    def scenario(self) -> str:
        """One of Aurora's four scenarios: exclusive or colocated, on equal or mixed GPUs (Aurora §4-§7)."""
        return f"{'colocated' if self.colocated else 'exclusive'}, {'equal' if self.cluster.equal else 'mixed'} GPUs"

    @property
    def objective(self) -> str:
        """Name of the formula for objective_s: "exclusive" (Eq. 1), "causal" (two models), "busiest-resource" (more)."""
        return {1: "exclusive", 2: "causal"}.get(len(self.models), "busiest-resource")

    @property
    def strategies(self) -> dict[str, str]:
        """Maps the name of each option that had an effect on this plan to its value."""
        options = self.options
        values = {"place": options.place, "assign": options.assign}
        if self.colocated:
            values |= {"colocate": options.colocate, "time_slice": options.time_slice}
            if options.priorities:
                values["priorities"] = ", ".join(options.priorities)
                if options.preemption_s is not None:
                    values["preemption"] = f"{options.preemption_s:g} s"
        else:
            values["aim"] = options.aim
        if options.micro_batches > 1:
            values |= {"micro_batches": str(options.micro_batches), "time_slice": options.time_slice}
        for name in ("slots_per_gpu", "min_replicas"):
            if getattr(options, name):
                values[name] = str(getattr(options, name))
        if any(model.hierarchy is not None for model in self.models):
            values["all_to_all"] = self.options.all_to_all
        return {**values, "order": options.order}

    @property
    def unseen_loss(self) -> float | None:
        """unseen_s / objective_s - 1: 0.1 means that future windows are expected to take 10 % longer; None if not estimated."""
        return None if self.unseen_s is None else gap(self.unseen_s, self.objective_s)

    @property
    def gap(self) -> float:
        """objective_s / bound_s - 1: 0.1 means that the plan takes 10 % longer than the lower bound for all placements."""
        return gap(self.objective_s, self.bound_s)
