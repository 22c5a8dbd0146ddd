"""Follower: runs a placement controller in a background thread beside serving, and logs its decisions.

An engine queues windows of loads, and continues to serve whatever happens here. Exceptions, a stuck thread and a log that
cannot be written are counted, and logged if possible. The controller's decisions reach the engine through a MovesHandover.
Between two steps the engine pauses, moves some experts, and commits the placement once it is in force.
"""

import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from numpy.typing import ArrayLike

from aurora.algorithms.control.controller import Controller, Decision
from aurora.runtime.between_steps import Moved, MovesFailed, MovesGivenUp
from aurora.types import ControlReport, ControlWindow, PlacementChange

STALE_S = 10.0  # of a heartbeat: the follower is stuck
JOIN_S = 1.0  # that `close` waits for the thread
MOST_CHANGES, MOST_WINDOWS = 1000, 2000  # that a history keeps, the newest ones


class _LoadWindow(NamedTuple):
    """Arguments of `Follower.add`."""

    load_LE: ArrayLike
    step_s: float | None
    tokens: float | None
    period_s: float | None


class Follower:
    """Adapts an engine's expert placement to its traffic: runs a Controller in a daemon thread beside serving.

    Args:
        controller: decides after each window. Only the follower may call it from now on.
        perform: moves the experts of a decision, and returns when the new placement is in force; raises MovesFailed if it
            abandons the moves. Usually `MovesHandover.perform`. Long moves must call `beat` from time to time.
        dry_run: True: log the decisions, move nothing, and continue as if the moves had been made.
        say: receives, in another thread, one line per decision and failure, and one when the follower is stuck; None: lines
            go to the log "aurora.control".
        clock: returns the present time in seconds.
        model: the model's name, for reports.
        began_s: start of the run, by the controller's clock.

    Attributes:
        last: the last decision; None: there was none.
        failures: number of exceptions in planning, moving or logging.
    """

    def __init__(
        self,
        controller: Controller,
        perform: Callable[[Decision], Moved],
        dry_run: bool = False,
        say: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        model: str = "",
        began_s: float = 0.0,
    ) -> None:
        self._controller, self._perform, self._dry_run, self._clock = controller, perform, dry_run, clock
        self._say = say or logging.getLogger("aurora.control").info
        self._model, self._began_s = model, began_s
        self._changed = threading.Condition()
        self._waiting: _LoadWindow | None = None
        self._busy = self._closed = self._stuck = False
        self._seen_s = self._in_force_s = clock()
        self.last: Decision | None = None
        self.failures = self._windows = self._skipped = self._times_stuck = self._bytes = 0
        self._kinds, self._move_s = Counter[str](), 0.0
        self._balancedness: tuple[float | None, float | None] = None, None  # of the last window, and expected of the next one
        self._history = ControlHistory()
        self._thread = threading.Thread(target=self._run, name="aurora control", daemon=True)
        self._thread.start()

    def add(
        self, load_LE: ArrayLike, step_s: float | None = None, tokens: float | None = None, period_s: float | None = None
    ) -> None:
        """Queues a window for the controller, in place of a window that still waits. Never blocks, never raises.

        Args:
            load_LE: (L, E) tokens of each expert in the window; the caller must not change it afterwards.
            step_s, tokens, period_s: as in `Controller.window`.
        """
        with self._changed:
            if self._waiting is None and not self._busy:
                self._seen_s = self._clock()
            self._windows += 1
            self._skipped += self._waiting is not None
            self._waiting = _LoadWindow(load_LE, step_s, tokens, period_s)
            self._changed.notify()
        self.check()

    def check(self) -> None:
        """Logs once if the follower is stuck. Never blocks, never raises. The serving thread calls it from time to time."""
        with self._changed:
            before, self._stuck = self._stuck, self._silent_s() >= STALE_S
            newly_stuck = self._stuck and not before
            self._times_stuck += newly_stuck
        if newly_stuck:
            with suppress(RuntimeError):  # no thread can be started
                threading.Thread(target=self._tell, args=("stuck: serving goes on without decisions",), daemon=True).start()

    def beat(self) -> None:
        """Signals that the follower is alive; long moves call it, so that the follower does not count as stuck."""
        with self._changed:
            self._seen_s = self._clock()

    @property
    def busy(self) -> bool:
        """True while a window waits, a decision is being made, or experts move."""
        with self._changed:
            return self._waiting is not None or self._busy

    @property
    def stuck(self) -> bool:
        """True if the follower's thread has work and has given no sign of life for STALE_S."""
        with self._changed:
            return self._silent_s() >= STALE_S

    def report(self) -> ControlReport:
        """Returns a report of the windows, decisions and moves since the start; a dry run counts moves as if they were made."""
        with self._changed:
            began_s = self._began_s
            changes = tuple(replace(change, at_s=change.at_s - began_s) for change in self._history.changes)
            series = tuple(replace(window, at_s=window.at_s - began_s) for window in self._history.series)
            so_far = self._windows, self._skipped, dict(self._kinds), *self._balancedness, self._clock() - self._in_force_s
            totals = self._bytes, self._move_s, self.failures, self._times_stuck
        return ControlReport(self._model, self._dry_run, *so_far, *totals, changes, series)

    def _silent_s(self) -> float:
        """Seconds since it was last seen alive; 0 if it has nothing to do."""
        idle = self._waiting is None and not self._busy and self._thread.is_alive()
        return 0.0 if idle else self._clock() - self._seen_s

    def close(self) -> None:
        """Ends the thread after its present work. Waits for its end, JOIN_S at most."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(JOIN_S)

    def _run(self) -> None:
        """The thread: follows window after window."""
        while (window := self._next()) is not None:
            try:
                self._follow(window)
            except MovesGivenUp as ended:
                self._tell(f"given up: {ended}")
            except Exception as error:
                with self._changed:
                    self.failures += 1
                self._tell(f"failed: {type(error).__name__}: {error}")

    def _next(self) -> _LoadWindow | None:
        """The window that waits, when there is one; None when the follower is closed."""
        with self._changed:
            self._busy = False
            self._changed.wait_for(lambda: self._closed or self._waiting is not None)
            if self._closed:
                return None
            window, self._waiting = self._waiting, None
            self._busy, self._seen_s = True, self._clock()
            return window

    def _follow(self, window: _LoadWindow) -> None:
        """Decides after a window, and performs the decision."""
        if self._dry_run:
            window = window._replace(step_s=None)
        decision = self._controller.window(*window)
        with self._changed:
            self.last = decision
            self._kinds[decision.kind] += 1
            self._history.add(decision, self._clock() - self._in_force_s, self._controller.tracker.changes)
            if not math.isnan(decision.balancedness):
                self._balancedness = decision.balancedness, decision.expected_balancedness
        self._tell(f"dry run: {decision}" if self._dry_run else str(decision))
        if decision.action != "keep":
            self._move(decision)

    def _move(self, decision: Decision) -> None:
        """Performs the decision, and tells the controller how that ended."""
        began_s, moved = self._clock(), Moved()
        if not self._dry_run:
            try:
                moved = self._perform(decision)
            except Exception as error:
                self._controller.failed(error.held_LGP if isinstance(error, MovesFailed) else None)
                raise
        ended_s = self._clock()
        seconds = ended_s - began_s if moved.seconds is None else moved.seconds
        self._controller.moved(None if self._dry_run else seconds, moved.waited_s)
        with self._changed:
            self._bytes += decision.bytes
            self._move_s += seconds
            self._in_force_s = ended_s
            if not self._dry_run:
                self._history.in_force(ended_s - began_s)
            if self._waiting is not None:  # its steps were those before
                self._waiting = self._waiting._replace(step_s=None)

    def _tell(self, line: str) -> None:
        """Says a line, if that is possible."""
        try:
            self._say(line)
        except Exception:
            with self._changed:
                self.failures += 1


class ControlHistory:
    """Records placement changes and windows in bounded memory. Times are by the controller's clock.

    Attributes:
        changes: the newest MOST_CHANGES placement changes.
        series: the newest MOST_WINDOWS windows that had tokens, oldest first.
    """

    def __init__(self) -> None:
        self.changes: deque[PlacementChange] = deque(maxlen=MOST_CHANGES)
        self.series: deque[ControlWindow] = deque(maxlen=MOST_WINDOWS)

    def add(self, decision: Decision, age_s: float, traffic: int) -> None:
        """Adds a window, with the decision that followed it.

        Args:
            decision: the decision.
            age_s: seconds since the placement that served the window came into force.
            traffic: number of traffic changes detected so far.
        """
        if not math.isnan(decision.balancedness):
            balancedness = decision.balancedness, decision.expected_balancedness
            self.series.append(ControlWindow(decision.at_s, *balancedness, age_s, traffic))
        if decision.action != "keep":
            why = decision.at_s, decision.action, decision.kind, decision.reason
            self.changes.append(PlacementChange(*why, decision.layers, len(decision.moves), decision.bytes, None))

    def in_force(self, took_s: float) -> None:
        """Records that the last change came into force `took_s` seconds after its decision."""
        self.changes[-1] = replace(self.changes[-1], took_s=took_s)
