"""The follower: real threads, a clock that the test sets; its history, in memory that does not grow."""

import threading
import time
from dataclasses import replace
from queue import SimpleQueue

import numpy as np
import pytest

from aurora.algorithms.control.controller import Controller
from aurora.runtime.follower import (
    MOST_CHANGES,
    MOST_WINDOWS,
    ControlHistory,
    Follower,
    Moved,
    MovesFailed,
    MovesGivenUp,
)

SKEWED = np.array([[900.0, 800.0, 100.0, 200.0]])
HELD = np.array([[[0, 1], [2, 3]]])
KEPT = replace(Controller(HELD, 1).window([[1, 1, 1, 1]]), expected_balancedness=0.5)
MOVED = Controller(HELD, 1000).window([[900, 800, 100, 200]])
WAIT_S = 20.0  # for a thread on a busy machine


class Serving:
    """A follower, what it said, and moves that end when they are allowed to."""

    def __init__(self, perform=lambda decision: None, **options):
        self.now_s, self.lines, self.controller = 0.0, SimpleQueue(), Controller(HELD, 1000, clock=lambda: self.now_s)
        self.performed, self.waited_s = [], None

        def recorded(decision):
            self.performed.append(decision)
            perform(decision)
            return Moved(self.waited_s)

        self.follower = Follower(self.controller, recorded, **{"say": self.lines.put, "clock": lambda: self.now_s, **options})

    def window(self, load_LE=SKEWED):
        """Hands over a window; returns the line about its decision."""
        self.follower.add(load_LE)
        return self.lines.get(timeout=WAIT_S)

    def settle(self):
        """Waits until the last decision is performed."""
        until_s = time.monotonic() + WAIT_S
        while self.follower._busy and time.monotonic() < until_s:
            time.sleep(1e-3)

    def ended(self):
        """The report after everything that was handed over."""
        self.follower.close()
        self.follower._thread.join(WAIT_S)
        return self.follower.report()


@pytest.fixture
def serving(request):
    made = []

    def serve(*args, **options):
        made.append(Serving(*args, **options))
        return made[-1]

    yield serve
    for each in made:
        each.follower.close()


def test_a_move_is_performed_and_told(serving):
    serve = serving(lambda decision: None)
    assert serve.window().startswith("move (gain): the placement loses ")
    assert serve.window().startswith("keep (balanced): ")
    report = serve.ended()
    assert (report.decisions, report.windows, report.failures) == ({"gain": 1, "balanced": 1}, 2, 0)
    assert report.bytes == serve.performed[0].bytes > 0
    np.testing.assert_array_equal(serve.controller.held_LGP, serve.performed[0].held_LGP)
    assert 0 < report.balancedness <= 1
    assert serve.follower.last.kind == "balanced"


def test_the_controller_learns_how_long_moves_took_and_how_long_serving_waited(serving):
    serve = serving(lambda _: setattr(serve, "now_s", 2.0))
    serve.waited_s = 0.5
    serve.window()
    serve.ended()
    assert serve.controller._move_times.waiting == 0.25


def test_moves_that_are_stuck_make_the_heartbeat_stale_and_serving_goes_on(serving):
    begun, on = threading.Event(), threading.Event()

    def stuck(_):
        begun.set()
        assert on.wait(WAIT_S)

    serve = serving(stuck)
    assert not serve.follower.stuck
    serve.window()
    assert begun.wait(WAIT_S)
    serve.now_s = 4.0
    serve.follower.beat()
    assert not serve.follower.stuck
    serve.now_s = 15.0
    for load_LE in (np.nan * SKEWED, np.zeros((1, 4)), SKEWED):
        serve.follower.add(load_LE)
    assert serve.follower.stuck
    report = serve.follower.report()
    assert (report.windows, report.skipped) == (4, 2)
    assert serve.lines.get(timeout=WAIT_S) == "stuck: serving goes on without decisions"
    serve.follower.check()
    assert serve.follower.report().stuck == 1
    on.set()
    assert serve.lines.get(timeout=WAIT_S).startswith("keep (balanced)")  # the newest window; those before it are gone
    report = serve.ended()
    assert (report.move_s, sum(report.decisions.values())) == (15.0, 2)


def test_a_stuck_follower_is_told_before_the_next_window(serving):
    begun, on = threading.Event(), threading.Event()
    serve = serving(lambda _: begun.set() or on.wait(WAIT_S))
    serve.window()
    assert begun.wait(WAIT_S)
    for serve.now_s in (9.0, 10.0, 11.0):
        serve.follower.check()
    assert serve.lines.get(timeout=WAIT_S) == "stuck: serving goes on without decisions"
    on.set()
    assert serve.ended().stuck == 1


