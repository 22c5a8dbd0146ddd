"""What goes wrong in a follower: serving goes on with equal answers, and one line and one figure of the report say so."""

import threading
from functools import partial

import numpy as np
import pytest

from aurora.runtime import serving_rank
from aurora.runtime.follower import Follower
from tests.runtime.test_live_placement import EAGER, placed
from tests.runtime.test_run import differences, plan_for, prompts_for

pytestmark = pytest.mark.full

STUCK = "mixtral-topics: stuck: serving goes on without decisions"


@pytest.fixture
def served(mixtral, monkeypatch):
    """Serves while a fault is there; returns the report, after the answers have been compared."""
    plan = placed(plan_for([mixtral], 2), ((0, 1, 2, 3, 4, 5), (6, 7)))

    def serve(**options):
        monkeypatch.setattr(serving_rank, "Follower", partial(Follower, **options))
        asked = {"transport": "memory", "adapt": EAGER, "max_new_tokens": 12, "batch": 2}
        result, found = differences(plan, [mixtral], [prompts_for(mixtral, 4)], **asked)
        assert found == []
        return result.control_M[0]

    return serve


@pytest.mark.parametrize(("factor", "kind"), [(np.nan, "bad-loads"), (0, "no-tokens")])
def test_windows_that_tell_nothing(served, monkeypatch, caplog, factor, kind):
    """Each is counted, and told in one line."""
    caplog.set_level("INFO", "aurora.control")
    add = Follower.add
    monkeypatch.setattr(Follower, "add", lambda follower, load_LE, *more: add(follower, load_LE * factor, *more))
    report = served()
    assert report.decisions == {kind: report.windows - report.skipped}
    assert [f"keep ({kind}): " in line for line in caplog.messages] == [True] * report.decisions[kind]
    assert (report.changes, report.series, report.balancedness, report.failures) == ((), (), None, 0)


def test_a_follower_that_is_stuck_is_told_once(served, monkeypatch, caplog):
    caplog.set_level("INFO", "aurora.control")
    monkeypatch.setattr("aurora.runtime.follower.JOIN_S", 0)
    on, seconds = threading.Event(), iter(range(10**9))
    monkeypatch.setattr("aurora.algorithms.control.controller.Controller.window", lambda *_: on.wait(60))
    report = served(clock=lambda: float(next(seconds)))
    on.set()
    assert (report.stuck, report.decisions) == (1, {})
    assert caplog.messages.count(STUCK) == 1


def test_a_log_on_a_full_disk_is_counted(served):
    """The line that says so cannot be written there; the report has it."""
    with open("/dev/full", "w") as full:
        handler = serving_rank._DecisionLog(full)
        serving_rank.DECISIONS.addHandler(handler)
        serving_rank.DECISIONS.setLevel("INFO")
        try:
            report = served()
        finally:
            serving_rank.DECISIONS.removeHandler(handler)
            serving_rank.DECISIONS.setLevel("NOTSET")
            with pytest.raises(OSError, match="No space left"):
                full.close()
    assert report.failures >= sum(report.decisions.values()) > 0
