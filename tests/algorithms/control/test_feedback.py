"""Feedback: how long steps take and the machine's noise in that, the seconds that moves took, and what changes saved."""

import numpy as np
import pytest

from aurora.algorithms.control.controller import Controller
from aurora.algorithms.control.feedback import (
    FEW,
    HALF_LIFE,
    MUCH_SLOWER,
    RECENT,
    SLOWER,
    GainRecord,
    MoveTimes,
    SlotsInForce,
    StepTimes,
)
from aurora.types import ControlOptions
from aurora.types.options import LENGTHENED

RATE, START_S = 1e8, 0.5
OLD, NEW = (SlotsInForce(np.array([held_GP]), np.ones((1, 2, 2))) for held_GP in ([[0, 1], [2, 3]], [[0, 2], [1, 3]]))
SKEWED_LE = np.array([[40.0, 40.0, 10.0, 10.0]])  # the slowest GPU has 80 before, 50 after the change
SAVED = (80 - 50) / 50


def timed(*step_s):
    times = StepTimes()
    for each in step_s:
        times.add(each)
    return times


def test_noise_is_what_the_newest_windows_differ_by_from_those_before():
    assert timed(1.0, 1.0, 2.0).noise == 0.0  # too few to compare
    assert timed(1.0, 1.0, 2.0, 2.0).noise == pytest.approx(1.0)
    assert timed(2.0, 2.0, 1.0, 1.0).noise == pytest.approx(1.0)
    assert timed(*[1.0, 1.1] * 6).noise < 0.11


def test_a_change_of_placement_is_no_noise():
    for forget, windows in ((StepTimes.restart, 4), (StepTimes.interrupt, 4)):
        times = timed(*[1.0] * 6)
        forget(times)
        for _ in range(6):
            times.add(3.0)
        assert times.noise == 0.0
        assert times.windows == windows
        assert times.median_s == 3.0
    times.restart()
    assert (times.windows, times.median_s) == (0, 0.0)


def test_small_differences_count_where_noise_is_known():
    assert timed().slower == timed(*[1.0] * 4).slower == MUCH_SLOWER
    times = timed(*[1.0] * (3 + FEW))
    assert times.slower == SLOWER
    times.restart()
    assert times.slower == MUCH_SLOWER


def after(*moved, given=1e9, start_s=START_S, rate=RATE):
    """What is known after moves of so many bytes."""
    times = MoveTimes(given)
    for each in moved:
        times.add(each, start_s + each / rate)
    return times


def seconds(times, moved):
    return float(times.seconds(np.array([moved]))[0])


def test_until_moves_are_timed_the_given_rate_tells_and_without_one_moves_take_no_time():
    assert seconds(after(), 10**9) == 1.0
    assert seconds(after(given=None), 10**9) == 0.0


def test_one_small_move_tells_of_a_start_up_and_not_of_the_rate():
    times = after(10**6)
    assert seconds(times, 10**6) == pytest.approx(0.51)
    assert seconds(times, 10**9) == pytest.approx(1.51, abs=0.01)
    assert seconds(after(10**6, given=None), 10**9) == pytest.approx(510)  # nothing else is known


@pytest.mark.parametrize("given", [None, 1e7, 1e9, 1e11])
def test_moves_of_several_sizes_tell_the_start_up_and_the_rate(given):
    times = after(10**6, 10**9, 3 * 10**8, given=given)
    for moved in (10**6, 10**8, 10**9, 10**10):
        assert seconds(times, moved) == pytest.approx(START_S + moved / RATE, rel=0.05)


def test_moves_that_are_faster_than_the_given_rate_are_believed():
    assert seconds(after(10**9, given=1e6, start_s=0.0), 10**9) == pytest.approx(10.0, rel=0.1)


def test_old_moves_are_forgotten_and_nothing_takes_less_than_no_time():
    times = after(*[10**9] * RECENT)
    for each in (10**9, 10**6) * RECENT:
        times.add(each, each / 1e9)
    assert seconds(times, 10**9) == pytest.approx(1.0, rel=0.01)
    for each in (10**6, 10**9) * RECENT:
        times.add(each, 1e8 / each)  # a lie
    assert (times.seconds(np.array([0, 1, 10**12])) >= 0).all()
    assert seconds(times, 0) == 0.0


def test_a_slow_small_move_does_not_forbid_a_large_one():
    """Two experts need three seconds, nearly all of them start-up; then other traffic is worth the moves of many."""
    loads, rng = np.ones((2, 2, 64)), np.random.default_rng(0)
    loads[0, :, :2] = 4.0
    loads[1] = rng.permuted(np.tile((1.0 + np.arange(64)) ** -0.5, (2, 1)), axis=1)
    held_LGP = np.tile(np.arange(64).reshape(1, 8, 8), (2, 1, 1))
    control = Controller(held_LGP, 10**6, ControlOptions(period_s=10.0), move_Bps=1e9)
    first = control.window(1000 * loads[0])
    assert first.action == "move"
    control.moved(3.0)
    second = control.window(1e4 * loads[1])
    assert (second.action, second.kind) == ("move", "gain")
    assert len(second.moves) > 5 * len(first.moves)


def test_serving_waits_for_as_much_of_moves_as_it_did_for_the_last_ones():
    times = MoveTimes(RATE)
    assert times.waiting == LENGTHENED
    times.add(1, 1.0)
    assert times.waiting == LENGTHENED
    for waited_s in (0.2, 0.3, 0.4):
        times.add(1, 1.0, waited_s)
    assert times.waiting == 0.3


def record(saved, windows=4.0):
    found = GainRecord(np.ones(2))
    found.expect(np.array([0]), OLD, NEW, saved, windows)
    return found


def discount_after(found, *loads):
    for load_LE in loads:
        found.window(load_LE)
    return found.discount


def test_savings_that_come_are_counted_on():
    assert GainRecord(np.ones(2)).discount == 1.0
    assert discount_after(record(SAVED), *[SKEWED_LE] * 4) == pytest.approx(1.0)
    assert discount_after(record(SAVED / 2), *[SKEWED_LE] * 4) == 1.0


def test_a_change_that_saves_less_than_expected_discounts_the_next():
    part = discount_after(record(SAVED * 2), *[SKEWED_LE] * 4)
    assert 0.5 < part < 0.8
    worse_LE = SKEWED_LE[:, [0, 2, 1, 3]]
    nothing = discount_after(record(SAVED), *[np.full((1, 4), 25.0)] * 4)
    assert 0 < discount_after(record(SAVED), *[worse_LE] * 4) == nothing < part


def test_windows_after_those_that_a_change_was_made_for_do_not_count_and_what_is_known_fades():
    found = record(SAVED, windows=1.5)
    assert discount_after(found, SKEWED_LE, SKEWED_LE) == pytest.approx(1.0)
    assert discount_after(found, *[np.full((1, 4), 25.0)] * 4) == pytest.approx(1.0)
    found = record(SAVED)
    first = discount_after(found, *[np.full((1, 4), 25.0)] * 4)
    assert first < discount_after(found, *[SKEWED_LE] * 4 * HALF_LIFE) < 1.0
