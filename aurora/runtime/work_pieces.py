"""How much work is done between two steps, so that no step is lengthened by more than a tenth."""

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
        self._least, self._size, self._per_s, self._last = least, 0, 0.0, False

    def next(self, left: int, step_s: float) -> int:
        """Returns the size of the next piece of what is left, beside steps of `step_s` seconds."""
        size = max(min(int(self._per_s * step_s * LENGTHENED * MARGIN), GROWTH * self._size), self._least)
        self._last = left < size
        if not self._last:
            self._size = size
        return min(size, left)

    def took(self, seconds: float) -> None:
        """Takes into account what a piece took. What was left for a last one says little: the more of it is start-up."""
        if not self._last:
            self._per_s = self._size / seconds
