"""How long steps take from window to window, and by how much that varies while neither traffic nor placement changes.

A machine has noise of its own: other work on its cores, clocks that change, a network that others use. What is compared when
experts have moved, the median of the newest windows and that of those before, is therefore also compared where nothing has
moved between the two. A change of placement counts as slower only beyond what was found there.
"""

import math
from collections import deque

import numpy as np

BEFORE, AFTER = 4, 2  # windows whose medians are compared, at most before a change and at least after it
SLOWER = 0.1  # relative: a step that takes this much longer after a change than noise explains has become slower
MUCH_SLOWER = 0.5  # the same, where fewer than AFTER windows were timed before the change, or noise is not known
RECENT = 16  # comparisons without a change that count
FEW = 4  # of these, from which on noise is known


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
        self._apart: deque[float] = deque(maxlen=RECENT)  # logarithms of ratios

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
        """How many windows the median is of."""
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
