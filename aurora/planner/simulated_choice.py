"""Chooses between candidate plans by simulation, which includes effects that the planner's formulas leave out.

It chooses between placements, flat and hierarchical all-to-alls, time slices and their weights, seconds between preemption
points, and numbers of micro-batches.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import gcd
from operator import itemgetter

import numpy as np

from aurora.algorithms.check.fit import check_traffic
from aurora.algorithms.compile import compile_plan
from aurora.algorithms.placement.gpu_slots import SlotRoom, memory_slots_G
from aurora.algorithms.placement.objective import objectives
from aurora.algorithms.workload.step_traffic import cut_traffic, drawn_steps, set_aside
from aurora.algorithms.workload.synthetic import SYNTHETIC_TOOL
from aurora.errors import BadInput, InfeasiblePlan
from aurora.planner.resolve_options import flat_reason
from aurora.planner.scenarios.scenario import seconds_between
from aurora.simulator.interpreter import simulate, simulate_plan, simulated_span_s
from aurora.types import PRIORITIES, Cluster, Plan, PlanOptions, Profile
from aurora.types.arrays import IntArray, evenly_spaced
from aurora.types.options import AUTO_SLOTS, MICRO_BATCH_COUNTS, MOST_WEIGHT
from aurora.types.program import AUTO_TIME_SLICES

SIMULATED = "simulated"
EXCLUSIVE_PLACES = ("swap-search", "balanced", "contiguous")  # placements tried for one model
FEW_TRANSFERS = 40_000  # of a window, for which all-to-alls are chosen on some of a large model's layers
LEAST_LAYERS = 4  # that they are chosen on
TRANSFERS = 1_000_000  # simulated to choose a time slice, or flat or hierarchical all-to-alls: a few seconds
WEIGHTS_PAY = 1.01  # seconds with weights of 1 each over those with weights by need, above which these are taken
MICRO_BATCHES_PAY = 1.05  # throughput of micro-batches over that of one batch, from which on they are chosen
RUNTIME_LAYER_S = 8e-3  # of a micro-batch in runs, whose host works 2 to 3 ms for it (bench/network/micro_batches.py)
SLOT_PAYS = 0.01  # of the simulated step, that a further slot on every GPU saves at least
ASIDE_WINDOWS = 4  # of the traffic kept aside, which slots are compared on
COLOCATIONS = ("local-search", "matching", "decoupled")  # colocations tried for several models
TIE = 1.02  # what is slower than the fastest by at most this is as fast, such as a number of micro-batches
LAYER_SHARE = 1 / 10  # of an interactive model's layer, between two preemption points
LAYERS = 4  # of an interactive model that are simulated
CLOSE = 0.1  # by how much weights may differ from needs, relative to these
LEAST_WEIGHTS = 4  # the smallest weight is at most this


@dataclass(frozen=True)
class WorthwhileSlots:
    """Chosen number of slots per GPU, and why.

    Attributes:
        per_gpu: the slots; None: experts have no replicas.
        more_gain: part of the simulated step that one more slot would save; None if a GPU's memory does not hold one more.
        notes: the reasons, as remarks for the plan.
    """

    per_gpu: int | None
    more_gain: float | None
    notes: tuple[str, ...]


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
        if self.options.kv_tokens is not None and not fitting.slots:
            raise InfeasiblePlan(f"`kv_tokens`: expected fewer, which leave each GPU room for an expert, found {fitting}")
        return worthwhile_slots(fitting, cluster, self.profiles[0], aside_s, label)

    def fastest(self, cluster: Cluster, options: PlanOptions) -> Plan:
        """Returns the plan by `options` with the all-to-alls that simulate fastest, compared on some layers of large models."""
        ways = all_to_alls(options, cluster, self.profiles, self.domains)
        few, some = few_layers(cluster, self.profiles) if len(ways) > 1 else (cluster, self.profiles)
        plan, way, note = self._fastest(ways, few, some)
        if some is not self.profiles:
            plan = self._shortest(way, cluster, self.profiles)
        return replace(plan, notes=(*plan.notes, note)) if note else plan

    def _fastest(
        self, ways: Mapping[str, PlanOptions], cluster: Cluster, profiles: Sequence[Profile]
    ) -> tuple[Plan, PlanOptions, str]:
        """The plan whose all-to-alls are fastest, its options, and what was chosen and why."""
        plans = {name: self._shortest(way, cluster, profiles) for name, way in ways.items()}
        simulated = self.steps(profiles) if len(ways) > 1 else profiles
        name, note = faster_all_to_all(plans, self.options, simulated, self.domains, self.profiles[0].layers)
        return plans[name], ways[name], note

    def _shortest(self, options: PlanOptions, cluster: Cluster, profiles: Sequence[Profile]) -> Plan:
        """The shortest of all plans of `candidates`."""
        plans = [self.make(cluster, profiles, candidate) for candidate in candidates(options, profiles)]
        if len(plans) == len(profiles) == 1 and self.options.micro_batches < 2:
            return plans[0]
        simulated = self.steps(profiles)
        chosen = with_preemption(soonest(plans, simulated), simulated)
        if self.options.time_slice == "auto" and (chosen.colocated or self.options.micro_batches > 1):
            return with_time_slice(chosen, simulated)
        return chosen


def candidates(options: PlanOptions, profiles: Sequence[Profile]) -> list[PlanOptions]:
    """Returns the options of each candidate plan: the given ones alone, unless their objective is "simulated".

    For several models the candidates are every objective with every colocation of COLOCATIONS, for one model every placement of
    EXCLUSIVE_PLACES. A strategy that `options` name is kept.

    Raises:
        BadInput: if the objective is "simulated" and the options leave nothing to choose.
    """
    if options.objective != SIMULATED:
        return [options]
    if len(profiles) == 1:
        places = EXCLUSIVE_PLACES if options.place == "auto" else (options.place,)
        variants = [replace(options, place=place, objective=PlanOptions.objective) for place in places]
    else:
        colocations = COLOCATIONS if options.colocate == "auto" else (options.colocate,)
        pairs = product(objectives(len(profiles)), colocations)
        variants = [replace(options, colocate=colocate, objective=objective) for objective, colocate in pairs]
    if len(variants) < 2:
        raise BadInput(f"`objective` {SIMULATED}: expected `place` or `colocate` left to auto, found nothing to choose between")
    return variants


def soonest(plans: Sequence[Plan], profiles: Sequence[Profile]) -> Plan:
    """Returns the plan with the shortest simulated time of the profiles' windows; of equal plans the first."""
    if len(plans) == 1:
        return plans[0]
    best = min(plans, key=lambda plan: simulate_plan(plan, profiles).seconds)
    return replace(best, notes=(*best.notes, "chosen by simulation"))


