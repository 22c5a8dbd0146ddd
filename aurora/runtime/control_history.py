"""History of a control loop: what it saw and decided, in memory that does not grow with the run."""

import math
from collections import deque
from dataclasses import replace

from aurora.planner.control.controller import Decision
from aurora.types import ControlWindow, PlacementChange

MOST_CHANGES = 1000  # that are kept, the newest ones
MOST_WINDOWS = 512  # entries of the series; when it is full, each two neighbours become one


class ControlHistory:
    """Keeps the newest changes, and all windows as a series of bounded length. Times are of the controller's clock.

    Attributes:
        changes: the newest changes.
        series: the windows that had tokens, in sequence.
    """

    def __init__(self) -> None:
        self.changes: deque[PlacementChange] = deque(maxlen=MOST_CHANGES)
        self.series: list[ControlWindow] = []
        self._joined = 1  # windows of an entry

    def add(self, decision: Decision, age_s: float, traffic: int) -> None:
        """Adds a window and its decision.

        Args:
            decision: the decision.
            age_s: seconds since the placement came into force that the window was served with.
            traffic: how many times traffic has changed.
        """
        if not math.isnan(decision.balancedness):
            balancedness = decision.balancedness, decision.expected_balancedness
            self._add(ControlWindow(decision.at_s, 1, *balancedness, age_s, traffic))
        if decision.action != "keep":
            why = decision.at_s, decision.action, decision.kind, decision.reason
            self.changes.append(PlacementChange(*why, decision.layers, len(decision.moves), decision.bytes, None))

    def in_force(self, took_s: float) -> None:
        """Says that the last change is in force, so many seconds after it was decided."""
        self.changes[-1] = replace(self.changes[-1], took_s=took_s)

    def _add(self, window: ControlWindow) -> None:
        """Adds a window to the series, or to its last entry as long as that stands for fewer windows than the others."""
        if self.series and self.series[-1].windows < self._joined:
            self.series[-1] = _as_one(self.series[-1], window)
        else:
            self.series.append(window)
        if len(self.series) > MOST_WINDOWS:
            pairs = zip(self.series[:MOST_WINDOWS:2], self.series[1:MOST_WINDOWS:2], strict=True)
            self.series = [_as_one(*pair) for pair in pairs] + self.series[MOST_WINDOWS:]
            self._joined *= 2


def _as_one(one: ControlWindow, other: ControlWindow) -> ControlWindow:
    """Two entries as one."""
    windows = one.windows + other.windows
    names = "balancedness", "expected_balancedness"
    means = [(getattr(one, name) * one.windows + getattr(other, name) * other.windows) / windows for name in names]
    return replace(other, windows=windows, balancedness=means[0], expected_balancedness=means[1])
