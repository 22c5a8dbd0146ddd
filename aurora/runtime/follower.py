"""Follower: runs a placement controller in a background thread beside serving, and logs its decisions.

An engine queues windows of loads, and continues to serve whatever happens here. Exceptions, a stuck thread and a log that
cannot be written are counted, and logged if possible. The controller's decisions reach the engine through a MovesHandover.
Between two steps the engine pauses, moves some experts, and commits the placement once it is in force.
"""

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from numpy.typing import ArrayLike

from aurora.algorithms.control.controller import Controller, Decision
from aurora.runtime.between_steps import Moved, MovesFailed, MovesGivenUp

STALE_S = 10.0  # of a heartbeat: the follower is stuck
JOIN_S = 1.0  # that `close` waits for the thread


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
            abandons the moves. Usually `MovesHandover.perform`.
        dry_run: True: log the decisions, move nothing, and continue as if the moves had been made.
        say: receives, in another thread, one line per decision and failure, and one when the follower is stuck; None: lines
            go to the log "aurora.control".
        clock: returns the present time in seconds.

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
    ) -> None:
        self._controller, self._perform, self._dry_run, self._clock = controller, perform, dry_run, clock
        self._say = say or logging.getLogger("aurora.control").info
        self._changed = threading.Condition()
        self._waiting: _LoadWindow | None = None
        self._busy = self._closed = self._stuck = False
        self._seen_s = clock()
        self.last: Decision | None = None
        self.failures = 0
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
            self._waiting = _LoadWindow(load_LE, step_s, tokens, period_s)
            self._changed.notify()
        self.check()

    def check(self) -> None:
        """Logs once if the follower is stuck. Never blocks, never raises. The serving thread calls it from time to time."""
        with self._changed:
            before, self._stuck = self._stuck, self._silent_s() >= STALE_S
        if self._stuck and not before:
            with suppress(RuntimeError):  # no thread can be started
                threading.Thread(target=self._tell, args=("stuck: serving goes on without decisions",), daemon=True).start()

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
        seconds = self._clock() - began_s if moved.seconds is None else moved.seconds
        self._controller.moved(None if self._dry_run else seconds, moved.waited_s)
        with self._changed:
            if self._waiting is not None:  # its steps were those before
                self._waiting = self._waiting._replace(step_s=None)

    def _tell(self, line: str) -> None:
        """Says a line, if that is possible."""
        try:
            self._say(line)
        except Exception:
            with self._changed:
                self.failures += 1
