"""What a run brings home."""

from collections import Counter
from dataclasses import replace

import numpy as np

from aurora.runtime.result import Answers, RankResult, RunConditions, Token, TokenTimes, measured_trace, merge_answers
from aurora.types import Curve, Profile, TokenRouting
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
    )
    own = TokenRouting(np.array([[[2, 1]], [[0, 2]], [[0, 1]]]), np.array([1, 0, 1]), np.array([0, 1, 2]))
    (found,) = RunConditions((own,), cluster(1.0, 1.0)).traffic([profile])
    assert found.tokens_TLSE[:, 0].tolist() == [
        [[0, 0, 0], [0, 1, 1]],
        [[1, 0, 1], [0, 0, 0]],
        [[0, 0, 0], [1, 1, 0]],
    ]
    assert found.stage_T is None


def rank_result(rank, steps):
    """A rank with three events a step, of two models in turn, each a second long."""
    rows = [(3.0 * step + i, 3.0 * step + i + 1, rank, step % 2, step, 0, i, -1, False, 0) for step in steps for i in range(3)]
    return RankResult([Answers(), Answers()], 1.0, rows, "gloo", None, [], [], None)


def test_a_long_runs_trace_has_the_steps_that_all_ranks_still_have(monkeypatch):
    """Rank 0 has forgotten a part of step 3, rank 1 has not, and rank 2 has only the last steps."""
    first, second, late = (rank_result(rank, steps) for rank, steps in ((0, range(10)), (1, range(10)), (2, range(7, 10))))
    trace, from_s = measured_trace([first, second, late], ("a", "b"), 3)
    assert (len(trace), from_s) == (69, None)
    first, second = (replace(each, rows=each.rows[-20 - rank :][:20]) for rank, each in enumerate((first, second)))
    monkeypatch.setattr("aurora.runtime.result.MOST_EVENTS", 20)
    trace, from_s = measured_trace([first, second, late], ("a", "b"), 3)
    assert from_s == 10.0
    kept = {(rank, step): 3 for rank in (0, 1) for step in range(4, 10 - rank)} | {(2, step): 3 for step in range(7, 10)}
    assert Counter(zip(trace.rank_X.tolist(), trace.step_X.tolist(), strict=True)) == kept | {(1, 9): 2}


def test_times_of_tokens_are_kept_by_rank():
    answers = Answers()
    arrived_s = {0: 1.0, 1: 1.5, 2: 5.0}
    answers.add([Token(0, 5, False), Token(1, 5, False)], 0, 2.0, arrived_s)
    answers.add([Token(0, 6, True), Token(1, 6, True)], 0, 2.5, arrived_s)
    answers.add([Token(2, 8, False)], 3, 6.5, arrived_s)
    answers.add([Token(2, 9, True)], 3, 7.0, arrived_s)
    assert answers.times_R == {0: TokenTimes({0: 1.0, 1: 0.5}, [0.5, 0.5]), 3: TokenTimes({2: 1.5}, [0.5])}
    other = Answers(times_R={3: TokenTimes({4: 2.0}, [1.0])})
    merged = merge_answers([answers, other])
    assert merged.times_R[3] == TokenTimes({2: 1.5, 4: 2.0}, [0.5, 1.0])
    assert (merged.ttft_s, merged.tpot_s) == ([1.0, 0.5, 1.5, 2.0], [0.5, 0.5, 0.5, 1.0])


def test_times_between_tokens_stay_bounded(monkeypatch):
    monkeypatch.setattr("aurora.runtime.result.MOST_TIMES", 3)
    times = TokenTimes()
    for second in range(11):
        times.add_between(float(second))
    assert times.tpot_s == [6.0, 7.0, 8.0, 9.0, 10.0]