def with_time_slice(plan: Plan, profiles: Sequence[Profile], among: Sequence[str] = AUTO_TIME_SLICES) -> Plan:
    """Returns a plan of several models or micro-batches with the time slices whose simulated time is shortest.

    If the plan has neither weights nor priorities, `weights_by_need` are tried as well, and taken if they save more than
    WEIGHTS_PAY; a note on the plan then gives the simulated times. The simulation covers the profiles' first windows, at most
    TRANSFERS transfers. If TRANSFERS do not allow one window, the plan is returned unchanged.

    Args:
        plan: a plan of several models, or of several micro-batches of one.
        profiles: one profile per model.
        among: the time slices to choose from.
    """
    if not (first := _first_windows(plan.cluster, profiles, max(1, plan.options.micro_batches))):
        return plan
    needs = weights_by_need(plan, first)
    if not needs and len(among) == 1:
        return _by_time_slice(plan, among)[0]
    equal_s, equal = _soonest(plan, first, among)
    if not needs:
        return equal
    weighted = [
        (*_soonest(replace(plan, options=replace(plan.options, weights=weights)), first, among), need)
        for weights, need in needs.items()
    ]
    best_s, best, need = min(weighted, key=itemgetter(0))
    pays = best_s * WEIGHTS_PAY < equal_s
    tried = " and ".join(map(str, best.options.weights))
    said = f"1 each take {equal_s:.4g} s (by {equal.options.time_slice})"
    said += f", {tried} by need of {need} {best_s:.4g} s (by {best.options.time_slice})"
    note = f"`weights`: {tried if pays else '1 each'}; in the simulator {said}"
    chosen = best if pays else equal
    return replace(chosen, notes=(*chosen.notes, note))


