"""Passes a follower's decisions to the engine's thread, which moves the experts; both threads are on rank 0."""

import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, NamedTuple

from aurora.types.arrays import IntArray

if TYPE_CHECKING:
    from aurora.planner.control.controller import Decision


class MovesFailed(Exception):
    """Exception raised when the expert moves of a decision are abandoned.

    Args:
        held_LGP: (L, G, P) the placement that is now in force; None: the placement before the moves.
    """

    def __init__(self, message: str, held_LGP: IntArray | None = None) -> None:
        super().__init__(message)
        self.held_LGP = held_LGP


class MovesGivenUp(MovesFailed):
    """MovesFailed that is a cancellation, such as at the end of serving; not counted in `ControlStatus.failures`."""


class Moved(NamedTuple):
    """Measured durations of the expert moves of one decision; None where the engine measured none."""

    waited_s: float | None = None  # that serving waited for them
    seconds: float | None = None  # in all; None: from the decision until its placement was in force


class MovesHandover:
    """Passes decisions from the follower's thread to the engine's thread, which moves experts between two steps.

    Attributes:
        decision: the decision that the engine must carry out, or is carrying out; None: nothing to do.
        closed: True: no further decisions will come.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._done: Future[Moved] | None = None
        self.decision: Decision | None = None
        self.closed = False

    def perform(self, decision: "Decision") -> Moved:
        """Passes a decision to the engine, waits until its placement is in force, and returns the measured times.

        Called by the follower's thread.

        Raises:
            MovesFailed: if the moves are abandoned; its `held_LGP` is the placement in force.
        """
        done: Future[Moved] = Future()
        with self._lock:
            if self.closed:
                raise MovesGivenUp("serving has ended")
            self.decision, self._done = decision, done
        return done.result()

    def commit(self, moved: Moved = Moved()) -> None:
        """Reports that the decision's placement is in force: `perform` returns `moved`. Called by the engine."""
        if (done := self._taken()) is not None:
            done.set_result(moved)

    def give_up(self, failure: MovesFailed) -> None:
        """Abandons the moves: `perform` raises `failure`, which holds the placement in force. Called by the engine."""
        if (done := self._taken()) is not None:
            done.set_exception(failure)

    def close(self, held_LGP: IntArray) -> None:
        """Abandons unfinished moves and refuses further decisions; held_LGP (L, G, P) is the placement in force."""
        with self._lock:
            self.closed = True
        self.give_up(MovesGivenUp("serving has ended", held_LGP))

    def _taken(self) -> Future[Moved] | None:
        with self._lock:
            done, self.decision, self._done = self._done, None, None
        return done
