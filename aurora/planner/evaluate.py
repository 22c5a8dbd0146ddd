"""Evaluates a plan on traffic that it was not made for: its time, and its loss against a plan made for that traffic."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from aurora.errors import BadInput
from aurora.planner.check.traffic import check_traffic
from aurora.planner.make_plan import make_plan
from aurora.planner.network.schedule_time import timed
from aurora.planner.placement.cost_model import aimed_costs, group_costs, layer_costs
from aurora.planner.placement.objective import OBJECTIVE, exclusive
from aurora.planner.workload.traffic import layer_traffic
from aurora.types import Placement, Plan, Profile
from aurora.types.arrays import FloatArray, gap


@dataclass(frozen=True)
class Evaluation:
    """The time of a plan on traffic that it was not made for.

    Args:
        served_s_L: (L,) seconds of each layer by the plan's objective and aim.
        own: a plan made for this traffic with the options of the evaluated plan.
        dispatch_s_ML: one array (L,) per model, seconds of each layer's whole dispatch in the plan's order.
    """

    served_s_L: FloatArray
    own: Plan
    dispatch_s_ML: tuple[FloatArray, ...]

    @property
    def loss(self) -> float:
        """How much longer the plan takes than `own`, as a share: 0.1 means 10 % longer."""
        return gap(float(self.served_s_L.sum()), self.own.objective_s)


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
        (L,) float64; L is the number of layers, of two models the larger one.

    Raises:
        BadInput: with deduplicated tokens, if the placement has replicas or the profile holds no token-level routing.
    """
    if plan.models[0].deduplicated and placements[0].split_LG is not None:
        raise BadInput("a plan with deduplicated tokens: expected a placement without replicas, found replicas")
    seconds = []
    for layer in range(max(profile.layers for profile in profiles)):
        at_M = [layer % profile.layers for profile in profiles]
        if plan.models[0].deduplicated:
            costs = group_costs(plan.cluster, profiles[0], layer, placements[0].gpu_E(layer), deduplicated=True)
            seconds.append(exclusive(costs.phase_times()))
        elif len(profiles) == 1:
            aimed = aimed_costs(plan.cluster, profiles[0], domains, layer, plan.options.aim)
            seconds.append(aimed.value_s(placements[0].split_EG(layer)))
        else:
            times = (
                layer_costs(plan.cluster, profile, at).phase_times(placement.split_EG(at))
                for profile, placement, at in zip(profiles, placements, at_M, strict=True)
            )
            seconds.append(OBJECTIVE[plan.objective](*times))
    return np.array(seconds)


def evaluate(plan: Plan, profiles: Sequence[Profile]) -> Evaluation:
    """Prices a plan on other traffic; see `aurora.evaluate`. Further domains that the plan was made for do not count."""
    check_traffic(plan, profiles)
    placements = [model.placement for model in plan.models]
    dispatch_s_ML = tuple(
        np.array(
            [
                timed(
                    order,
                    layer_traffic(profile, layer, model.placement.split_EG(layer), model.deduplicated)
                    * profile.row_bytes(model.deduplicated),
                    plan.cluster.network,
                ).makespan_s
                for layer, order in enumerate(model.dispatch_L)
            ]
        )
        for model, profile in zip(plan.models, profiles, strict=True)
    )
    own = make_plan(plan.cluster, profiles, plan.options)
    return Evaluation(layer_seconds(plan, placements, profiles), own, dispatch_s_ML)
