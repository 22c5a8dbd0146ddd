"""Spans: intervals in which ports and ranks are busy, for Gantt charts and timelines."""

from dataclasses import dataclass

import numpy as np

from aurora.planner.network.lower_bounds import fluid_bound
from aurora.planner.network.schedule_time import timed
from aurora.types import TRACE_PHASES, Cluster, Order, Schedule, Trace
from aurora.types.arrays import FloatArray, IntArray

TOUCHING = 1e-9  # of the whole: what begins so soon after another's end touches it


@dataclass(frozen=True)
class TransferSpans:
    """The transfers of one all-to-all, in the order of their starts.

    Attributes:
        src_X, dst_X: (X,) int64, sending and receiving ranks.
        bytes_X: (X,) int64, bytes of each transfer.
        start_s_X, end_s_X: (X,) float64, seconds since the start of the first transfer.
        bound_s: lower bound on `seconds` for all orders.
    """

    src_X: IntArray
    dst_X: IntArray
    bytes_X: IntArray
    start_s_X: FloatArray
    end_s_X: FloatArray
    bound_s: float

    @property
    def seconds(self) -> float:
        """Seconds from the start of the first transfer to the end of the last."""
        return float(self.end_s_X.max(initial=0.0))


@dataclass(frozen=True)
class Bars:
    """Phases as bars, by start: one bar per rank, model, step, layer and phase, from its first event to its last.

    Attributes:
        rank_X, model_X, step_X, layer_X, phase_X: (X,) int64, rank, model, step, layer and phase of each bar; phases by their
            index in TRACE_PHASES.
        bytes_X: (X,) int64, bytes that the rank sends in the phase.
        start_s_X, end_s_X: (X,) float64, seconds since the start of the first bar.
    """

    rank_X: IntArray
    model_X: IntArray
    step_X: IntArray
    layer_X: IntArray
    phase_X: IntArray
    bytes_X: IntArray
    start_s_X: FloatArray
    end_s_X: FloatArray

    def first_steps(self, most: int) -> "Bars":
        """Returns as many whole steps from the start as have at most `most` bars in all; at least one step."""
        upto = np.bincount(self.step_X).cumsum()
        kept = self.step_X < max(1, int((upto <= most).sum()))
        return Bars(*(column[kept] for column in vars(self).values()))


def planned(order: Order, bytes_GG: IntArray, cluster: Cluster) -> TransferSpans:
    """Returns the transfers of an order, timed with all ranks beginning at once.

    Args:
        order: the order of the all-to-all.
        bytes_GG: (G, G) int64, bytes from each rank to each.
        cluster: the GPUs and their network.
    """
    return whole(timed(order, bytes_GG, cluster.network))


def whole(schedule: Schedule) -> TransferSpans:
    """Returns a schedule's transfers; pieces of one transfer are merged if the second begins when the first ends."""
    by_pair = np.lexsort((schedule.start_s_X, schedule.dst_X, schedule.src_X))
    src_X, dst_X, bytes_X = (column[by_pair] for column in (schedule.src_X, schedule.dst_X, schedule.bytes_X))
    start_s_X, end_s_X = schedule.start_s_X[by_pair], schedule.end_s_X[by_pair]
    apart = start_s_X[1:] > end_s_X[:-1] + TOUCHING * schedule.makespan_s
    first = np.flatnonzero(np.concatenate([[True], (np.diff(src_X) != 0) | (np.diff(dst_X) != 0) | apart])[: len(src_X)])
    last = np.append(first[1:], len(src_X)) - 1 if len(first) else first
    size_X = np.add.reduceat(bytes_X, first) if len(first) else bytes_X
    by_start = np.lexsort((dst_X[first], src_X[first], start_s_X[first]))
    at = first[by_start]
    bound_s = max(schedule.fluid_bound_s, schedule.cut.bound_s if schedule.cut else 0.0)
    return TransferSpans(src_X[at], dst_X[at], size_X[by_start], start_s_X[at], end_s_X[last][by_start], bound_s)


