"""The follower: real threads, a clock that the test sets."""

import threading
import time
from queue import SimpleQueue

import numpy as np
import pytest

from aurora.algorithms.control.controller import Controller
from aurora.runtime.follower import Follower, Moved, MovesFailed, MovesGivenUp

SKEWED = np.array([[900.0, 800.0, 100.0, 200.0]])
HELD = np.array([[[0, 1], [2, 3]]])
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
        """The number of failures after everything that was handed over."""
        self.follower.close()
        self.follower._thread.join(WAIT_S)
        return self.follower.failures


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
    assert serve.ended() == 0
    (performed,) = serve.performed
    assert performed.bytes > 0
    np.testing.assert_array_equal(serve.controller.held_LGP, performed.held_LGP)
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
    serve.now_s = 9.0
    assert not serve.follower.stuck
    serve.now_s = 15.0
    for load_LE in (np.nan * SKEWED, np.zeros((1, 4)), SKEWED):
        serve.follower.add(load_LE)
    assert serve.follower.stuck
    assert serve.lines.get(timeout=WAIT_S) == "stuck: serving goes on without decisions"
    serve.follower.check()  # which was told
    on.set()
    assert serve.lines.get(timeout=WAIT_S).startswith("keep (balanced)")  # the newest window; those before it are gone
    assert serve.ended() == 0
    assert serve.lines.empty()


def test_a_stuck_follower_is_told_before_the_next_window(serving):
    begun, on = threading.Event(), threading.Event()
    serve = serving(lambda _: begun.set() or on.wait(WAIT_S))
    serve.window()
    assert begun.wait(WAIT_S)
    for serve.now_s in (9.0, 10.0, 11.0):
        serve.follower.check()
    assert serve.lines.get(timeout=WAIT_S) == "stuck: serving goes on without decisions"
    on.set()
    serve.ended()
    assert serve.lines.empty()


def test_an_exception_in_planning_is_told_and_the_next_window_is_followed(serving):
    serve = serving()
    add = serve.controller.tracker.add

    def broken(loads):
        serve.controller.tracker.add = add
        raise MemoryError("no memory")

    serve.controller.tracker.add = broken
    assert serve.window() == "failed: MemoryError: no memory"
    assert serve.window().startswith("move (gain)")
    assert serve.ended() == 1


@pytest.mark.parametrize(
    ("load_LE", "kind"), [(SKEWED * np.nan, "bad-loads"), ([["many"]], "bad-loads"), (SKEWED[:, :2], "bad-loads"), (SKEWED * 0, "no-tokens")]
)  # fmt: skip
def test_windows_that_tell_nothing_are_told(serving, load_LE, kind):
    serve = serving()
    assert serve.window(load_LE).startswith(f"keep ({kind}): ")
    assert serve.window().startswith("move")


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
    assert serve.ended() == 1


def test_moves_that_end_with_serving_are_no_failure(serving):
    def ends(_):
        raise MovesGivenUp("serving has ended")

    serve = serving(ends)
    assert serve.window().startswith("move")
    assert serve.lines.get(timeout=WAIT_S) == "given up: serving has ended"
    assert serve.ended() == 0


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
    assert serve.ended() == 1