def test_what_was_seen_and_decided_is_reported(serving):
    serve = serving(lambda _: setattr(serve, "now_s", serve.now_s + 0.5), model="m", began_s=90.0)
    serve.now_s = 100.0
    serve.window(SKEWED)
    serve.settle()
    serve.now_s += 10.0
    serve.window(SKEWED * 0)
    serve.settle()
    other = np.full((1, 4), 1000.0)
    other[0, serve.performed[0].held_LGP[0, 0]] = 50_000.0
    serve.controller.tracker.changes = 1
    serve.window(other)
    serve.ended()
    report = serve.follower.report()
    assert (report.model, report.dry_run, report.windows, report.failures, report.stuck) == ("m", False, 3, 0, 0)
    assert report.decisions == {"gain": 2, "no-tokens": 1}
    first, last = report.changes
    assert (first.at_s, first.action, first.took_s, first.bytes) == (10.0, "move", 0.5, serve.performed[0].bytes)
    assert [each.at_s for each in report.series] == [10.0, last.at_s]
    assert [each.traffic for each in report.series] == [0, 1]
    assert report.series[0].balancedness < report.series[0].expected_balancedness
    assert report.series[1].age_s == last.at_s + 90.0 - 100.5
    assert (report.bytes, report.move_s) == (first.bytes + last.bytes, 1.0)


def test_an_exception_in_planning_is_told_and_the_next_window_is_followed(serving):
    serve = serving()
    add = serve.controller.tracker.add

    def broken(loads):
        serve.controller.tracker.add = add
        raise MemoryError("no memory")

    serve.controller.tracker.add = broken
    assert serve.window() == "failed: MemoryError: no memory"
    assert serve.window().startswith("move (gain)")
    assert serve.ended().failures == 1


@pytest.mark.parametrize(
    ("load_LE", "kind"), [(SKEWED * np.nan, "bad-loads"), ([["many"]], "bad-loads"), (SKEWED[:, :2], "bad-loads"), (SKEWED * 0, "no-tokens")]
)  # fmt: skip
def test_windows_that_tell_nothing_are_counted(serving, load_LE, kind):
    serve = serving()
    assert serve.window(load_LE).startswith(f"keep ({kind}): ")
    assert serve.window().startswith("move")
    assert serve.ended().decisions == {kind: 1, "gain": 1}


@pytest.mark.parametrize(("held_LGP", "in_force"), [(None, HELD), (HELD[:, ::-1], HELD[:, ::-1])])
def test_moves_that_are_given_up_are_tried_again_from_what_is_in_force(serving, held_LGP, in_force):
    failures = [MovesFailed("a peer is gone", held_LGP)]

    def fails_once(_):
        if failures:
            raise failures.pop()

    serve = serving(fails_once)
    assert serve.window().startswith("move")
    assert serve.lines.get(timeout=WAIT_S) == "failed: MovesFailed: a peer is gone"
    np.testing.assert_array_equal(serve.controller.held_LGP, in_force)
    assert serve.window().startswith("move")
    report = serve.ended()
    assert (report.failures, report.bytes) == (1, serve.performed[1].bytes)


def test_moves_that_end_with_serving_are_no_failure(serving):
    def ends(_):
        raise MovesGivenUp("serving has ended")

    serve = serving(ends)
    assert serve.window().startswith("move")
    assert serve.lines.get(timeout=WAIT_S) == "given up: serving has ended"
    report = serve.ended()
    assert (report.failures, report.bytes) == (0, 0)


def test_steps_before_a_change_do_not_tell_against_it(serving):
    """A window that ended while experts moved has steps by the placement before."""
    serve = serving(lambda _: serve.follower.add(SKEWED, 9.0, 8))
    serve.follower.add(SKEWED, 1.0, 8)
    assert [serve.lines.get(timeout=WAIT_S)[:4] for _ in range(2)] == ["move", "keep"]
    for _ in range(2):
        serve.follower.add(SKEWED, 1.0, 8)
        assert serve.lines.get(timeout=WAIT_S).startswith("keep (balanced)")


def test_a_dry_run_moves_nothing_and_goes_on_as_if_it_had(serving):
    serve = serving(dry_run=True)
    assert serve.window().startswith("dry run: move (gain)")
    assert serve.window().startswith("dry run: keep (balanced)")
    assert serve.performed == []


def test_lines_that_cannot_be_written_are_counted(serving):
    followed = threading.Event()

    def full(_):
        raise OSError("no space left on device")

    serve = serving(lambda _: followed.set(), say=full)
    serve.follower.add(SKEWED)
    assert followed.wait(WAIT_S)
    assert serve.ended().failures == 1


def test_the_newest_windows_are_kept():
    history = ControlHistory()
    for at in range(MOST_WINDOWS + 3):
        history.add(replace(KEPT, at_s=float(at), balancedness=at / 4000), float(at), at // 100)
    assert [each.at_s for each in history.series] == list(range(3, MOST_WINDOWS + 3))
    last = history.series[-1]
    assert (last.balancedness, last.expected_balancedness, last.age_s) == (last.at_s / 4000, 0.5, last.at_s)
    assert last.traffic == (MOST_WINDOWS + 2) // 100


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
    assert not history.series
