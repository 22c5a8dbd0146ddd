"""Compares ways of sharing GPUs between models, or between micro-batches of one, by simulating the same requests in each."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from aurora.algorithms.check.fit import check_profile
from aurora.algorithms.compile import compile_plan
from aurora.algorithms.layers_in_threads import Progress, no_progress
from aurora.algorithms.workload.step_traffic import drawn_windows, micro_batches
from aurora.errors import BadInput, InfeasiblePlan
from aurora.planner.plan import make_plan
from aurora.planner.scenarios.colocated import lacking_memory
from aurora.planner.simulated_choice import TIE, with_time_slice
from aurora.simulator.interpreter import batch_orders, simulate, simulate_plan
from aurora.types import Cluster, Plan, PlanOptions, Profile, Trace
from aurora.types.arrays import FloatArray, IntArray, evenly_spaced
from aurora.types.options import GATHERED, SIMULATED_STEPS
from aurora.types.program import AUTO_TIME_SLICES
from aurora.types.trace import COMPUTE_PHASES, TRACE_PHASES

IN_SEQUENCE, TIME_SLICED, MICRO_BATCHES = "one after the other", "time-sliced", "micro-batches"
BY_EXCHANGE, BY_LAYER, THREE_MODELS = "by exchange", "by layer", "three models"
HALVES = "halves of the GPUs"
SECOND_HALF = "the first model on the second half"  # of mixed GPUs
WAYS = (IN_SEQUENCE, HALVES, TIME_SLICED, MICRO_BATCHES, BY_EXCHANGE, BY_LAYER, THREE_MODELS)  # the simplest first
MODELS = 3  # at most
MICRO = 2  # micro-batches of a step
PLANNED_TOKENS = 256  # of a rank in a step of the traffic that is planned for, at least
TRANSFERS = 40_000  # simulated at most in one way; with more, some layers of each model stand for all
WORTH = 1.05  # a gain that is worth doing something for
SHARING = "simulating ways of sharing"  # as progress names it
ALONE_LAYERS = 8  # at most, for which a model of a colocated plan gets a plan of its own
COMPUTE = tuple(TRACE_PHASES.index(phase) for phase in COMPUTE_PHASES)


class ServedAlone(NamedTuple):
    """Way to serve a single model without sharing its GPUs; the reference for ways of sharing.

    Args:
        plan: a function (cluster, profile) that returns the plan of one model.
        orders: orders of the model's all-to-alls, one of SIMULATED_ORDERS.
        weighted: whether models that share GPUs may have time slices of unequal weights.
    """

    plan: Callable[[Cluster, Profile], Plan]
    orders: str = "plan"
    weighted: bool = True


BY_PLANS = ServedAlone(lambda cluster, profile: make_plan(cluster, [profile]))  # each by a plan of its own


@dataclass(frozen=True)
class WayOutcome:
    """Simulated result of one way of sharing GPUs.

    Attributes:
        way: one of WAYS.
        seconds: seconds until all requests are served.
        gain: seconds of the same requests if models run one after the other / `seconds`.
        tokens_per_s: tokens per second, of all models together.
        tpot_s_M: by model, (p50, p99) of the seconds between the ends of consecutive steps of a request (its time per token).
        utilisation: part of the time in which GPUs compute.
        how: description of options that were chosen within the way; empty if there are none.
    """

    way: str
    seconds: float
    gain: float
    tokens_per_s: float
    tpot_s_M: tuple[tuple[float, float], ...]
    utilisation: float
    how: str = ""


@dataclass(frozen=True)
class WaysCompared:
    """Comparison of ways of using the same GPUs.

    Attributes:
        batch: tokens of each rank in a step of each model.
        outcomes: the result of each possible way, in the sequence of WAYS.
        left_out: the names of ways that are not possible, each with the reason.
    """

    batch: int
    outcomes: tuple[WayOutcome, ...]
    left_out: Mapping[str, str]

    @property
    def gains(self) -> dict[str, float]:
        """The gain of each way, by its name."""
        return {outcome.way: outcome.gain for outcome in self.outcomes}

    @property
    def winner(self) -> WayOutcome:
        """The first way, in the sequence of WAYS (simplest first), whose gain is within TIE of the largest."""
        first = winners(self.gains)[0]
        return next(outcome for outcome in self.outcomes if outcome.way == first)


def winners(gains: Mapping[str, float]) -> list[str]:
    """Returns the names of ways whose gain is within TIE of the largest, in the sequence of WAYS (simplest first).

    Args:
        gains: the gain of each way, by its name; at least one.

    Example:
        >>> winners({"one after the other": 1.0, "by exchange": 1.4, "by layer": 1.42})
        ['by exchange', 'by layer']
    """
    least = max(gains.values()) / TIE
    return [way for way in WAYS if gains.get(way, 0.0) >= least]


@dataclass(frozen=True)
class ServedSteps:
    """Times of served steps of one or several models, and the GPUs' compute time.

    Attributes:
        seconds: seconds from the first start to the last end.
        compute_s: seconds that GPUs compute, summed over the ranks.
        ends_M: for each model and each of its micro-batches, (T,) float64, the time in seconds at which each step ends on the
            last rank.
    """

    seconds: float
    compute_s: float
    ends_M: tuple[tuple[FloatArray, ...], ...]

    @property
    def tpot_s_M(self) -> tuple[tuple[float, float], ...]:
        """By model, the median and the 99th percentile of the seconds between the ends of two consecutive steps."""
        gaps_M = [np.concatenate([np.diff(ends_T) for ends_T in streams]) for streams in self.ends_M]
        return tuple((float(np.median(gaps)), float(np.percentile(gaps, 99))) for gaps in gaps_M)


def served_steps(trace: Trace, plan_model_M: Sequence[int] | None = None) -> ServedSteps:
    """Computes the times of the steps of a trace.

    Args:
        trace: a predicted or measured trace.
        plan_model_M: for each model of the trace, the index of its model in the plan; micro-batches of a model have the same
            index. None: no micro-batches.
    """
    of_M = range(len(trace.names_M)) if plan_model_M is None else plan_model_M
    streams: dict[int, list[FloatArray]] = {model: [] for model in dict.fromkeys(of_M)}
    for number, model in enumerate(of_M):
        streams[model].append(step_times(trace, number)[1])
    computing_X = np.isin(trace.phase_X, COMPUTE)
    compute_s = float((trace.end_s_X - trace.start_s_X)[computing_X].sum())
    return ServedSteps(trace.seconds, compute_s, tuple(map(tuple, streams.values())))


def step_times(trace: Trace, model: int) -> tuple[FloatArray, FloatArray]:
    """Returns the times at which the steps of a model begin and end, in seconds from the trace's first start.

    Args:
        trace: a predicted or measured trace.
        model: the model's number in the trace.

    Returns:
        (begin_T, end_T), (T,) float64 each: the time at which each step begins on its first rank, and ends on its last.
    """
    own_X, began_s = trace.model_X == model, trace.start_s_X.min(initial=np.inf)
    steps_T, step_X = np.unique(trace.step_X[own_X], return_inverse=True)
    begins_T, ends_T = np.full(len(steps_T), np.inf), np.zeros(len(steps_T))
    np.minimum.at(begins_T, step_X, trace.start_s_X[own_X] - began_s)
    np.maximum.at(ends_T, step_X, trace.end_s_X[own_X] - began_s)
    return begins_T, ends_T


def one_after_the_other(parts: Sequence[ServedSteps]) -> ServedSteps:
    """Joins parts as if each began when the previous one ended; returns the steps of all their models."""
    began, ends_M = 0.0, []
    for part in parts:
        ends_M += [tuple(ends_T + began for ends_T in streams) for streams in part.ends_M]
        began += part.seconds
    return ServedSteps(began, sum(part.compute_s for part in parts), tuple(ends_M))


def compare_ways(
    cluster: Cluster,
    profiles: Sequence[Profile],
    batch: int,
    skew: float = 1.0,
    steps: int = SIMULATED_STEPS,
    seed: int = 0,
    ways: Sequence[str] = WAYS,
    progress: Progress = no_progress,
    alone: ServedAlone = BY_PLANS,
) -> WaysCompared:
    """Simulates the same requests in each way of using the GPUs.

    Each of two models runs `steps` steps of `batch` tokens per rank, with the same requests in all ways. If memory holds only
    one model, only ways for one model are simulated. The ways:

    - one after the other: each model has all GPUs until its requests are served, by the faster of two placements: its own, and
      the one made for colocated models. This is the reference: a gain of 1.5 is the same work in two thirds of its time.
    - halves of the GPUs: both models at the same time, each on half of the GPUs; for two copies of one model too.
    - time-sliced: both models in time slices of a whole step, so that one model at a time uses GPU and port.
    - micro-batches: the models one after the other, each step cut in MICRO equal parts that overlap, with the faster time
      slice.
    - by exchange, by layer: both models at the same time, in time slices of that length, with weights by need if that is
      faster.
    - three models: three models at the same time, with the faster time slice. It serves a third model's requests too; its
      reference is all three one after the other.

    All models are in memory in all ways. Placements are planned for other draws of the same traffic.

    Args:
        cluster: the GPUs.
        profiles: one, two or three models, with one source rank per GPU. Missing models are copies of the first, with separate
            requests.
        batch: tokens of each rank in a step.
        skew: exponent on the experts' shares: 1 leaves them as they are in the profiles, 0 makes them equal.
        steps: steps of each model, two or more.
        seed: random seed of the draws.
        ways: names in WAYS to simulate; "one after the other" is always simulated.
        progress: called with (name of the work, ways done, ways in all).
        alone: how models are served if they do not share GPUs.

    Raises:
        BadInput: if a number is out of range, there are no profiles or more than three, or a profile does not fit the cluster.
        InfeasiblePlan: if the GPUs' memory does not hold a model.
    """
    if not 1 <= len(profiles) <= MODELS:
        raise BadInput(f"`profile`: expected from 1 to {MODELS} models to compare, found {len(profiles)}")
    for name, setting, least in (("batch", batch, 1), ("steps", steps, 2), ("skew", skew, 0)):
        if not setting >= least:
            raise BadInput(f"`{name}`: expected {least} or more, found {setting}")
    if unknown := [way for way in ways if way not in WAYS]:
        raise BadInput(f"`way`: expected one of {', '.join(WAYS)}, found {unknown[0]!r}")
    for profile in profiles:
        check_profile(cluster, profile)
    chosen = [way for way in WAYS if way in (IN_SEQUENCE, *ways)]
    progress(SHARING, 0, len(chosen))
    case = _Case(cluster, [*profiles, *[profiles[0]] * (MODELS - len(profiles))], batch, skew, steps, seed, alone)
    outcomes: list[WayOutcome] = []
    left_out: dict[str, str] = {}
    for number, way in enumerate(chosen):
        try:
            outcomes.append(case.outcome(way))
        except InfeasiblePlan as error:
            left_out[way] = str(error)
        except BadInput as error:  # of a fabric that cannot be taken apart
            if way != HALVES:
                raise
            left_out[way] = str(error)
        progress(SHARING, number + 1, len(chosen))
    return WaysCompared(batch, tuple(outcomes), left_out)


class _Case:
    """Requests of MODELS models on a cluster, and what each way makes of them."""

    def __init__(
        self, cluster: Cluster, models: Sequence[Profile], batch: int, skew: float, steps: int, seed: int, alone: ServedAlone
    ) -> None:
        self.alone = alone
        self.cluster, self.models, self.batch, self.skew, self.steps, self.seed = cluster, models, batch, skew, steps, seed
        self.check_memory(1)
        self.base = 2 if self._short(2) is None else 1  # models of a way that does not run several at once
        transfers = 2 * steps * sum(model.layers for model in models) * len(cluster) * max(1, len(cluster) - 1)
        part = min(1.0, TRANSFERS / transfers)
        some_M = [np.linspace(0, model.layers - 1, max(1, int(part * model.layers))).astype(np.int64) for model in models]
        self.all_layers = sum(model.layers for model in models) / sum(map(len, some_M))
        self.routing_M = [
            model if len(some) == model.layers else model.at_layers(some) for model, some in zip(models, some_M, strict=True)
        ]
        tokens_G = np.full(len(cluster), batch)
        self.planned_M = [self._drawn(model, np.maximum(tokens_G, PLANNED_TOKENS), "planned") for model in range(MODELS)]
        self.requests_M = [self._drawn(model, tokens_G) for model in range(MODELS)]
        self._plans: dict[int, Plan] = {}
        self.plan_M = [self._alone(model) for model in range(MODELS)]
        self.alone_M = [self._served(plan, requests) for plan, requests in zip(self.plan_M, self.requests_M, strict=True)]

    def _served(self, plan: Plan, requests: Profile) -> ServedSteps:
        """The steps of a model that shares its GPUs with no other."""
        return served_steps(simulate_plan(plan, [requests], orders=self.alone.orders))

    def _alone(self, model: int) -> Plan:
        """The plan of a model alone: on mixed GPUs its part of a joint plan, if that serves its requests sooner than its own.

        So no way that shares the GPUs gains by a placement that one after the other could have too.
        """
        own_plan, together = self.alone.plan(self.cluster, self.planned_M[model]), max(2, model + 1)
        if self.cluster.equal or self.alone is not BY_PLANS or self._short(together) is not None:
            return own_plan
        joint = self.plan(together)
        part = replace(joint, models=(joint.models[model],), options=own_plan.options)
        return min(own_plan, part, key=lambda plan: simulate_plan(plan, [self.requests_M[model]]).seconds)

    def _drawn(self, model: int, tokens_G: IntArray, *use: str) -> Profile:
        """Steps of a model with these tokens on each rank."""
        rng = np.random.default_rng([self.seed, model, len(use), *tokens_G.tolist()])
        return drawn_windows(self.routing_M[model], np.tile(tokens_G, (self.steps, 1)), rng, skew=self.skew)

    def check_memory(self, models: int) -> None:
        """Raises InfeasiblePlan unless each GPU holds an equal share of the first models' experts, and all other weights."""
        if (short := self._short(models)) is not None:
            raise InfeasiblePlan(short)

    def _short(self, models: int) -> str | None:
        """Returns a sentence on the memory that the first models lack; None if there is enough."""
        return lacking_memory(self.cluster, self.models[:models])

    def outcome(self, way: str) -> WayOutcome:
        """Simulates a way."""
        served, how = _SIMULATED[way](self)
        models = len(served.ends_M)
        work_s = sum(alone.seconds for alone in self.alone_M[:models])
        tokens = models * self.steps * self.batch * len(self.cluster)
        times = self.all_layers
        tpot_s_M = tuple((median_s * times, slow_s * times) for median_s, slow_s in served.tpot_s_M)
        used = served.compute_s / len(self.cluster) / served.seconds
        seconds = served.seconds * times
        return WayOutcome(way, seconds, work_s / served.seconds, tokens / seconds, tpot_s_M, used, how)

    def in_sequence(self) -> tuple[ServedSteps, str]:
        return one_after_the_other(self.alone_M[: self.base]), ""

    def halves(self) -> tuple[ServedSteps, str]:
        gpus, half = len(self.cluster), len(self.cluster) // 2
        if gpus % 2:
            raise InfeasiblePlan(f"cluster {self.cluster.name!r}: expected an even number of GPUs to split, found {gpus}")
        parts = [self.cluster.at_ranks(range(first, first + half)) for first in (0, half)]

        def served(parts: Sequence[Cluster]) -> ServedSteps:
            """Returns both models' steps, each on its part."""
            steps_M = []
            for part, planned, requests in zip(parts, self.planned_M, self.requests_M, strict=False):
                plan = self.alone.plan(part, planned.at_sources(half))
                steps_M.append(self._served(plan, requests.at_sources(half)))
            ends_M = tuple(ends for steps in steps_M for ends in steps.ends_M)
            return ServedSteps(max(s.seconds for s in steps_M), sum(s.compute_s for s in steps_M), ends_M)

        either = {"": served(parts)} | ({} if self.cluster.equal else {SECOND_HALF: served(parts[::-1])})
        how = min(either, key=lambda how: either[how].seconds)
        return either[how], how

    def micro_batches(self) -> tuple[ServedSteps, str]:
        pairs = list(zip(self.plan_M[: self.base], self.requests_M, strict=False))
        served, time_slice = faster(
            lambda time_slice: one_after_the_other([overlapped(*pair, MICRO, time_slice) for pair in pairs])
        )
        return served, f"{len(served.ends_M[0])} by {time_slice}"

    def two_models(self, time_slice: str) -> tuple[ServedSteps, str]:
        served, chosen = self._together(self.plan(2), (time_slice,))
        return served, _weights_of(chosen)

    def three_models(self) -> tuple[ServedSteps, str]:
        served, chosen = self._together(self.plan(MODELS))
        return served, ", ".join(filter(None, (f"by {chosen.options.time_slice}", _weights_of(chosen))))

    def plan(self, models: int) -> Plan:
        """The plan of the first models at once."""
        self.check_memory(models)
        if models not in self._plans:
            self._plans[models] = make_plan(self.cluster, self.planned_M[:models])
        return self._plans[models]

    def _together(self, plan: Plan, among: Sequence[str] = AUTO_TIME_SLICES) -> tuple[ServedSteps, Plan]:
        """The steps of a plan's models at once, with the fastest of some time slices; and the plan with it."""
        requests_M = self.requests_M[: len(plan.models)]
        if not self.alone.weighted:
            plan = replace(plan, options=replace(plan.options, weights=(1,) * len(plan.models)))
        chosen = with_time_slice(plan, requests_M, among)
        return served_steps(simulate_plan(chosen, requests_M)), chosen


