"""Work between steps: pieces grow by what pieces before took, and never ask for more than a tenth of a step."""

from itertools import pairwise

from aurora.planner.control.move_times import LENGTHENED
from aurora.runtime.work_pieces import GROWTH, WorkPieces


def test_pieces_grow_until_a_step_can_wait_for_no_more():
    """At 1000 a second, beside steps of 1 s: a tenth of it is never exceeded, and most of it is used in the end."""
    pieces, found = WorkPieces(4), []
    for _ in range(8):
        found.append(pieces.next(10**6, 1.0))
        pieces.took(found[-1] / 1000)
    assert found[0] == 4
    assert all(after <= GROWTH * before for before, after in pairwise(found))
    assert 0.5 * LENGTHENED < found[-1] / 1000 <= LENGTHENED


def test_slow_work_comes_in_the_least_pieces_and_a_rest_tells_nothing():
    pieces = WorkPieces(1)
    assert pieces.next(5, 1.0) == 1
    pieces.took(10.0)
    assert pieces.next(4, 1.0) == 1
    pieces.took(1e-3)
    assert pieces.next(1, 1.0) == 1  # of two, so what it takes is mostly start-up
    pieces.took(10.0)
    assert pieces.next(100, 1.0) == 2
