"""Makes plans. `plan` chooses what options leave open; `make_plan` makes one plan: scenario, placement, orders, check."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from aurora.algorithms.alltoall.schedule import order_exchanges
from aurora.algorithms.check.fit import check_models, check_placements
from aurora.algorithms.check.plans import check_plan
from aurora.algorithms.layers_in_threads import Progress, map_layers, no_progress
from aurora.algorithms.replicas.survival_probability import plan_survival
from aurora.algorithms.workload.traffic import exchange_bytes, exchange_rows
from aurora.errors import BadInput, shown
from aurora.planner import scenarios
from aurora.planner.choice import SimulatedChoice
from aurora.planner.options import GIVEN, resolve
from aurora.planner.scenarios.scenario import PlacedModels, Scenario
from aurora.types import Cluster, Cut, Hierarchy, ModelPlan, Order, Placement, Plan, PlanOptions, Profile
from aurora.types.arrays import FloatArray


def plan(
    cluster: Cluster,
    profiles: Profile | Sequence[Profile],
    options: PlanOptions | None = None,
    *,
    domains: Sequence[Profile] = (),
    profile_paths: Sequence[str] = (),
    progress: Progress | None = None,
) -> Plan:
    """Decides where experts sit and in which order tokens travel, for one model or several that share the GPUs.

    Args:
        cluster: the machines; rank r is its r-th GPU.
        profiles: one model's profile, or several models' to colocate them. Each must come from as many source ranks as the
            cluster has GPUs.
        options: strategies by name; "auto" follows the scenario.
        domains: further profiles of the one model that the plan must serve as well; `options.aim` says how they count.
        profile_paths: the profiles' files, as the plan should name them.
        progress: called with (what is being done, layers done, layers in all).

    Returns:
        A checked Plan with its objective, a proved lower bound and the gap to it.

    Raises:
        BadInput: if profiles, cluster and options do not fit each other.
        InfeasiblePlan: if the experts or their replicas do not fit into the GPUs' memory.

    Source:
        Aurora (arXiv:2410.17043) §4-§7; replicas: Lazarus (arXiv:2407.04656) §4.

    Example:
        >>> import aurora
        >>> config = "mixtral-topics"
        >>> traffic = aurora.synthetic_profile("zipf:0.8", config, aurora.SyntheticOptions(sources=8))
        >>> plan = aurora.plan(aurora.load("paper-mixed-8"), traffic)
        >>> plan.scenario, plan.bound_s <= plan.objective_s
        ('exclusive, mixed GPUs', True)
    """
    if not isinstance(cluster, Cluster):
        raise BadInput(f"`cluster`: expected a Cluster, as aurora.load reads it, found {shown(cluster)}")
    profiles = [profiles] if isinstance(profiles, Profile) else profiles
    options, progress = options or PlanOptions(), progress or no_progress
    make = partial(make_plan, profile_paths=profile_paths, domains=domains, progress=progress)
    choice = SimulatedChoice(make, options, profiles, domains)  # where options leave one candidate, nothing is simulated
    slots = choice.choose_slots(cluster)  # None: options fix the slots
    chosen = choice.fastest(cluster, options if slots is None else replace(options, slots_per_gpu=slots.per_gpu))
    if slots is not None:
        chosen = replace(chosen, slot_gain=slots.more_gain, notes=(*chosen.notes, *slots.notes))
    return chosen


def make_plan(
    cluster: Cluster,
    profiles: Sequence[Profile],
    options: PlanOptions = PlanOptions(),
    profile_paths: Sequence[str] = (),
    domains: Sequence[Profile] = (),
    progress: Progress = no_progress,
) -> Plan:
    """Makes one plan without the simulator: the scenario alone decides the options that are "auto".

    Requests stay on their ranks; only experts move. The arguments are those of `plan`.
    """
    check_models(cluster, profiles, domains)
    options = resolve(options, cluster, profiles, domains)
    rng = np.random.default_rng(options.seed)
    scenario = scenario_of(cluster, profiles, options, domains)
    return ordered_plan(scenario, scenario.place(rng, progress), profile_paths, rng, progress)


def price(
    cluster: Cluster,
    profiles: Profile | Sequence[Profile],
    placements: Placement | Sequence[Placement],
    options: PlanOptions | None = None,
    *,
    profile_paths: Sequence[str] = (),
) -> Plan:
    """Returns the plan of a placement that you made, with its predicted time, to compare with the result of `plan`.

    Args:
        cluster: the machines; rank r is its r-th GPU.
        profiles: one model's profile, or several models' that share the GPUs.
        placements: which GPU holds which experts, for each model.
        options: the order, also a name given to `register`, and other options that decide no placement.
        profile_paths: the profiles' files, as the plan should name them.

    Returns:
        A checked Plan with its objective and a proved lower bound; it is saved, loaded, simulated and run like any other. Price
        a changed placement anew: a plan's seconds are those of its own placement.

    Raises:
        BadInput: if placements, profiles, cluster and options do not go together.
        BrokenPlan: if a GPU's memory does not hold its experts.

    Example:
        >>> import aurora
        >>> from aurora.io import shipped
        >>> cluster, config = aurora.load("demo-4"), shipped("models/mixtral-topics/config.json")
        >>> traffic = aurora.synthetic_profile("zipf:1", config)
        >>> mine = aurora.Placement((((0, 4), (1, 5), (2, 6), (3, 7)),) * traffic.layers)
        >>> aurora.price(cluster, traffic, mine).objective_s >= aurora.plan(cluster, traffic).bound_s
        True
    """
    profiles = [profiles] if isinstance(profiles, Profile) else profiles
    placements = [placements] if isinstance(placements, Placement) else placements
    options = options or PlanOptions()
    check_placements(cluster, profiles, placements, options)
    options = replace(resolve(replace(options, place="auto"), cluster, profiles), place=GIVEN)  # no strategy made it
    rng = np.random.default_rng(options.seed)
    scenario = scenario_of(cluster, profiles, options).for_placements(placements, rng)
    return ordered_plan(scenario, scenario.priced(placements), profile_paths, rng)


def ordered_plan(
    scenario: Scenario, placed: PlacedModels, paths: Sequence[str], rng: np.random.Generator, progress: Progress = no_progress
) -> Plan:
    """Orders the all-to-alls of placed models, and returns the checked Plan."""
    cluster, profiles, domains, options = scenario.cluster, scenario.profiles, scenario.domains, scenario.options
    per_model = zip(
        profiles, placed.placements_M, paths or [""] * len(profiles), placed.hierarchy_M or (None,) * len(profiles), strict=True
    )
    models = tuple(
        order_model(cluster, (profile, *domains), placement, options.order, rng, path, hierarchy, progress)
        for profile, placement, path, hierarchy in per_model
    )
    plan = Plan(
        cluster=cluster,
        models=models,
        options=options,
        objective_s=placed.objective_s,
        bound_s=placed.bound_s,
        assignment_bound_s=placed.assignment_bound_s,
        survival_LK=None if options.min_replicas is None else plan_survival(cluster, options, placed.placements_M[0]),
        estimated=placed.estimated,
        unseen_s=placed.unseen_s,
        slot_gain=placed.slot_gain,
    )
    check_plan(plan)
    return plan


def scenario_of(
    cluster: Cluster, profiles: Sequence[Profile], options: PlanOptions, domains: Sequence[Profile] = ()
) -> Scenario:
    """Returns the Scenario that resolved options ask for: OverServers for any number of models, else Colocated or Exclusive.

    With `options.tokens_per_step`, windows are rescaled to steps of so many tokens. Domains have the profile's sizes and times.
    """
    domains = [domain.in_format_of(profiles[0]) for domain in domains]
    profiles, domains = ([profile.in_steps(options.tokens_per_step) for profile in some] for some in (profiles, domains))
    if options.all_to_all == "hierarchical":
        return scenarios.OverServers(cluster, profiles, options)
    if len(profiles) > 1:
        return scenarios.Colocated(cluster, profiles, options)
    return scenarios.Exclusive(cluster, profiles, options, domains)


def scenario_of_plan(plan: Plan, profiles: Sequence[Profile]) -> Scenario:
    """Returns the Scenario of an existing plan, to price other placements on given traffic by the plan's own objective."""
    hierarchy_M = tuple(model.hierarchy for model in plan.models)
    hierarchical = any(hierarchy is not None for hierarchy in hierarchy_M)
    options = replace(plan.options, all_to_all="hierarchical" if hierarchical else "flat")
    scenario = scenario_of(plan.cluster, profiles, options)
    return replace(scenario, hierarchy_M=hierarchy_M)