def _soonest(plan: Plan, profiles: Sequence[Profile], among: Sequence[str]) -> tuple[float, Plan]:
    """The plan with the time slice that serves the profiles soonest in the simulator, and its seconds."""
    return min(((simulate_plan(sliced, profiles).seconds, sliced) for sliced in _by_time_slice(plan, among)), key=itemgetter(0))


def with_micro_batches(plan: Plan, profiles: Sequence[Profile], parts: int = 0, least_layer_s: float = 0.0) -> Plan:
    """Returns the plan with the best number of micro-batches, and with the faster time slice if its options leave that open.

    Chosen is the smallest number whose simulated time is at most TIE times the shortest; more than one only if throughput is
    MICRO_BATCHES_PAY times as large. A note on the plan gives the simulated time of each number. All are simulated on the same
    windows (large plans: layers of one), half as many as TRANSFERS allow. Plans of several models get no micro-batches.

    Args:
        plan: the plan.
        profiles: one profile per model.
        parts: the number of micro-batches; 0: chosen by simulation.
        least_layer_s: n micro-batches are chosen only if a layer takes n times these seconds or more: shorter parts would wait
            for the host, which is not simulated. `aurora run` passes RUNTIME_LAYER_S.

    Raises:
        BadInput: if a number above one is asked for in a plan of several models.
    """
    uncut = plan.with_micro_batches(1)
    if parts:
        fixed = plan.with_micro_batches(parts)
        return with_time_slice(fixed, profiles) if parts > 1 and fixed.options.time_slice == "auto" else fixed
    if plan.colocated:
        return uncut
    cuts = [plan.with_micro_batches(number) for number in MICRO_BATCH_COUNTS[1:]]
    plans_N = [[uncut], *(_by_time_slice(cut) if cut.options.time_slice == "auto" else [cut] for cut in cuts)]
    timed_N = [
        min(((simulated_seconds(choice, profiles, 2 * MICRO_BATCH_COUNTS[-1]), choice) for choice in plans), key=itemgetter(0))
        for plans in plans_N
    ]
    (some,), _ = _excerpt(plan.cluster, profiles, 2 * MICRO_BATCH_COUNTS[-1])
    layer_s = timed_N[0][0] / (some.windows * some.layers)
    long_N = [(seconds, choice) for seconds, choice in timed_N if layer_s >= choice.options.micro_batches * least_layer_s]
    most_s = min([timed_N[0][0] / MICRO_BATCHES_PAY, *(seconds * TIE for seconds, _ in long_N)])
    chosen = next((choice for seconds, choice in long_N if seconds <= most_s), uncut)
    said = ", ".join(f"{_micro_batches_of(choice)} {seconds * 1e3:.4g} ms" for seconds, choice in timed_N)
    note = f"micro-batches: {_micro_batches_of(chosen)}; in the simulator {said}"
    if len(long_N) < len(timed_N):
        note += f"; a layer takes {layer_s * 1e3:.2g} ms, and {least_layer_s * 1e3:g} ms for each micro-batch were expected"
    return replace(chosen, notes=(*chosen.notes, note))


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


def slots_open(options: PlanOptions, profiles: Sequence[Profile], domains: Sequence[Profile]) -> bool:
    """Returns whether the planner chooses `slots_per_gpu`: if it is "auto", for one model whose placement options are "auto".

    Raises:
        BadInput: if `kv_tokens` is given although the slots are not chosen.
    """
    left_open = options.place == options.assign == "auto" and options.min_replicas is None
    single = len(profiles) == 1 and not domains and options.objective != SIMULATED
    chooses = options.slots_per_gpu == AUTO_SLOTS and left_open and single
    if options.kv_tokens is not None and not chooses:
        raise BadInput("`kv_tokens`: is for a plan of one model that chooses `slots_per_gpu` and placement by itself")
    return chooses


