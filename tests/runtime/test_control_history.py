"""What a control loop saw and decided, in memory that does not grow."""

from dataclasses import replace

import numpy as np
import pytest

from aurora.planner.control.controller import Controller
from aurora.runtime.control_history import MOST_CHANGES, MOST_WINDOWS, ControlHistory

HELD = np.array([[[0, 1], [2, 3]]])
KEPT = replace(Controller(HELD, 1).window([[1, 1, 1, 1]]), expected_balancedness=0.5)
MOVED = Controller(HELD, 1000).window([[900, 800, 100, 200]])


def test_a_long_run_is_a_series_of_bounded_length():
    """Its entries are means over as many windows each, and none is lost."""
    history = ControlHistory()
    balancedness = np.random.default_rng(0).random(5 * MOST_WINDOWS + 3)
    for at, value in enumerate(balancedness):
        history.add(replace(KEPT, at_s=float(at), balancedness=float(value)), float(at), at // 100)
    assert MOST_WINDOWS // 2 <= len(history.series) <= MOST_WINDOWS
    assert sum(each.windows for each in history.series) == len(balancedness)
    assert len({each.windows for each in history.series[:-1]}) == 1
    many = history.series[0].windows
    for number, each in enumerate(history.series):
        of = balancedness[number * many : (number + 1) * many]
        assert each.balancedness == pytest.approx(of.mean())
        last = number * many + len(of) - 1
        assert (each.at_s, each.age_s, each.traffic, each.expected_balancedness) == (last, last, last // 100, 0.5)


def test_the_newest_changes_are_kept_without_their_tables():
    history = ControlHistory()
    for at in range(MOST_CHANGES + 5):
        history.add(replace(MOVED, at_s=float(at)), 0.0, 0)
    history.in_force(2.0)
    assert [history.changes[0].at_s, history.changes[-1].at_s] == [5.0, MOST_CHANGES + 4.0]
    assert (history.changes[-1].took_s, history.changes[-2].took_s) == (2.0, None)
    assert (history.changes[-1].moves, history.changes[-1].bytes) == (len(MOVED.moves), MOVED.bytes)


def test_a_window_that_tells_nothing_is_no_entry():
    history = ControlHistory()
    history.add(Controller(HELD, 1).window([[0, 0, 0, 0]]), 0.0, 0)
    assert history.series == []
