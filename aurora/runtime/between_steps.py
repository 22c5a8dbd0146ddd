"""Work between two steps: a follower's decisions reach the engine's thread, which performs their moves piece by piece.

Both threads are on rank 0. Pieces of background work, such as slices of expert weights, hardly delay a step.
"""

import threading
from concurrent.futures import Future
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from aurora.types.arrays import IntArray
from aurora.types.options import LENGTHENED

if TYPE_CHECKING:
    from aurora.algorithms.control.controller import Decision

MARGIN = 0.7  # of the time that a piece of work may take that it is meant to take
GROWTH = 2  # times the last piece of work that the next one is at most


class MovesFailed(Exception):
    """Exception raised when the expert moves of a decision are abandoned.

    Args:
        held_LGP: (L, G, P) the placement that is now in force; None: the placement before the moves.
    """

    def __init__(self, message: str, held_LGP: IntArray | None = None) -> None:
        super().__init__(message)
        self.held_LGP = held_LGP


class MovesGivenUp(MovesFailed):
    """MovesFailed that is a cancellation, such as at the end of serving; not counted in `Follower.failures`."""


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
        future: Future[Moved] = Future()
        with self._lock:
            if self.closed:
                raise MovesGivenUp("serving has ended")
            self.decision, self._done = decision, future
        return future.result()

    def commit(self, moved: Moved = Moved()) -> None:
        """Reports that the decision's placement is in force: `perform` returns `moved`. Called by the engine."""
        if (future := self._taken()) is not None:
            future.set_result(moved)

    def give_up(self, failure: MovesFailed) -> None:
        """Abandons the moves: `perform` raises `failure`, which holds the placement in force. Called by the engine."""
        if (future := self._taken()) is not None:
            future.set_exception(failure)

    def close(self, held_LGP: IntArray) -> None:
        """Abandons unfinished moves and refuses further decisions; held_LGP (L, G, P) is the placement in force."""
        with self._lock:
            self.closed = True
        self.give_up(MovesGivenUp("serving has ended", held_LGP))

    def _taken(self) -> Future[Moved] | None:
        with self._lock:
            future, self.decision, self._done = self._done, None, None
        return future


class WorkPieces:
    """Chooses how much background work to do between two steps, so that it lengthens a step by no more than LENGTHENED.

    The time of a piece of work is predicted from earlier pieces. Sizes are in any unit of the caller, such as bytes.

    Args:
        least: smallest size of a piece, and size of the first piece.

    Example:
        >>> pieces = WorkPieces(least=1)
        >>> pieces.next(100, step_s=1.0)
        1
        >>> pieces.record(0.01)
        >>> pieces.next(99, step_s=1.0)
        2
    """

    def __init__(self, least: int) -> None:
        self._least, self._size, self._per_s = least, 0, 0.0
        self._piece, self._last = 0, False  # the last one, and whether it was what was left

    def next(self, left: int, step_s: float, other_s: float = 0.0) -> int:
        """Returns the size of the next piece.

        Args:
            left: size of all remaining work.
            step_s: seconds of a step.
            other_s: seconds of other work between the same two steps. If it is not 0 and leaves no room for the smallest piece,
                the result is 0.
        """
        if other_s and not self.fits(step_s, other_s):
            return 0
        size = max(min(int(self._per_s * _time_left(step_s, other_s)), GROWTH * self._size), self._least)
        self._last = left < size
        if not self._last:
            self._size = size
        self._piece = min(size, left)
        return self._piece

    def fits(self, step_s: float, other_s: float) -> bool:
        """Returns True if the smallest piece fits beside the other work; arguments as in `next`."""
        return self.seconds(self._least) <= _time_left(step_s, other_s)

    def seconds(self, size: int) -> float:
        """Returns the predicted seconds of a piece of `size`, at least those of `least`; infinity before the first `record`."""
        return max(size, self._least) / self._per_s if self._per_s else inf

    def record(self, seconds: float) -> None:
        """Records the seconds of the piece that `next` returned last, for predictions.

        A piece that was shortened to the remaining work is ignored, because its time is mostly start-up.
        """
        if not self._last or not self._per_s:
            self._per_s = self._piece / seconds


def _time_left(step_s: float, other_s: float) -> float:
    """Seconds that a piece of work may take beside other work."""
    return max(step_s * LENGTHENED * MARGIN - other_s, 0.0)
