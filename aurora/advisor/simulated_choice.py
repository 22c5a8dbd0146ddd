"""Chooses between candidate plans by simulation, which prices what the planning models leave out."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from aurora.errors import BadInput
from aurora.planner.layers_in_threads import Progress, untold
from aurora.planner.make_plan import make_plan
from aurora.planner.placement.objective import objectives
from aurora.planner.resolve_options import flat_reason
from aurora.simulator.interpreter import simulate_plan
from aurora.types import TIME_SLICES, Cluster, Plan, PlanOptions, Profile

SIMULATED = "simulated"
EXCLUSIVE_PLACES = ("swap-search", "balanced", "contiguous")  # placements tried for one model
TRANSFERS = 1_000_000  # simulated at most to choose a time slice, or flat or hierarchical all-to-alls: a few seconds
UNTRIED = "all-to-alls are flat: too many transfers to simulate; `all_to_all` hierarchical makes them hierarchical"
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
    if not (first := _first_windows(plan.cluster, profiles)):
        return plan
    either = [replace(plan, options=replace(plan.options, time_slice=time_slice)) for time_slice in TIME_SLICES]
    return min(either, key=lambda each: simulate_plan(each, first).seconds)


def faster_all_to_all(
    make: Callable[[PlanOptions], Plan],
    cluster: Cluster,
    profiles: Sequence[Profile],
    options: PlanOptions,
    domains: Sequence[Profile] = (),
) -> Plan:
    """Makes a plan with flat and one with hierarchical all-to-alls, and returns that which serves the profiles sooner.

    The simulation covers the profiles' first windows, as in `with_time_slice`. All-to-alls are flat where they cannot be
    hierarchical, or no server has several GPUs, or the simulation would take too long. A note on the plan says which was chosen
    and why, if both are possible.

    Args:
        make: makes a plan by options.
        cluster: the GPUs.
        profiles: one profile per model.
        options: the options, with `all_to_all` "auto".
        domains: further profiles of a single model.
    """
    flat = make(replace(options, all_to_all="flat"))
    server_G = cluster.fabric.server_G if cluster.fabric is not None else ()
    first = _first_windows(cluster, profiles)
    if len(set(server_G)) == len(server_G) or flat_reason(flat.options, cluster, profiles, domains):
        return flat
    if not first:
        return replace(flat, notes=(*flat.notes, UNTRIED))
    plans = flat, make(replace(options, all_to_all="hierarchical"))
    seconds = [simulate_plan(each, first).seconds for each in plans]
    best = int(seconds[1] < seconds[0])
    names = [each.options.all_to_all for each in plans]
    note = f"all-to-alls are {names[best]}: {seconds[best]:.4g} s in the simulator, {names[1 - best]} {seconds[1 - best]:.4g} s"
    return replace(plans[best], notes=(*plans[best].notes, note))


def _first_windows(cluster: Cluster, profiles: Sequence[Profile]) -> list[Profile]:
    """The profiles' first windows, as many as TRANSFERS allow to simulate; nothing if not even one."""
    pairs = max(1, len(cluster) * (len(cluster) - 1))
    windows = TRANSFERS // (2 * pairs * sum(profile.layers for profile in profiles))
    return [profile.first_windows(windows) for profile in profiles] if windows else []


def _candidates(options: PlanOptions, models: int) -> Iterator[PlanOptions]:
    """The options of each candidate plan."""
    if models == 1:
        for place in EXCLUSIVE_PLACES if options.place == "auto" else (options.place,):
            yield replace(options, place=place, objective=PlanOptions.objective)
        return
    for objective in objectives(models):
        for colocate in COLOCATIONS if options.colocate == "auto" else (options.colocate,):
            yield replace(options, colocate=colocate, objective=objective)
