"""Feedback to the controller: how long steps and moves took, and how much time changes of a placement saved.

Steps: to tell whether a change made steps slower, the median of the windows after it is compared with that of the windows
before. A machine has noise: other work on its cores, changing clocks, a shared network. So the same comparison is made between
windows without a change, and a change counts as slower only if the difference exceeds those seen there.

Moves: moves of few experts take long for their bytes, because each round of moves has a fixed cost. So a start-up is estimated
besides the rate; by the rate of small moves alone, larger ones would never pay, and never be measured.

Gains: an expected saving is too high if traffic lasts less long than expected, or was an unusual sample. Later expectations are
discounted by the part that failed to come. In each window, a change is counted as saving at least nothing and at most what was
expected, so that a lasting change of traffic does not keep the controller from following it.
"""

import math
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.optimize import nnls

from aurora.algorithms.control.load_tracker import gpu_loads
from aurora.types.arrays import FloatArray, IntArray
from aurora.types.options import LENGTHENED

BEFORE, AFTER = 4, 2  # windows whose medians are compared, at most before a change and at least after it
SLOWER = 0.1  # relative: a step that takes this much longer after a change than noise explains has become slower
MUCH_SLOWER = 0.5  # the same, where fewer than AFTER windows were timed before the change, or noise is not known
COMPARISONS = 16  # without a change, the newest ones, that tell the noise
FEW = 4  # of these, from which on noise is known
RECENT = 8  # moves that count
RATE_BELIEF = 0.01  # in the given rate, or in no start-up, beside one measurement: it decides where moves had about equal bytes
HALF_LIFE = 16  # windows in which what is known of earlier changes loses half of its weight
GAIN_BELIEF = 0.5  # of a window's time, in expectations as they are, beside what was saved
MOST_WINDOWS = 16  # of a change that are compared


class StepTimes:
    """Records the seconds of a step, window by window; estimates their median and the machine's noise.

    Example:
        >>> times = StepTimes()
        >>> for step_s in (1.0, 1.0, 1.3, 1.3, 1.0, 1.0, 1.0):
        ...     times.add(step_s)
        >>> times.median_s, round(times.noise, 2)
        (1.0, 0.3)
    """

    def __init__(self) -> None:
        self._step_s: deque[float] = deque(maxlen=BEFORE)
        self._unchanged_s: deque[float] = deque(maxlen=BEFORE + AFTER)
        self._apart: deque[float] = deque(maxlen=COMPARISONS)  # logarithms of ratios

    def add(self, step_s: float) -> None:
        """Adds the seconds of a step in one window, above zero."""
        self._step_s.append(step_s)
        self._unchanged_s.append(step_s)
        if len(self._unchanged_s) >= 2 * AFTER:
            before_W, after_W = np.split(np.array(self._unchanged_s), [-AFTER])
            self._apart.append(abs(math.log(np.median(after_W) / np.median(before_W))))

    def restart(self) -> None:
        """Forgets the windows so far, because traffic or placement have changed. The estimate of noise stays."""
        self._step_s.clear()
        self.interrupt()

    def interrupt(self) -> None:
        """Records a change of placement: no noise is estimated across it, but the median still covers windows before it."""
        self._unchanged_s.clear()

    @property
    def windows(self) -> int:
        """Number of windows that `median_s` covers."""
        return len(self._step_s)

    @property
    def median_s(self) -> float:
        """Median seconds of a step over the newest windows; 0 if there are none."""
        return float(np.median(self._step_s)) if self._step_s else 0.0

    @property
    def slower(self) -> float:
        """Margin on top of `noise` by which steps must be longer to count as slower after a change: 0.1 is 10 %.

        It is SLOWER once enough windows were seen, and MUCH_SLOWER before.
        """
        return SLOWER if len(self._step_s) >= AFTER and len(self._apart) >= FEW else MUCH_SLOWER

    @property
    def noise(self) -> float:
        """Largest relative difference between medians of windows without a change between them: 0.1 is 10 %."""
        return math.expm1(max(self._apart, default=0.0))


class MoveTimes:
    """Predicts the duration of moves of experts from a start-up and a rate, and the part of it for which serving waits.

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
        self._waiting: deque[float] = deque(maxlen=RECENT)

    def add(self, moved: int, seconds: float, waited_s: float | None = None) -> None:
        """Adds a measurement.

        Args:
            moved: bytes that moved, above zero.
            seconds: seconds that this took, above zero.
            waited_s: seconds for which serving waited meanwhile; None: not measured.
        """
        self._measured.append((moved, seconds))
        if waited_s is not None:
            self._waiting.append(waited_s / seconds)
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

    @property
    def waiting(self) -> float:
        """Part of the seconds of moves for which serving waits although moves run beside it; from 0 to 1."""
        return float(np.median(self._waiting)) if self._waiting else LENGTHENED


class SlotsInForce(NamedTuple):
    """The expert in each slot, and the part of its load that each slot takes."""

    held_LGP: IntArray  # the expert in each slot
    part_LGP: FloatArray


@dataclass
class _Change:
    """A change whose windows are compared; its arrays are of the X layers that it changed."""

    layers: IntArray
    old: SlotsInForce
    new: SlotsInForce
    saved: float  # of a window's time, expected in each window
    left: int  # windows


class GainRecord:
    """Compares the time that changes of placement saved, by the loads of later windows, with the time expected beforehand.

    Args:
        cost_G: (G,) cost of a unit of load on each GPU.
    """

    def __init__(self, cost_G: FloatArray) -> None:
        self._cost_G = cost_G
        self._changes: list[_Change] = []
        self._expected = self._saved = 0.0  # times a window's time

    def expect(self, layers: IntArray, old: SlotsInForce, new: SlotsInForce, saved: float, windows: float) -> None:
        """Records a change that is now in force, and what it is expected to save.

        Args:
            layers: (X,) indices of the layers that changed.
            old, new: the slots of all layers before and after the change.
            saved: expected saving per window, as a part of the window's time with perfectly balanced load.
            windows: number of windows for which the saving is expected.
        """
        old, new = (SlotsInForce(slots.held_LGP[layers], slots.part_LGP[layers]) for slots in (old, new))
        self._changes.append(_Change(layers, old, new, saved, min(max(math.ceil(windows), 1), MOST_WINDOWS)))

    def forget(self) -> None:
        """Stops comparing the changes recorded so far, because they were undone."""
        self._changes = []

    def window(self, load_LE: FloatArray) -> None:
        """Adds a window with loads load_LE (L, E): computes what each change saves in it, for changes still compared."""
        keeps = 0.5 ** (1 / HALF_LIFE)
        self._expected, self._saved = self._expected * keeps, self._saved * keeps
        equal = load_LE.sum() / (1 / self._cost_G).sum()
        for change in self._changes:
            load_XE = load_LE[change.layers]
            saved = (self._slowest(load_XE, change.old) - self._slowest(load_XE, change.new)) / equal
            self._expected += change.saved
            self._saved += min(max(saved, 0.0), change.saved)
            change.left -= 1
        self._changes = [change for change in self._changes if change.left]

    def _slowest(self, load_XE: FloatArray, slots: SlotsInForce) -> float:
        """Load times cost of the slowest GPUs, summed over layers."""
        return float(gpu_loads(load_XE[None], slots.held_LGP, self._cost_G, slots.part_LGP).max(axis=2).sum())

    @property
    def discount(self) -> float:
        """Factor for expected savings, above 0 and up to 1: the part of earlier expectations that came true."""
        return (GAIN_BELIEF + self._saved) / (GAIN_BELIEF + self._expected)
