"""What is learnt from what changes saved."""

import numpy as np
import pytest

from aurora.planner.control.gain_record import HALF_LIFE, GainRecord

OLD_LGP, NEW_LGP = np.array([[[0, 1], [2, 3]]]), np.array([[[0, 2], [1, 3]]])
SKEWED_LE = np.array([[40.0, 40.0, 10.0, 10.0]])  # the slowest GPU has 80 before, 50 after the change
SAVED = (80 - 50) / 50


def record(saved, windows=4.0):
    found = GainRecord(np.ones(2))
    found.expect(np.array([0]), OLD_LGP, NEW_LGP, saved, windows)
    return found


def after(found, *loads):
    for load_LE in loads:
        found.window(load_LE)
    return found.discount


def test_savings_that_come_are_counted_on():
    assert GainRecord(np.ones(2)).discount == 1.0
    assert after(record(SAVED), *[SKEWED_LE] * 4) == pytest.approx(1.0)
    assert after(record(SAVED / 2), *[SKEWED_LE] * 4) == 1.0


def test_a_change_that_saves_less_than_expected_discounts_the_next():
    part = after(record(SAVED * 2), *[SKEWED_LE] * 4)
    assert 0.5 < part < 0.8
    worse_LE = SKEWED_LE[:, [0, 2, 1, 3]]
    nothing = after(record(SAVED), *[np.full((1, 4), 25.0)] * 4)
    assert 0 < after(record(SAVED), *[worse_LE] * 4) == nothing < part


def test_windows_after_those_that_a_change_was_made_for_do_not_count_and_what_is_known_fades():
    found = record(SAVED, windows=1.5)
    assert after(found, SKEWED_LE, SKEWED_LE) == pytest.approx(1.0)
    assert after(found, *[np.full((1, 4), 25.0)] * 4) == pytest.approx(1.0)
    found = record(SAVED)
    first = after(found, *[np.full((1, 4), 25.0)] * 4)
    assert first < after(found, *[SKEWED_LE] * 4 * HALF_LIFE) < 1.0
