"""Handover of a follower's decisions to the engine that moves the experts, between two threads of rank 0."""

import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, NamedTuple

from aurora.types.arrays import IntArray

if TYPE_CHECKING:
    from aurora.planner.control.controller import Decision


class MovesFailed(Exception):
    """Error that the moves of a decision are given up.

    Args:
        held_LGP: (L, G, P) the placement that is in force now; None: the one before the moves.
    """

    def __init__(self, message: str, held_LGP: IntArray | None = None) -> None:
        super().__init__(message)
        self.held_LGP = held_LGP


class MovesGivenUp(MovesFailed):
    """MovesFailed for a reason that counts as no failure, such as the end of serving."""


class Moved(NamedTuple):
    """Seconds of a decision's moves, as far as the engine has measured them."""

    waited_s: float | None = None  # that serving waited for them
    seconds: float | None = None  # in all; None: from the decision until its placement was in force


class MovesHandover:
    """Hands the decisions of a follower's thread to an engine, which moves experts between two steps.

    Attributes:
        decision: the decision whose experts the engine is to move, or is moving; None: no moves are asked for.
        closed: True: no more moves will be asked for.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._done: Future[Moved] | None = None
        self.decision: Decision | None = None
        self.closed = False

    def perform(self, decision: "Decision") -> Moved:
        """Asks the engine for the moves of a decision, and waits until the new placement is in force.

        Called by the follower's thread.

        Raises:
            MovesFailed: if the moves are given up; it has the placement that is in force.
        """
        done: Future[Moved] = Future()
        with self._lock:
            if self.closed:
                raise MovesGivenUp("serving has ended")
            self.decision, self._done = decision, done
        return done.result()

    def commit(self, moved: Moved = Moved()) -> None:
        """Ends the moves: the placement of the decision is in force. Called by the engine."""
        if (done := self._taken()) is not None:
            done.set_result(moved)

    def give_up(self, failure: MovesFailed) -> None:
        """Gives up the moves: `perform` raises `failure`, which has the placement in force. Called by the engine."""
        if (done := self._taken()) is not None:
            done.set_exception(failure)

    def close(self, held_LGP: IntArray) -> None:
        """Gives up moves that are under way, and takes no more decisions; held_LGP (L, G, P) is the placement in force."""
        with self._lock:
            self.closed = True
        self.give_up(MovesGivenUp("serving has ended", held_LGP))

    def _taken(self) -> Future[Moved] | None:
        with self._lock:
            done, self.decision, self._done = self._done, None, None
        return done
