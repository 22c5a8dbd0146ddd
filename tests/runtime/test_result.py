"""What a run brings home."""

from collections import Counter
from dataclasses import replace

import numpy as np

from aurora.runtime.result import Answers, RankResult, RunConditions, measured_trace
from aurora.types import Curve, Profile, TokenRouting
from aurora.types.coactivation import CoActivation
from tests.conftest import cluster


def test_a_runs_own_traffic_replaces_all_that_a_profile_says_of_its_own():
    """One prefill window of two tokens becomes three windows of one: what the profile knew of the two holds no longer."""
    routed = np.array([[[0, 1]], [[1, 2]]])
    nothing = Curve(np.array([1.0]), np.array([0.0]))
    routing = TokenRouting(routed, np.array([0, 1]), np.array([0, 0]))
    curves = {"cpu": dict.fromkeys(("gate", "expert", "aggregate"), nothing)}
    profile = Profile(
        "m",
        "",
        routing.tokens_TLSE(1, 2, 3),
        2,
        1,
        1,
        1,
        1,
        curves,
        stage_T=("prefill",),
        coactivation=CoActivation.of(routed, 3),
    )
    own = TokenRouting(np.array([[[2, 1]], [[0, 2]], [[0, 1]]]), np.array([1, 0, 1]), np.array([0, 1, 2]))
    (found,) = RunConditions((own,), cluster(1.0, 1.0)).traffic([profile])
    assert found.tokens_TLSE[:, 0].tolist() == [
        [[0, 0, 0], [0, 1, 1]],
        [[1, 0, 1], [0, 0, 0]],
        [[0, 0, 0], [1, 1, 0]],
    ]
    assert (found.stage_T, found.coactivation) == (None, None)


def rank_result(rank, steps):
    """A rank with three events a step, of two models in turn, each a second long."""
    rows = [
        (3.0 * step + i, 3.0 * step + i + 1, rank, 1, step % 2, step, 0, i, -1, False, 0) for step in steps for i in range(3)
    ]
    return RankResult([Answers(), Answers()], 1.0, rows, "gloo", None, [], [], None)


def test_a_long_runs_trace_has_the_steps_that_all_ranks_still_have(monkeypatch):
    """Rank 0 has forgotten a part of step 3, rank 1 has not, and rank 2 joined late."""
    first, second, late = (rank_result(rank, steps) for rank, steps in ((0, range(10)), (1, range(10)), (2, range(7, 10))))
    trace, from_s = measured_trace([first, second, late], ("a", "b"), 3)
    assert (len(trace), from_s) == (69, None)
    first, second = (replace(each, rows=each.rows[-20 - rank :][:20]) for rank, each in enumerate((first, second)))
    monkeypatch.setattr("aurora.runtime.result.MOST_EVENTS", 20)
    trace, from_s = measured_trace([first, second, late], ("a", "b"), 3)
    assert from_s == 10.0
    kept = {(rank, step): 3 for rank in (0, 1) for step in range(4, 10 - rank)} | {(2, step): 3 for step in range(7, 10)}
    assert Counter(zip(trace.rank_X.tolist(), trace.step_X.tolist(), strict=True)) == kept | {(1, 9): 2}
