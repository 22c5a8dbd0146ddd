"""Chooses between candidate plans by simulation, which includes effects that the planner's formulas leave out.

It chooses the number of slots (by the rule in `slots`), flat or hierarchical all-to-alls, and the time slice. All else is an
option or a formula.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from aurora.algorithms.compile import compile_plan
from aurora.algorithms.gpu_slots import SlotRoom
from aurora.algorithms.workload.step_traffic import cut_traffic, drawn_steps, set_aside
from aurora.planner.options import flat_reason, with_preemption
from aurora.planner.slots import WorthwhileSlots, slots_open, worthwhile_slots
from aurora.simulator.interpreter import simulate_plan, simulated_span_s
from aurora.types import Cluster, Plan, PlanOptions, Profile
from aurora.types.arrays import IntArray, evenly_spaced
from aurora.types.program import AUTO_TIME_SLICES

FEW_TRANSFERS = 40_000  # of a window, for which all-to-alls are chosen on some of a large model's layers
LEAST_LAYERS = 4  # that they are chosen on
TRANSFERS = 1_000_000  # simulated to choose a time slice, or flat or hierarchical all-to-alls: a few seconds
ASIDE_WINDOWS = 4  # of the traffic kept aside, which slots are compared on
TIE = 1.02  # what is slower than the fastest by at most this is as fast


@dataclass(frozen=True)
class SimulatedChoice:
    """Makes a plan for every choice that options leave open ("auto"), and keeps the plan with the shortest simulated time.

    Attributes:
        make: function (cluster, profiles, options) that makes a plan without the simulator, as `make_plan` does.
        options: the user's options.
        profiles: one profile per model.
        domains: further profiles of a single model.
    """

    make: Callable[[Cluster, Sequence[Profile], PlanOptions], Plan]
    options: PlanOptions
    profiles: Sequence[Profile]
    domains: Sequence[Profile] = ()

    def steps(self, profiles: Sequence[Profile]) -> list[Profile]:
        """Returns the profiles as they are simulated: unchanged, or in steps of `tokens_per_step` tokens drawn from windows."""
        return [drawn_steps(profile, self.options.tokens_per_step, self.options.seed) for profile in profiles]

    def choose_slots(self, cluster: Cluster) -> WorthwhileSlots | None:
        """Chooses slots per GPU by simulating some layers; None if options fix the slots. See the function of this name."""
        if not slots_open(self.options, self.profiles, self.domains):
            return None
        few, (profile,) = few_layers(cluster, self.profiles)
        planned, aside, label = set_aside(profile, self.options.seed)
        trial = self.options

        def aside_s(slots_per_gpu: int | None) -> float:
            """Returns the simulated seconds, on traffic kept aside, of the plan with so many slots; all-to-alls as at first."""
            nonlocal trial
            ways = all_to_alls(replace(trial, slots_per_gpu=slots_per_gpu), few, [planned], self.domains)
            plan, trial, _ = self._fastest(ways, few, [planned])
            return simulated_seconds(plan, self.steps([aside.first_windows(ASIDE_WINDOWS)]))

        fitting = SlotRoom.of(cluster, self.profiles[0], self.options)
        return worthwhile_slots(fitting, cluster, self.profiles[0], aside_s, label)

    def fastest(self, cluster: Cluster, options: PlanOptions) -> Plan:
        """Returns the plan by `options` with the all-to-alls that simulate fastest, compared on some layers of large models."""
        ways = all_to_alls(options, cluster, self.profiles, self.domains)
        few, some = few_layers(cluster, self.profiles) if len(ways) > 1 else (cluster, self.profiles)
        plan, way, note = self._fastest(ways, few, some)
        if some is not self.profiles:
            plan = self._made(way, cluster, self.profiles)
        return replace(plan, notes=(*plan.notes, note)) if note else plan

    def _fastest(
        self, ways: Mapping[str, PlanOptions], cluster: Cluster, profiles: Sequence[Profile]
    ) -> tuple[Plan, PlanOptions, str]:
        """The plan whose all-to-alls are fastest, its options, and what was chosen and why."""
        plans = {name: self._made(way, cluster, profiles) for name, way in ways.items()}
        simulated = self.steps(profiles) if len(ways) > 1 else profiles
        name, note = faster_all_to_all(plans, self.options, simulated, self.domains, self.profiles[0].layers)
        return plans[name], ways[name], note

    def _made(self, options: PlanOptions, cluster: Cluster, profiles: Sequence[Profile]) -> Plan:
        """The plan by these options, with its preemption points and the faster time slice."""
        plan = self.make(cluster, profiles, options)
        if not plan.colocated and options.micro_batches == 1:
            return plan
        simulated = self.steps(profiles)
        plan = with_preemption(plan, simulated)
        return with_time_slice(plan, simulated) if options.time_slice == "auto" else plan


def with_time_slice(plan: Plan, profiles: Sequence[Profile]) -> Plan:
    """Returns a plan of several models or micro-batches with the time slice whose simulated time is shortest.

    The simulation covers the profiles' first windows, at most TRANSFERS transfers. If TRANSFERS do not allow one window, the
    plan is returned unchanged.

    Args:
        plan: a plan of several models, or of several micro-batches of one.
        profiles: one profile per model.
    """
    if not (first := _first_windows(plan.cluster, profiles, plan.options.micro_batches)):
        return plan
    sliced = [replace(plan, options=replace(plan.options, time_slice=time_slice)) for time_slice in AUTO_TIME_SLICES]
    return min(sliced, key=lambda choice: simulate_plan(choice, first).seconds)


def all_to_alls(
    options: PlanOptions, cluster: Cluster, profiles: Sequence[Profile], domains: Sequence[Profile] = ()
) -> dict[str, PlanOptions]:
    """Returns a dict from each candidate kind of all-to-all to the options of its plan, for `faster_all_to_all`.

    If `options.all_to_all` is "auto" and servers have several GPUs, the candidates are: flat, with a row for each of a token's
    chosen experts; and hierarchical.
    """
    if options.all_to_all != "auto":
        return {options.all_to_all: options}
    ways = {"flat": options}  # as "auto" is flat without the simulator
    if _choosable(cluster) and flat_reason(cluster, domains) is None:
        ways["hierarchical"] = replace(options, all_to_all="hierarchical")
    return ways


def few_layers(cluster: Cluster, profiles: Sequence[Profile]) -> tuple[Cluster, Sequence[Profile]]:
    """Returns (cluster, profiles) of some evenly spaced layers, to compare all-to-alls on; memory per layer stays the same.

    It takes as many layers as FEW_TRANSFERS transfers of one window allow, but at least LEAST_LAYERS, or as many as TRANSFERS
    allow if these are fewer. If that is every layer, the arguments are returned unchanged.

    Args:
        cluster: the GPUs.
        profiles: one profile per model.
    """
    transfers = 2 * _pairs(cluster) * len(profiles)  # of a layer
    few = max(min(LEAST_LAYERS, max(1, TRANSFERS // transfers)), FEW_TRANSFERS // transfers)
    most = max(profile.layers for profile in profiles)
    if few >= most:
        return cluster, profiles
    others = sum(profile.other_bytes for profile in profiles)
    gpus = [
        replace(gpu, memory_bytes=others + -(-(gpu.memory_bytes - others) * few // most)) if gpu.memory_bytes > others else gpu
        for gpu in cluster.gpus
    ]
    some = [profile.at_layers(evenly_spaced(profile.layers, -(-profile.layers * few // most))) for profile in profiles]
    return replace(cluster, gpus=tuple(gpus)), some


def faster_all_to_all(
    plans: Mapping[str, Plan],
    options: PlanOptions,
    profiles: Sequence[Profile],
    domains: Sequence[Profile] = (),
    map_layers: int = 0,
) -> tuple[str, str]:
    """Returns (name, note): the plan with the shortest `simulated_seconds`, and a sentence on the choice; "" if there was none.

    Args:
        plans: a plan for each name that `all_to_alls` returns.
        options: the options that `all_to_alls` was given.
        profiles: one profile per model.
        domains: further profiles of a single model.
        map_layers: number of layers of the first model; the profiles may have fewer.
    """
    if len(plans) == 1:
        ((name, only),) = plans.items()
        if options.all_to_all == "auto" and _choosable(only.cluster):
            return name, f"all-to-alls are flat; for hierarchical ones: {flat_reason(only.cluster, domains)}"
        return name, ""
    seconds = {name: simulated_seconds(plan, profiles) for name, plan in plans.items()}
    said = {name: f"{seconds[name]:.4g} s" for name in plans}
    if plans["hierarchical"].estimated:
        said["hierarchical"] += " (estimated from counts)"
    best, *others = sorted(seconds, key=seconds.__getitem__)
    slower = ", ".join(f"{name} {said[name]}" for name in others)
    layers = profiles[0].layers
    where = "in the simulator" + (f" on {layers} of {map_layers} layers" if layers < map_layers else "")
    return best, f"all-to-alls are {best}: {said[best]} {where}, {slower}"


def _choosable(cluster: Cluster) -> bool:
    """Tells if there are several servers, of which one has several GPUs."""
    server_G = cluster.servers.server_G if cluster.servers is not None else ()
    return len(set(server_G)) not in (len(server_G), 1)


def simulated_seconds(plan: Plan, profiles: Sequence[Profile]) -> float:
    """Returns the simulated seconds of the profiles' first windows, at most TRANSFERS transfers.

    If one window has more transfers, some evenly spaced layers of it are simulated.

    Args:
        plan: the plan.
        profiles: one profile per model.
    """
    some, layers_M = _excerpt(plan.cluster, profiles, plan.options.micro_batches)
    served, cut = cut_traffic(plan, some)
    program = compile_plan(served)
    return simulated_span_s(program.at_layers([layers_M[model] for model in program.plan_model_M]), plan.cluster, cut)


def _excerpt(cluster: Cluster, profiles: Sequence[Profile], parts: int) -> tuple[list[Profile], list[IntArray]]:
    """Cuts traffic for `simulated_seconds`: each model's first windows, or some layers of one; and which layers these are."""
    if first := _first_windows(cluster, profiles, parts):
        return first, [np.arange(profile.layers) for profile in profiles]
    layers = max(1, TRANSFERS // (2 * _pairs(cluster) * len(profiles) * parts))
    some_M = [evenly_spaced(profile.layers, layers) for profile in profiles]
    return [profile.first_windows(1).at_layers(some) for profile, some in zip(profiles, some_M, strict=True)], some_M


def _first_windows(cluster: Cluster, profiles: Sequence[Profile], parts: int) -> list[Profile]:
    """The profiles' first windows, as many as TRANSFERS allow to simulate in `parts` micro-batches; nothing if not even one."""
    windows = TRANSFERS // (2 * _pairs(cluster) * sum(profile.layers for profile in profiles) * parts)
    return [profile.first_windows(windows) for profile in profiles] if windows else []


def _pairs(cluster: Cluster) -> int:
    """Returns the number of ordered pairs of GPUs, at least one."""
    return max(1, len(cluster) * (len(cluster) - 1))
