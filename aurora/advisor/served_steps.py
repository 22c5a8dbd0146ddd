"""When steps of models end, and how long GPUs compute meanwhile: what ways of using GPUs are compared by."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from aurora.types import Trace
from aurora.types.arrays import FloatArray
from aurora.types.trace import COMPUTE_PHASES, TRACE_PHASES

COMPUTE = tuple(TRACE_PHASES.index(phase) for phase in COMPUTE_PHASES)


@dataclass(frozen=True)
class ServedSteps:
    """Steps of one model or of several.

    Attributes:
        seconds: from the first start to the last end.
        compute_s: seconds that GPUs compute, summed over the ranks.
        ends_M: by model, for each of its micro-batches (T,) float64: when its steps end, on the rank that ends last.
    """

    seconds: float
    compute_s: float
    ends_M: tuple[tuple[FloatArray, ...], ...]

    @property
    def tpot_s_M(self) -> tuple[tuple[float, float], ...]:
        """By model the median and the 99th percentile of the seconds between the ends of two of its steps."""
        gaps_M = [np.concatenate([np.diff(ends_T) for ends_T in streams]) for streams in self.ends_M]
        return tuple((float(np.median(gaps)), float(np.percentile(gaps, 99))) for gaps in gaps_M)


def served_steps(trace: Trace, plan_model_M: Sequence[int] | None = None) -> ServedSteps:
    """Returns the steps of a trace.

    Args:
        trace: predicted or measured.
        plan_model_M: which model each of the trace's is a micro-batch of; None: each is a model.
    """
    of_M = range(len(trace.names_M)) if plan_model_M is None else plan_model_M
    streams: dict[int, list[FloatArray]] = {model: [] for model in dict.fromkeys(of_M)}
    for number, model in enumerate(of_M):
        streams[model].append(step_times(trace, number)[1])
    computing_X = np.isin(trace.phase_X, COMPUTE)
    compute_s = float((trace.end_s_X - trace.start_s_X)[computing_X].sum())
    return ServedSteps(trace.seconds, compute_s, tuple(map(tuple, streams.values())))


def step_times(trace: Trace, model: int) -> tuple[FloatArray, FloatArray]:
    """Returns when the steps of one of a trace's models begin and end, in seconds from the trace's first start.

    Args:
        trace: predicted or measured.
        model: its number in the trace.

    Returns:
        (T,) float64, when each step begins, on the rank that begins first, and when it ends, on the one that ends last.
    """
    own_X, began_s = trace.model_X == model, trace.start_s_X.min(initial=np.inf)
    steps_T, step_X = np.unique(trace.step_X[own_X], return_inverse=True)
    begins_T, ends_T = np.full(len(steps_T), np.inf), np.zeros(len(steps_T))
    np.minimum.at(begins_T, step_X, trace.start_s_X[own_X] - began_s)
    np.maximum.at(ends_T, step_X, trace.end_s_X[own_X] - began_s)
    return begins_T, ends_T


def one_after_the_other(parts: Sequence[ServedSteps]) -> ServedSteps:
    """Returns the steps of all models of `parts`, each part beginning when the one before it has ended."""
    began, ends_M = 0.0, []
    for part in parts:
        ends_M += [tuple(ends_T + began for ends_T in streams) for streams in part.ends_M]
        began += part.seconds
    return ServedSteps(began, sum(part.compute_s for part in parts), tuple(ends_M))