def worthwhile_slots(
    fitting: SlotRoom, cluster: Cluster, profile: Profile, aside_s: Callable[[int | None], float], aside: str
) -> WorthwhileSlots:
    """Chooses slots per GPU: one more as long as there is room and it saves more than SLOT_PAYS of the simulated step.

    Args:
        fitting: number of slots that a GPU's memory has beside the KV cache.
        cluster: the GPUs.
        profile: the model.
        aside_s: function from slots per GPU (None: no replicas) to a plan's simulated seconds on held-out traffic.
        aside: description of the held-out traffic, for the notes.
    """
    first = profile.experts // len(cluster) + 1
    if fitting.slots < first:
        return WorthwhileSlots(None, None, (f"`slots_per_gpu`: every expert is held once, {fitting}",))
    per_gpu, now_s, fewer, more_gain = None, aside_s(None), "", None
    for slots in range(first, min(int(memory_slots_G(cluster, [profile]).min()), profile.experts) + 1):
        then_s = aside_s(slots)
        more_gain = 1 - then_s / now_s if now_s else 0.0
        if slots > fitting.slots or more_gain <= SLOT_PAYS:
            break
        fewer = f"; {'no replicas' if per_gpu is None else 'one fewer'} would take {now_s / then_s - 1:.1%} longer"
        per_gpu, now_s, more_gain = slots, then_s, None
    drawn = ", of drawn traffic" if profile.provenance.get("tool") == SYNTHETIC_TOOL else ""
    chosen = "every expert is held once" if per_gpu is None else f"{per_gpu} per GPU are taken"
    why = f"{chosen}, by steps simulated on {aside}{drawn}{fewer}"
    return WorthwhileSlots(per_gpu, more_gain, (f"`slots_per_gpu`: {fitting}", f"`slots_per_gpu`: {why}"))


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

    If rows of the hierarchical plan are estimated from counts (`seconds_between`), it is chosen only if it is the fastest even
    with the most rows that the counts allow.

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
    over, worst, said = plans["hierarchical"], dict(seconds), {name: f"{seconds[name]:.4g} s" for name in plans}
    between_s, estimated = None, " (estimated)" if any(profile.routing is None for profile in profiles) else ""
    if min(seconds, key=seconds.__getitem__) == "hierarchical":
        hierarchy_M = [model.hierarchy for model in over.models]
        between_s = seconds_between(hierarchy_M, profiles, lambda assumed: simulated_seconds(over, assumed))
    if between_s is not None:
        worst["hierarchical"] = between_s[1]
        estimated = f" (estimated, between {between_s[0]:.4g} and {between_s[1]:.4g} s)"
    said["hierarchical"] += estimated
    best, *others = sorted(worst, key=worst.__getitem__)
    slower = ", ".join(f"{name} {said[name]}" for name in others)
    layers = profiles[0].layers
    where = "in the simulator" + (f" on {layers} of {map_layers} layers" if layers < map_layers else "")
    return best, f"all-to-alls are {best}: {said[best]} {where}, {slower}"


def _choosable(cluster: Cluster) -> bool:
    """Tells if there are several servers, of which one has several GPUs."""
    server_G = cluster.fabric.server_G if cluster.fabric is not None else ()
    return len(set(server_G)) not in (len(server_G), 1)


def simulated_seconds(plan: Plan, profiles: Sequence[Profile], parts: int | None = None) -> float:
    """Returns the simulated seconds of the profiles' first windows, at most TRANSFERS transfers.

    If one window has more transfers, some evenly spaced layers of it are simulated.

    Args:
        plan: the plan.
        profiles: one profile per model.
        parts: largest number of micro-batches of the plans to compare, so that all cover the same windows; None: the plan's.
    """
    parts = max(1, plan.options.micro_batches) if parts is None else parts
    some, layers_M = _excerpt(plan.cluster, profiles, parts)
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


def _by_time_slice(plan: Plan, among: Sequence[str] = AUTO_TIME_SLICES) -> list[Plan]:
    """The plan with each time slice."""
    return [replace(plan, options=replace(plan.options, time_slice=time_slice)) for time_slice in among]


def _micro_batches_of(plan: Plan) -> str:
    """Names the number of a plan's micro-batches, and with several their time slice."""
    parts = plan.options.micro_batches
    return "1" if parts == 1 else f"{parts} (by {plan.options.time_slice})"


