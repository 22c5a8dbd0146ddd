"""The plan that the interpreter finds shortest: between the planning models' answers, what none of them sees decides."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from aurora.errors import BadInput
from aurora.planner.make_plan import make_plan
from aurora.planner.placement.objective import OBJECTIVE
from aurora.simulator.interpreter import simulate_plan
from aurora.types import TIME_SLICES, Cluster, Plan, PlanOptions, Profile

SIMULATED = "simulated"
EXCLUSIVE_PLACES = ("swap-search", "balanced", "contiguous")  # placements of one model that are tried
TRANSFERS = 1_000_000  # that are simulated to choose turns: some seconds
COLOCATIONS = ("local-search", "matching", "decoupled")  # and colocations of two


def simulated_plan(
    cluster: Cluster, profiles: Sequence[Profile], options: PlanOptions, profile_paths: Sequence[str] = ()
) -> Plan:
    """The candidate that serves the profiles' windows soonest in the simulator; the first of equals.

    Two models: every objective with every colocation of TOGETHER; one: every placement of ALONE. What options name instead of
    "auto" stays as it is. Raises as make_plan, and BadInput where nothing is left to choose.
    """
    candidates = list(_candidates(options, len(profiles) == 2))
    if len(candidates) < 2:
        raise BadInput(f"`objective` {SIMULATED}: expected `place` or `colocate` left to auto, found nothing to choose between")
    plans = [make_plan(cluster, profiles, candidate, profile_paths) for candidate in candidates]
    best = min(plans, key=lambda plan: simulate_plan(plan, profiles).seconds)
    return replace(best, notes=(*best.notes, "chosen by simulation"))


def with_time_slice(plan: Plan, profiles: Sequence[Profile]) -> Plan:
    """`plan`, of two models, with those turns at the ports by which the simulator serves the profiles sooner: their first
    windows, as many as TRANSFERS allow. Where it is not one, the plan stays as it is."""
    pairs = max(1, len(plan.cluster) * (len(plan.cluster) - 1))
    windows = TRANSFERS // (2 * pairs * sum(len(model.dispatch_L) for model in plan.models))
    if windows == 0:
        return plan
    first = [
        profile
        if profile.windows <= windows
        else replace(profile, tokens_TLSE=profile.tokens_TLSE[:windows], stage_T=None, routing=None, coactivation=None)
        for profile in profiles
    ]
    either = [replace(plan, options=replace(plan.options, time_slice=time_slice)) for time_slice in TIME_SLICES]
    return min(either, key=lambda each: simulate_plan(each, first).seconds)


def _candidates(options: PlanOptions, colocated: bool) -> Iterator[PlanOptions]:
    if not colocated:
        for place in EXCLUSIVE_PLACES if options.place == "auto" else (options.place,):
            yield replace(options, place=place, objective=PlanOptions.objective)
        return
    for objective in OBJECTIVE:
        for colocate in COLOCATIONS if options.colocate == "auto" else (options.colocate,):
            yield replace(options, colocate=colocate, objective=objective)