def layer_seconds(plan: Plan, placements: Sequence[Placement], profiles: Sequence[Profile]) -> FloatArray:
    """Returns the seconds of each layer by the plan's objective and aim under given placements.

    Args:
        plan: gives the cluster, the objective, the aim, and the hierarchies of all-to-alls.
        placements: one Placement per model.
        profiles: one profile per model.

    Returns:
        (L,) float64; L is the number of layers, of several models the largest one.
    """
    return scenario_of_plan(plan, profiles).seconds(placements)


def order_model(
    cluster: Cluster,
    profiles: Sequence[Profile],
    placement: Placement,
    order: str,
    rng: np.random.Generator,
    path: str,
    hierarchy: Hierarchy | None = None,
    progress: Progress = no_progress,
) -> ModelPlan:
    """Orders the dispatch and combine of every layer of a placed model, layers in threads.

    Args:
        cluster: the GPUs and their network.
        profiles: profiles of one model, whose traffic is summed; the plan names the first.
        placement: the GPUs of the model's experts.
        order: "auto" or a name of ORDER.
        rng: for orders that draw; each layer draws from a generator that it spawns.
        path: the first profile's file, as the plan should name it.
        hierarchy: the servers and chunks of hierarchical all-to-alls; None: they are flat.
        progress: called with (what is being done, layers done, layers in all).

    Returns:
        The placed model with its orders, their times and bounds.
    """
    profile = profiles[0]
    rngs, deduplicated = rng.spawn(profile.layers), hierarchy is not None

    def schedule_layer(layer: int) -> tuple[Order, Order, tuple[float, float, float], Cut | None]:
        split_EG, rows_SGG = placement.split_EG(layer), np.zeros((), dtype=np.int64)
        for traffic in profiles:
            rows_SGG = rows_SGG + exchange_rows(traffic, layer, split_EG, deduplicated=deduplicated, hierarchy=hierarchy)
        there_SGG, back_SGG = (exchange_bytes(rows_SGG, profile, phase, deduplicated) for phase in ("dispatch", "combine"))
        dispatch, combine, schedule = order_exchanges(there_SGG, back_SGG, hierarchy, cluster.network, order, rng=rngs[layer])
        return dispatch, combine, (schedule.makespan_s, schedule.fluid_bound_s, schedule.one_to_one_bound_s), schedule.cut

    layers = map_layers(schedule_layer, profile.layers, "ordering all-to-alls", progress)
    dispatches, combines, seconds_L3, cut_L = zip(*layers, strict=True)
    makespan_s_L, fluid_bound_s_L, one_to_one_bound_s_L = np.array(seconds_L3).T
    return ModelPlan(
        model=profile.model,
        fingerprint=profile.fingerprint,
        profile_path=path,
        profile_digest=profile.digest,
        top_k=profile.top_k,
        dispatch_bytes=profile.dispatch_bytes,
        expert_bytes=profile.expert_bytes,
        other_bytes=profile.other_bytes,
        placement=placement,
        dispatch_L=dispatches,
        combine_L=combines,
        dispatch_s_L=makespan_s_L,
        fluid_bound_s_L=fluid_bound_s_L,
        one_to_one_bound_s_L=one_to_one_bound_s_L,
        load_LE=np.sum([traffic.load_LE for traffic in profiles], axis=0),
        dense_layers=profile.dense_layers,
        cut_L=tuple(cut for cut in cut_L if cut),
        hierarchy=hierarchy,
        traffic_digest=profile.traffic_digest,
    )
