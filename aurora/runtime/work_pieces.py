"""How much work is done between two steps, so that no step is lengthened by more than a tenth."""

from math import inf

from aurora.planner.control.move_times import LENGTHENED

MARGIN = 0.7  # of what a piece may take that it is meant to take
GROWTH = 2  # times the last piece of work that the next one is at most


class WorkPieces:
    """Work between steps, in pieces as large as a step may wait for, by what pieces before took.

    Args:
        least: size of the first piece, and of the smallest.

    Example:
        >>> pieces = WorkPieces(least=1)
        >>> pieces.next(100, step_s=1.0)
        1
        >>> pieces.took(0.01)
        >>> pieces.next(99, step_s=1.0)
        2
    """

    def __init__(self, least: int) -> None:
        self._least, self._size, self._per_s = least, 0, 0.0
        self._piece, self._last = 0, False  # the last one, and whether it was what was left

    def next(self, left: int, step_s: float, other_s: float = 0.0) -> int:
        """Returns the size of the next piece of what is left.

        Args:
            left: the size of all that is left.
            step_s: what a step takes.
            other_s: what other work takes between the same two steps. If there is any, a piece may be too much: its size is 0.
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
        """Returns whether the smallest piece fits beside other work; arguments as of `next`."""
        return self.seconds(self._least) <= _time_left(step_s, other_s)

    def seconds(self, size: int) -> float:
        """Returns the seconds that a piece of a size is expected to take, no less than the smallest; at first infinity."""
        return max(size, self._least) / self._per_s if self._per_s else inf

    def took(self, seconds: float) -> None:
        """Takes into account what a piece took. What was left for a last one says little: the more of it is start-up."""
        if not self._last or not self._per_s:
            self._per_s = self._piece / seconds


def _time_left(step_s: float, other_s: float) -> float:
    """Seconds that a piece of work may take beside other work."""
    return max(step_s * LENGTHENED * MARGIN - other_s, 0.0)
