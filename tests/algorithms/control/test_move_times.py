"""The seconds that moves of experts take, by what moves took."""

import numpy as np
import pytest

from aurora.algorithms.control.controller import Controller
from aurora.algorithms.control.move_times import RECENT, MoveTimes
from aurora.types import ControlOptions

RATE, START_S = 1e8, 0.5


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
    assert second.moves > 5 * first.moves
