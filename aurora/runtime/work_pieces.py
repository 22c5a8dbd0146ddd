"""Sizes of pieces of background work, such as slices of expert weights, that run between two steps and hardly delay them."""

from math import inf

from aurora.types.options import LENGTHENED

MARGIN = 0.7  # of the time that a piece of work may take that it is meant to take
GROWTH = 2  # times the last piece of work that the next one is at most


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
