"""Chooses between candidate plans by simulation, which prices what the planning models leave out."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from aurora.errors import BadInput
from aurora.planner.layers_in_threads import Progress, untold
from aurora.planner.make_plan import make_plan
from aurora.planner.placement.objective import objectives
from aurora.simulator.interpreter import simulate_plan
from aurora.types import TIME_SLICES, Cluster, Plan, PlanOptions, Profile

SIMULATED = "simulated"
EXCLUSIVE_PLACES = ("swap-search", "balanced", "contiguous")  # placements tried for one model
TRANSFERS = 1_000_000  # simulated at most to choose a time slice: a few seconds
COLOCATIONS = ("local-search", "matching", "decoupled")  # colocations tried for several models


def simulated_plan(
    cluster: Cluster,
    profiles: Sequence[Profile],
    options: PlanOptions,
    profile_paths: Sequence[str] = (),
    progress: Progress = untold,
) -> Plan:
    """Makes candidate plans and returns the one that serves the profiles' windows soonest in the simulator.

    For several models the candidates are every objective with every colocation of COLOCATIONS, for one model every placement of
    EXCLUSIVE_PLACES. A strategy that `options` name is kept. Of equal candidates the first is returned. Arguments and errors
    are those of `make_plan`; BadInput also if the options leave nothing to choose.
    """
    candidates = list(_candidates(options, len(profiles)))
    if len(candidates) < 2:
        raise BadInput(f"`objective` {SIMULATED}: expected `place` or `colocate` left to auto, found nothing to choose between")
    plans = [make_plan(cluster, profiles, candidate, profile_paths, progress=progress) for candidate in candidates]
    best = min(plans, key=lambda plan: simulate_plan(plan, profiles).seconds)
    return replace(best, notes=(*best.notes, "chosen by simulation"))


def with_time_slice(plan: Plan, profiles: Sequence[Profile]) -> Plan:
    """Returns a plan of several models with the time slice that serves the profiles sooner in the simulator.

    The simulation covers the profiles' first windows, as many as TRANSFERS allow. If TRANSFERS do not allow one window, the
    plan is returned unchanged.

    Args:
        plan: a plan of several models.
        profiles: one profile per model.
    """
    pairs = max(1, len(plan.cluster) * (len(plan.cluster) - 1))
    windows = TRANSFERS // (2 * pairs * sum(len(model.dispatch_L) for model in plan.models))
    if windows == 0:
        return plan
    first = [profile if profile.windows <= windows else profile.at_windows(range(windows)) for profile in profiles]
    either = [replace(plan, options=replace(plan.options, time_slice=time_slice)) for time_slice in TIME_SLICES]
    return min(either, key=lambda each: simulate_plan(each, first).seconds)


def _candidates(options: PlanOptions, models: int) -> Iterator[PlanOptions]:
    """The options of each candidate plan."""
    if models == 1:
        for place in EXCLUSIVE_PLACES if options.place == "auto" else (options.place,):
            yield replace(options, place=place, objective=PlanOptions.objective)
        return
    for objective in objectives(models):
        for colocate in COLOCATIONS if options.colocate == "auto" else (options.colocate,):
            yield replace(options, colocate=colocate, objective=objective)
