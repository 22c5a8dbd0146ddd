"""Ways of using the same GPUs for several models or micro-batches, and the steps that each serves."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from aurora.algorithms.compile import compile_plan
from aurora.algorithms.workload.step_traffic import micro_batches
from aurora.planner.choice import TIE
from aurora.reports.trace_times import step_times
from aurora.simulator.interpreter import simulate
from aurora.types import Plan, Profile, Trace
from aurora.types.arrays import FloatArray
from aurora.types.program import AUTO_TIME_SLICES
from aurora.types.trace import COMPUTE_PHASES, TRACE_PHASES

IN_SEQUENCE, TIME_SLICED, MICRO_BATCHES = "one after the other", "time-sliced", "micro-batches"
BY_EXCHANGE, BY_LAYER, THREE_MODELS = "by exchange", "by layer", "three models"
WAYS = (IN_SEQUENCE, TIME_SLICED, MICRO_BATCHES, BY_EXCHANGE, BY_LAYER, THREE_MODELS)  # the simplest first
COMPUTE = tuple(TRACE_PHASES.index(phase) for phase in COMPUTE_PHASES)


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


def one_after_the_other(parts: Sequence[ServedSteps]) -> ServedSteps:
    """Joins parts as if each began when the previous one ended; returns the steps of all their models."""
    began, ends_M = 0.0, []
    for part in parts:
        ends_M += [tuple(ends_T + began for ends_T in streams) for streams in part.ends_M]
        began += part.seconds
    return ServedSteps(began, sum(part.compute_s for part in parts), tuple(ends_M))


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
