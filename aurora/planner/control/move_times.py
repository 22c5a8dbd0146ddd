"""How long moves take, by what moves took: a start-up and a rate; and how much of that serving waits for them.

Moves of few experts take long for their bytes, as first slices and agreement take their time. By their rate alone larger moves
would never pay, and so never be measured.
"""

from collections import deque

import numpy as np
from scipy.optimize import nnls

from aurora.types.arrays import FloatArray, IntArray

RECENT = 8  # moves that count
LENGTHENED = 0.1  # of a step's time that moves in the background take at most
BELIEF = 0.01  # in the given rate, or in no start-up, beside one measurement: it decides where moves had about equal bytes


class MoveTimes:
    """How long moves take.

    Args:
        move_Bps: bytes that move in a second after the start-up, unless measurements say otherwise; None: unknown.

    Example:
        >>> times = MoveTimes(move_Bps=1e9)
        >>> times.add(10_000_000, 0.51)
        >>> times.seconds(np.array([10_000_000, 1_000_000_000])).round(2).tolist()
        [0.51, 1.5]
    """

    def __init__(self, move_Bps: float | None) -> None:
        self._given_s = None if move_Bps is None else 1 / move_Bps  # for a byte
        self._start_s, self._byte_s = 0.0, self._given_s or 0.0
        self._measured: deque[tuple[int, float]] = deque(maxlen=RECENT)
        self._waiting: deque[float] = deque(maxlen=RECENT)

    def add(self, moved: int, seconds: float, waited_s: float | None = None) -> None:
        """Adds a measurement: `moved` bytes took so many seconds, both above zero, of which serving waited `waited_s`."""
        self._measured.append((moved, seconds))
        if waited_s is not None:
            self._waiting.append(waited_s / seconds)
        bytes_X, seconds_X = np.array(self._measured, dtype=np.float64).T
        most, longest_s = bytes_X.max(), seconds_X.max()
        believed_2, believed_s = ([1, 0], 0.0) if self._given_s is None else ([0, 1], most * self._given_s)
        rows_X2 = np.vstack([np.stack([np.ones_like(bytes_X), bytes_X / most], axis=1), believed_2])
        weight_X = np.append(1 / seconds_X, BELIEF / longest_s)
        (self._start_s, most_s), _ = nnls(rows_X2 * weight_X[:, None], np.append(seconds_X, believed_s) * weight_X)
        self._byte_s = most_s / most

    def seconds(self, bytes_X: IntArray) -> FloatArray:
        """Returns (X,) the seconds that moves of so many bytes, (X,), take."""
        return np.asarray(np.where(bytes_X > 0, self._start_s + bytes_X * self._byte_s, 0.0))

    @property
    def waiting(self) -> float:
        """What part of the seconds that moves take serving waits for them, where they run beside it."""
        return float(np.median(self._waiting)) if self._waiting else LENGTHENED
