"""Pieces of work between steps grow by what earlier ones took."""

from itertools import pairwise

import pytest

from aurora.runtime.between_steps import GROWTH, WorkPieces
from aurora.types.options import LENGTHENED


def test_pieces_grow_until_a_step_can_wait_for_no_more():
    """At 1000 a second, beside steps of 1 s: a tenth of it is never exceeded, and most of it is used in the end."""
    pieces, found = WorkPieces(4), []
    for _ in range(8):
        found.append(pieces.next(10**6, 1.0))
        pieces.record(found[-1] / 1000)
    assert found[0] == 4
    assert all(after <= GROWTH * before for before, after in pairwise(found))
    assert 0.5 * LENGTHENED < found[-1] / 1000 <= LENGTHENED


def test_slow_work_comes_in_the_least_pieces_and_a_rest_tells_nothing():
    pieces = WorkPieces(1)
    assert pieces.next(5, 1.0) == 1
    pieces.record(10.0)
    assert pieces.next(4, 1.0) == 1
    pieces.record(1e-3)
    assert pieces.next(1, 1.0) == 1  # of two, so what it takes is mostly start-up
    pieces.record(10.0)
    assert pieces.next(100, 1.0) == 2


def test_other_work_leaves_less_for_a_piece_or_nothing():
    """At 1000 a second, beside steps of 1 s: 0.07 s are meant to be used in all."""
    pieces = WorkPieces(4)
    assert pieces.next(10**6, 1.0, other_s=1e-6) == 0  # what was never timed comes alone
    assert not pieces.fits(1.0, 0.0)
    for _ in range(8):
        pieces.record(pieces.next(10**6, 1.0) / 1000)
    assert pieces.seconds(30) == pytest.approx(0.03)
    assert pieces.seconds(1) == pytest.approx(0.004)
    assert pieces.next(10**6, 1.0, other_s=0.05) == pytest.approx(20, abs=1)
    assert pieces.fits(1.0, 0.06)
    assert not pieces.fits(1.0, 0.07)
    assert pieces.next(10**6, 1.0, other_s=0.07) == 0


def test_a_rest_tells_how_long_pieces_take_until_a_whole_one_does():
    pieces = WorkPieces(100)
    assert pieces.next(10, 1.0) == 10
    pieces.record(1.0)
    assert pieces.seconds(10) == pytest.approx(10.0)
    assert pieces.next(1000, 1.0) == 100
    pieces.record(0.1)
    assert pieces.seconds(100) == pytest.approx(0.1)
