"""How long steps take, and the machine's noise in that."""

import pytest

from aurora.planner.control.step_times import FEW, MUCH_SLOWER, SLOWER, StepTimes


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
