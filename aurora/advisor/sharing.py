"""Simulated seconds of the models of a colocated plan if they ran one after the other, to compare sharing with."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from aurora.algorithms.compile import compile_plan
from aurora.algorithms.layers_in_threads import Progress, no_progress
from aurora.planner.plan import make_plan
from aurora.simulator.interpreter import batch_orders, simulate, simulate_plan
from aurora.types import Plan, PlanOptions, Profile
from aurora.types.arrays import evenly_spaced
from aurora.types.options import GATHERED

SHARING = "simulating ways of sharing"  # as progress names it
ALONE_LAYERS = 8  # at most, for which a model of a colocated plan gets a plan of its own


class ApartSeconds(NamedTuple):
    """Simulated seconds of a colocated plan's models if they run one after the other.

    Args:
        by_plan: seconds if each model uses its placement and orders of the colocated plan.
        by_own: seconds if each model uses an exclusive plan, made for it.
    """

    by_plan: float
    by_own: float


def apart_seconds(
    plan: Plan,
    profiles: Sequence[Profile],
    barriers: str = "gpu",
    orders: str = "plan",
    staged: bool = False,
    progress: Progress = no_progress,
) -> ApartSeconds:
    """Simulates the models of a colocated plan one after the other on the same GPUs.

    If a model has more than ALONE_LAYERS layers, its exclusive plan is made for ALONE_LAYERS evenly spaced layers, and is
    assumed to save the same share on all layers.

    Args:
        plan: a plan of several models.
        profiles: the traffic, one profile per model.
        barriers, orders, staged: as in `simulate_plan`.
        progress: called with (name of the work, models done, models in all).
    """
    options = PlanOptions(order=plan.options.order, seed=plan.options.seed)
    by_plan = by_own = 0.0
    for number, (model, profile) in enumerate(zip(plan.models, profiles, strict=True)):
        progress(SHARING, number, len(profiles))
        part, some = replace(plan, models=(model,), options=options), evenly_spaced(profile.layers, ALONE_LAYERS)
        few, program = profile.at_layers(some), compile_plan(part, gathered=orders == GATHERED)
        part_s = simulate_plan(part, [profile], barriers, orders, staged=staged).seconds
        ordered = batch_orders(part, orders)
        few_s = simulate(program.at_layers([some]), plan.cluster, [few], barriers, ordered, staged=staged).seconds
        own_s = simulate_plan(make_plan(plan.cluster, [few], options), [few], barriers, orders, staged=staged).seconds
        by_plan, by_own = by_plan + part_s, by_own + part_s * own_s / few_s
    progress(SHARING, len(profiles), len(profiles))
    return ApartSeconds(by_plan, by_own)
