"""Predicts from past moves of experts how long moves take.

Moves of few experts take long for their bytes, because each round of moves has a fixed cost. So a start-up is estimated besides
the rate; by the rate of small moves alone, larger ones would never pay, and never be measured.
"""

from collections import deque

import numpy as np
from scipy.optimize import nnls

from aurora.types.arrays import FloatArray, IntArray

RECENT = 8  # moves that count
RATE_BELIEF = 0.01  # in the given rate, or in no start-up, beside one measurement: it decides where moves had about equal bytes


class MoveTimes:
    """Predicts the duration of moves of experts from a start-up and a rate.

    Args:
        move_Bps: first estimate of the bytes per second after the start-up, until moves are measured; None: unknown.

    Example:
        >>> times = MoveTimes(move_Bps=1e9)
        >>> times.add(10_000_000, 0.51)
        >>> times.seconds(np.array([10_000_000, 1_000_000_000])).round(2).tolist()
        [0.51, 1.5]
    """

    def __init__(self, move_Bps: float | None) -> None:
        self._given_s_per_byte = None if move_Bps is None else 1 / move_Bps
        self._start_s, self._s_per_byte = 0.0, self._given_s_per_byte or 0.0
        self._measured: deque[tuple[int, float]] = deque(maxlen=RECENT)

    def add(self, moved: int, seconds: float) -> None:
        """Adds a measurement.

        Args:
            moved: bytes that moved, above zero.
            seconds: seconds that this took, above zero.
        """
        self._measured.append((moved, seconds))
        bytes_X, seconds_X = np.array(self._measured, dtype=np.float64).T
        most, longest_s = bytes_X.max(), seconds_X.max()
        believed_2, believed_s = ([1, 0], 0.0) if self._given_s_per_byte is None else ([0, 1], most * self._given_s_per_byte)
        rows_X2 = np.vstack([np.stack([np.ones_like(bytes_X), bytes_X / most], axis=1), believed_2])
        weight_X = np.append(1 / seconds_X, RATE_BELIEF / longest_s)
        (self._start_s, most_s), _ = nnls(rows_X2 * weight_X[:, None], np.append(seconds_X, believed_s) * weight_X)
        self._s_per_byte = most_s / most

    def seconds(self, bytes_X: IntArray) -> FloatArray:
        """Returns (X,) predicted seconds of moves of bytes_X (X,) bytes."""
        return np.asarray(np.where(bytes_X > 0, self._start_s + bytes_X * self._s_per_byte, 0.0))