def _weights_of(plan: Plan) -> str:
    """The weights of a plan's time slices in words, if they are not all alike."""
    return f"weights {', '.join(map(str, plan.options.weights))}" if plan.options.weights else ""


def faster(serve: Callable[[str], ServedSteps]) -> tuple[ServedSteps, str]:
    """Calls `serve` with each time slice that can be chosen; returns the faster result and its time slice."""
    either = {time_slice: serve(time_slice) for time_slice in AUTO_TIME_SLICES}
    best = min(either, key=lambda time_slice: either[time_slice].seconds)
    return either[best], best


def overlapped(plan: Plan, requests: Profile, parts: int, time_slice: str) -> ServedSteps:
    """Simulates one model's steps, cut into micro-batches that overlap each other.

    Args:
        plan: a plan of one model.
        requests: the model's traffic, one window for each step.
        parts: number of micro-batches; fewer are made if no rank has enough tokens.
        time_slice: length of a micro-batch's time slice of a port, one of TIME_SLICES.
    """
    cut = micro_batches(requests, parts)
    program = compile_plan(replace(plan, options=replace(plan.options, time_slice=time_slice, micro_batches=len(cut))))
    return served_steps(simulate(program, plan.cluster, cut), program.plan_model_M)


_SIMULATED: Mapping[str, Callable[[_Case], tuple[ServedSteps, str]]] = {
    IN_SEQUENCE: _Case.in_sequence,
    HALVES: _Case.halves,
    TIME_SLICED: lambda case: case.two_models("step"),
    MICRO_BATCHES: _Case.micro_batches,
    BY_EXCHANGE: lambda case: case.two_models("exchange"),
    BY_LAYER: lambda case: case.two_models("layer"),
    THREE_MODELS: _Case.three_models,
}


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
