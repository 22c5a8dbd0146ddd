"""Intervals of time: unions, tracks on which none overlap, and the transfers of one all-to-all."""

from dataclasses import dataclass

import numpy as np

from aurora.types import Schedule
from aurora.types.arrays import FloatArray, IntArray

TOUCHING = 1e-9  # of the whole: what begins so soon after another's end touches it


@dataclass(frozen=True)
class TransferSpans:
    """Transfers of one all-to-all, sorted by start time.

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

    @property
    def busiest_s(self) -> float:
        """Seconds in which the busiest direction of a port (out or in) is busy."""
        ports = np.concatenate([self.src_X * 2, self.dst_X * 2 + 1])
        row_X, first, start_s, end_s = union(ports, np.tile(self.start_s_X, 2), np.tile(self.end_s_X, 2))
        return float(np.bincount(ports[row_X][first], weights=end_s - start_s).max(initial=0.0))


def whole(schedule: Schedule) -> TransferSpans:
    """Returns a schedule's transfers; adjacent pieces of one transfer are merged."""
    ranks = int(max(schedule.src_X.max(initial=0), schedule.dst_X.max(initial=0))) + 1
    pair_X = schedule.src_X * ranks + schedule.dst_X
    row_X, first, start_s, end_s = union(pair_X, schedule.start_s_X, schedule.end_s_X)
    src, dst = np.divmod(pair_X[row_X][first], ranks)
    size = np.add.reduceat(schedule.bytes_X[row_X], first) if len(first) else first
    by_start = np.lexsort((dst, src, start_s))
    bound_s = max(schedule.fluid_bound_s, schedule.cut.bound_s if schedule.cut else 0.0)
    return TransferSpans(src[by_start], dst[by_start], size[by_start], start_s[by_start], end_s[by_start], bound_s)


def union(key_X: IntArray, start_X: FloatArray, end_X: FloatArray) -> tuple[IntArray, IntArray, FloatArray, FloatArray]:
    """Merges overlapping or adjacent intervals of the same key.

    Args:
        key_X: (X,) int64 the key of each interval.
        start_X, end_X: (X,) start and end of each interval.

    Returns:
        (row indices sorted by key and start, (X,) int64; for each merged interval, its first index into them; starts; ends).
    """
    slack = TOUCHING * (end_X.max(initial=0.0) - start_X.min(initial=np.inf)) if len(key_X) else 0.0
    row_X = np.lexsort((start_X, key_X))
    key_X, start_X, end_X = key_X[row_X], start_X[row_X], end_X[row_X]
    known_X, rank_X = np.unique(end_X, return_inverse=True)
    other_X = np.diff(key_X) != 0
    group_X = np.concatenate([[0], other_X.cumsum()])[: len(row_X)] * len(row_X)
    reach_X = known_X[np.maximum.accumulate(rank_X + group_X) - group_X]  # the last end so far, key by key
    first = np.flatnonzero(np.concatenate([[True], other_X | (start_X[1:] > reach_X[:-1] + slack)])[: len(row_X)])
    return row_X, first, start_X[first], reach_X[np.append(first, len(row_X))[1:] - 1]


def interval_colouring(track_X: IntArray, start_X: FloatArray, end_X: FloatArray) -> IntArray:
    """Assigns levels to intervals, such that overlapping intervals on a track have different levels, with the fewest levels.

    It is the greedy colouring of an interval graph.

    Args:
        track_X: (X,) the track of each interval.
        start_X, end_X: (X,) start and end of each interval, sorted by start.

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
