"""Feedback to the controller: how long steps and moves took, and what changes of a placement saved.

Steps: a machine has noise of its own: other work on its cores, clocks that change, a network that others use. What is compared
when experts have moved, the median of the newest windows and that of those before, is therefore also compared where nothing has
moved between the two. A change of placement counts as slower only beyond the difference that was seen there.

Moves: moves of few experts take long for their bytes, as first slices and agreement take their time. By their rate alone larger
moves would never pay, and so never be measured.

Gains: an expectation is too high if traffic lasts less long than it seemed, or if it was an uneven sample of what followed.
Then later expectations are discounted by as much. In each window a change saves something between nothing and what was
expected: traffic that has changed for good is no reason not to follow it.
"""

import math
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.optimize import nnls

from aurora.planner.control.load_tracker import gpu_loads
from aurora.types.arrays import FloatArray, IntArray

BEFORE, AFTER = 4, 2  # windows whose medians are compared, at most before a change and at least after it
SLOWER = 0.1  # relative: a step that takes this much longer after a change than noise explains has become slower
MUCH_SLOWER = 0.5  # the same, where fewer than AFTER windows were timed before the change, or noise is not known
COMPARISONS = 16  # without a change, the newest ones, that tell the noise
FEW = 4  # of these, from which on noise is known
RECENT = 8  # moves that count
LENGTHENED = 0.1  # of a step's time that moves in the background take at most
RATE_BELIEF = 0.01  # in the given rate, or in no start-up, beside one measurement: it decides where moves had about equal bytes
HALF_LIFE = 16  # windows in which what is known of earlier changes loses half of its weight
GAIN_BELIEF = 0.5  # of a window's time, in expectations as they are, beside what was saved
MOST_WINDOWS = 16  # of a change that are compared


class StepTimes:
    """The seconds of a step, window by window.

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
        """Adds a window's seconds, above zero."""
        self._step_s.append(step_s)
        self._unchanged_s.append(step_s)
        if len(self._unchanged_s) >= 2 * AFTER:
            before_W, after_W = np.split(np.array(self._unchanged_s), [-AFTER])
            self._apart.append(abs(math.log(np.median(after_W) / np.median(before_W))))

    def restart(self) -> None:
        """Forgets the windows so far: later ones have other traffic or another placement. What is known of noise stays."""
        self._step_s.clear()
        self.interrupt()

    def interrupt(self) -> None:
        """Says that the placement changes, but that later windows are to count with those so far."""
        self._unchanged_s.clear()

    @property
    def windows(self) -> int:
        """Number of windows that the median is of."""
        return len(self._step_s)

    @property
    def median_s(self) -> float:
        """The median of the newest windows; 0 if there are none."""
        return float(np.median(self._step_s)) if self._step_s else 0.0

    @property
    def slower(self) -> float:
        """Relative: a step has become slower if, after a change that is made now, it takes this much longer than by noise."""
        return SLOWER if len(self._step_s) >= AFTER and len(self._apart) >= FEW else MUCH_SLOWER

    @property
    def noise(self) -> float:
        """Relative: what steps took longer or shorter at most, in recent comparisons without a change."""
        return math.expm1(max(self._apart, default=0.0))


class MoveTimes:
    """Predicts the duration of moves of experts: a start-up and a rate; and how much of it serving waits for.

    Args:
        move_Bps: bytes that move in a second after the start-up, unless measurements say otherwise; None: unknown.

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
        """Adds a measurement: `moved` bytes took so many seconds, both above zero, of which serving waited `waited_s`."""
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
        """Returns (X,) the seconds that moves of so many bytes, (X,), take."""
        return np.asarray(np.where(bytes_X > 0, self._start_s + bytes_X * self._s_per_byte, 0.0))

    @property
    def waiting(self) -> float:
        """Part of the seconds of moves that serving waits for, where they run beside it."""
        return float(np.median(self._waiting)) if self._waiting else LENGTHENED


class SlotsInForce(NamedTuple):
    """Slots, and the part of its expert's load that each takes."""

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
    """Compares what changes saved, by the loads of the windows after them, with what they were expected to save.

    Args:
        cost_G: (G,) cost of a unit of load on each GPU.
    """

    def __init__(self, cost_G: FloatArray) -> None:
        self._cost_G = cost_G
        self._changes: list[_Change] = []
        self._expected = self._saved = 0.0  # times a window's time

    def expect(self, layers: IntArray, old: SlotsInForce, new: SlotsInForce, saved: float, windows: float) -> None:
        """Says that a change is in force.

        Args:
            layers: (X,) those that changed.
            old, new: the slots of all layers before and now.
            saved: part of a window's time with equal load that it is expected to save.
            windows: for so many windows.
        """
        old, new = (SlotsInForce(slots.held_LGP[layers], slots.part_LGP[layers]) for slots in (old, new))
        self._changes.append(_Change(layers, old, new, saved, min(max(math.ceil(windows), 1), MOST_WINDOWS)))

    def forget(self) -> None:
        """Says that changes so far were undone: no more windows tell what they save."""
        self._changes = []

    def window(self, load_LE: FloatArray) -> None:
        """Compares the changes whose windows are not over, by the loads (L, E) of a window."""
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
        """Part of an expected saving that is to be counted on, above 0 and up to 1."""
        return (GAIN_BELIEF + self._saved) / (GAIN_BELIEF + self._expected)