def _pairs(cluster: Cluster) -> int:
    """Returns the number of ordered pairs of GPUs, at least one."""
    return max(1, len(cluster) * (len(cluster) - 1))


def with_preemption(plan: Plan, profiles: Sequence[Profile]) -> Plan:
    """Sets `preemption_s` of a plan with interactive models, if its options leave it open; returns the plan.

    The value is LAYER_SHARE of the simulated layer time of the fastest interactive model without other models. A note on the
    plan gives it.

    Args:
        plan: the plan.
        profiles: one profile per model.

    Raises:
        BadInput: if profiles are not those of the plan's models.
    """
    options = plan.options
    if options.preemption_s is not None or PRIORITIES[0] not in options.priorities:
        return plan
    check_traffic(plan, profiles)
    interactive = [model for model, name in enumerate(options.priorities) if name == PRIORITIES[0]]
    layer_s, name = min((_interactive_layer_s(plan, model, profiles[model]), plan.models[model].model) for model in interactive)
    if layer_s == 0:  # without compute curves and network times nothing is known
        return plan
    preemption_s = float(f"{layer_s * LAYER_SHARE:.2g}")
    note = f"`preemption`: {preemption_s:g} s, {LAYER_SHARE:.0%} of a layer of {name}, which takes {layer_s:.3g} s alone"
    return replace(plan, options=replace(options, preemption_s=preemption_s), notes=(*plan.notes, note))


def _interactive_layer_s(plan: Plan, model: int, profile: Profile) -> float:
    """Simulated seconds of one of a model's layers alone, with a window that few are smaller than: one of decoding."""
    some = evenly_spaced(profile.layers, LAYERS)
    tokens_T = profile.tokens_TLSE.sum(axis=(1, 2, 3))
    served_T = np.flatnonzero(tokens_T)
    if plan.models[model].deduplicated or len(served_T) == 0:
        window = profile.first_windows(1)  # with its tokens' routing
    else:
        window = profile.at_windows([served_T[np.argsort(tokens_T[served_T], kind="stable")[len(served_T) // 4]]])
    alone = replace(plan, models=(plan.models[model],), options=replace(plan.options, priorities=(), weights=()))
    return simulate(compile_plan(alone).at_layers([some]), plan.cluster, [window.at_layers(some)]).seconds / len(some)


def weights_by_need(plan: Plan, profiles: Sequence[Profile]) -> Mapping[tuple[int, ...], str]:
    """Returns candidate weights of the models' time slices, each with the need that it is in proportion to.

    "exchanges": weights in proportion to windows x layers; "bytes": to bytes sent. Equal weights are left out. The result is
    empty if the plan has weights or priorities.

    Args:
        plan: a plan.
        profiles: its traffic, one profile per model.
    """
    if not plan.colocated or plan.options.weights or plan.options.priorities:
        return {}
    needs = {
        "exchanges": [profile.windows * profile.layers for profile in profiles],
        "bytes": [int(profile.tokens_TLSE.sum()) * (profile.dispatch_bytes + profile.combine_bytes) for profile in profiles],
    }
    weights: dict[tuple[int, ...], str] = {}
    for name, need_M in needs.items():
        if min(need_M) > 0 and max(weights_M := small_weights(need_M)) > 1:
            weights.setdefault(weights_M, name)
    return weights


def small_weights(need_M: Sequence[float]) -> tuple[int, ...]:
    """Returns small whole numbers in about the proportions of need_M, whose entries are above zero.

    Example:
        >>> small_weights([8, 8.4, 4]), small_weights([3, 2]), small_weights([1, 1.05])
        ((2, 2, 1), (3, 2), (1, 1))
    """
    share_M = np.asarray(need_M, dtype=np.float64) / min(need_M)
    for least in range(1, max(1, min(LEAST_WEIGHTS, int(MOST_WEIGHT / share_M.max()))) + 1):
        weight_M = np.clip(np.rint(least * share_M), 1, MOST_WEIGHT)
        if (abs(weight_M / (least * share_M) - 1) <= CLOSE).all():
            break
    whole_M = weight_M.astype(np.int64).tolist()
    return tuple(weight // gcd(*whole_M) for weight in whole_M)