def traced(trace: Trace, model: int, step: int, layer: int, phase: str, cluster: Cluster) -> TransferSpans:
    """Returns one all-to-all of a trace as its senders saw it, from its first transfer's start.

    Args:
        trace: a predicted or measured trace.
        model, step, layer: index of the model, of the step and of the MoE layer.
        phase: "dispatch" or "combine".
        cluster: the GPUs, whose port rates give the bound.
    """
    rows = trace.sent_X & (trace.model_X == model) & (trace.step_X == step) & (trace.layer_X == layer)
    rows &= trace.phase_X == TRACE_PHASES.index(phase)
    src_X, dst_X, bytes_X = trace.rank_X[rows], trace.peer_X[rows], trace.bytes_X[rows]
    start_s_X, end_s_X = trace.start_s_X[rows], trace.end_s_X[rows]
    began = start_s_X.min(initial=np.inf)
    bytes_GG = np.zeros((len(cluster), len(cluster)), dtype=np.int64)
    np.add.at(bytes_GG, (src_X, dst_X), bytes_X)
    bound_s = fluid_bound(bytes_GG, cluster.network)
    return TransferSpans(src_X, dst_X, bytes_X, start_s_X - began, end_s_X - began, bound_s)


def bars(trace: Trace) -> Bars:
    """Returns a trace as bars; their times begin with the first event."""
    keys = trace.rank_X, trace.model_X, trace.step_X, trace.layer_X, trace.phase_X
    shape = tuple(int(column.max()) + 1 for column in keys)
    found, bar_X = np.unique(np.ravel_multi_index(keys, shape), return_inverse=True)
    start_s, end_s = np.full(len(found), np.inf), np.zeros(len(found))
    np.minimum.at(start_s, bar_X, trace.start_s_X)
    np.maximum.at(end_s, bar_X, trace.end_s_X)
    sent = np.zeros(len(found), dtype=np.int64)
    np.add.at(sent, bar_X, np.where(trace.sent_X, trace.bytes_X, 0))
    by_start = np.lexsort((found, start_s))
    began = trace.start_s_X.min()
    columns = (*np.unravel_index(found, shape), sent, start_s - began, end_s - began)
    return Bars(*(column[by_start] for column in columns))


def phase_seconds(found: Bars, ranks: int) -> dict[str, float]:
    """Returns the seconds of each phase by its name, averaged over ranks; phases of two models may overlap.

    Args:
        found: the bars of a trace.
        ranks: number of ranks.
    """
    total = np.bincount(found.phase_X, weights=found.end_s_X - found.start_s_X, minlength=len(TRACE_PHASES)) / ranks
    return dict(zip(TRACE_PHASES, total.tolist(), strict=True))


def interval_colouring(track_X: IntArray, start_X: FloatArray, end_X: FloatArray) -> IntArray:
    """Stacks the intervals that overlap on a track: greedy colouring of an interval graph, with as few levels as possible.

    Args:
        track_X: (X,) the track of each interval.
        start_X, end_X: (X,) when each interval starts and ends, by rising start.

    Returns:
        (X,) int64, each interval's level from 0: the lowest that is free on its track when the interval starts.
    """
    slack = TOUCHING * end_X.max(initial=0.0)
    by_track = np.argsort(track_X, kind="stable")
    meets = (np.diff(track_X[by_track]) == 0) & (start_X[by_track][1:] < end_X[by_track][:-1] - slack)
    level_X = np.zeros(len(track_X), dtype=np.int64)
    crowded = np.isin(track_X, track_X[by_track][1:][meets])
    ends: dict[int, list[float]] = {}
    for row in np.flatnonzero(crowded).tolist():
        free = ends.setdefault(int(track_X[row]), [])
        level = next((i for i, end in enumerate(free) if end <= start_X[row] + slack), len(free))
        free[level : level + 1] = [float(end_X[row])]
        level_X[row] = level
    return level_X
