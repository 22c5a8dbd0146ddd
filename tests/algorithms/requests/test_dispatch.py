"""Which rank a request goes to, and in which steps prompts are computed: by hand, and what always holds."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aurora.algorithms.requests import steps as rules
from aurora.algorithms.requests.dispatch import DISPATCH, dispatch_of
from aurora.algorithms.requests.ranks import RankLoads, by_prefix, by_requests, by_tokens, round_robin
from aurora.algorithms.requests.steps import Aligned, Cadence, PrefillInterval, RanksAtStep, planned_interval
from aurora.errors import BadInput
from aurora.types import RequestOptions


def sent(rule, prompts, ranks=2):
    """Prompt tokens of each rank once a rule has sent prompts that come at once."""
    loads = RankLoads.idle(ranks)
    for tokens in prompts:
        rank = rule(loads, [0] * ranks)
        loads.requests_R[rank] += 1
        loads.prompt_tokens_R[rank] += tokens
        loads.sent += 1
    return loads.prompt_tokens_R


@pytest.mark.parametrize("rule", [by_requests, round_robin])
def test_equal_counts_of_unequal_prompts(rule):
    assert sent(rule, [8000, 500, 8000, 500]) == [16_000, 1000]
    assert sent(rule, [8000, 500] * 16) == [128_000, 8000]


def test_equal_tokens():
    assert sent(by_tokens, [8000, 500, 8000, 500]) == [8500, 8500]
    assert sent(by_tokens, [8000, 500] * 16) == [68_000, 68_000]


@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=60), st.integers(1, 9))
def test_the_rule_of_tokens_is_list_scheduling(prompts, ranks):
    """Graham (1966): the busiest rank has at most the mean, and one prompt less its R-th part."""
    assert max(sent(by_tokens, prompts, ranks)) <= sum(prompts) / ranks + max(prompts) * (1 - 1 / ranks) + 1e-9


def test_ties():
    """Equal prompts: fewer tokens in the KV cache; equal ones, too: the ranks in turn."""
    assert by_tokens(RankLoads([1, 1, 1], [0, 0, 0], [50, 20, 20]), [0] * 3) == 1
    assert by_tokens(RankLoads([1, 1, 1], [0, 0, 0], [50, 20, 20], sent=2), [0] * 3) == 2
    assert [by_requests(RankLoads([3, 3], [9, 0], [0, 0], sent), [0, 0]) for sent in range(4)] == [0, 1, 0, 1]


def test_a_prefix_is_worth_what_it_saves():
    """Rank 1 holds 600 tokens of the prompt: taken with up to 600 tokens more to compute before it."""
    held = [0, 600]
    assert by_prefix(RankLoads([1, 1], [100, 699], [0, 0]), held) == 1
    assert by_prefix(RankLoads([1, 1], [100, 701], [0, 0]), held) == 0


def ranks_at(step=0, prompts=(), waiting=None, generating=None, now_s=0.0):
    count = len(prompts)
    return RanksAtStep(step, now_s, prompts, waiting or [1 if tokens else 0 for tokens in prompts], generating or [1] * count)


def test_aligned_waits_for_others_and_not_longer_than_told():
    rule = Aligned(2)
    opened = [rule.open_R(ranks_at(step, (500, 0)))[0] for step in range(6)]
    assert opened == [False, False, True, False, False, True]
    assert rule.open_R(ranks_at(6, (500, 20))) == [True, True]
    assert Aligned(2).open_R(ranks_at(0, (500, 0), generating=[4, 0])) == [True, True]  # nobody waits for a rank that is idle
    assert Aligned(0).open_R(ranks_at(0, (500, 0))) == [True, True]


def test_an_interval_and_its_escape():
    """Every third step; a rank with prompts that did not begin goes on alone, and so does one that generates nothing."""
    rule, opened = PrefillInterval(3), []
    for step, waiting in enumerate([(4, 1), (3, 0), (0, 0), (0, 0), (0, 1)]):
        ranks = ranks_at(step, (900, 900), waiting=list(waiting))
        opened.append(rule.open_R(ranks))
        rule.scheduled(ranks_at(step, (900, 900), waiting=[max(0, count - 1) for count in waiting]), opened[-1])
    assert opened == [[True, True], [True, False], [True, False], [True, True], [False, False]]
    assert PrefillInterval(3).open_R(ranks_at(1, (9, 9), generating=[0, 2])) == [True, False]


def linear(prompt_tokens, generating):
    """20 ms, and 0.1 ms for each token."""
    return 0.020 + 1e-4 * (prompt_tokens + generating)


def test_the_interval_by_hand():
    """Four ranks, 4000 tokens a step, 25,000 prompt tokens/s: 0.85 of a step are 3400 on each, which come in 0.544 s.

    One step with them takes 0.36 s, nine without 0.18 s. With a bound of 0.85 s on TTFT, 0.49 s are left for the interval:
    one step with prompts and six without.
    """
    idle = ranks_at(prompts=(0, 0, 0, 0), generating=[0] * 4)
    assert planned_interval(idle, 9, 25_000, 4000, linear) == 10
    assert planned_interval(idle, 9, 25_000, 4000, linear, ttft_s=0.85) == 7
    assert planned_interval(idle, 9, 25_000, 4000, linear, ttft_s=0.01) == 1
    assert planned_interval(idle, 9, 40_000, 4000, linear) == 1  # they come in 0.34 s: more than one step's
    assert planned_interval(idle, 9, 100, 4000, linear) == rules.MOST_INTERVAL
    assert planned_interval(idle, 3, 100, 4000, linear) == 1  # 16 steps of 0.02 s are 0.32 s: less than one prompt
    assert planned_interval(idle, 0, 0, 4000, linear) == 1
    busy = ranks_at(prompts=(4000, 4001, 9000, 4000), generating=[0] * 4)
    assert planned_interval(busy, 9, 1, 4000, linear) == 1  # all have a whole step's: they are even


@given(st.floats(1, 1e6), st.integers(1, 16), st.integers(0, 200))
def test_an_interval_takes_no_longer_than_its_prompts_take_to_come(rate, ranks, generating):
    at = ranks_at(prompts=(0,) * ranks, generating=[generating] * ranks)
    interval = planned_interval(at, 1e9, rate, 4096, linear)
    prompts = np.ceil(rules.FILL * (4096 - generating))
    if interval > 1:
        assert (interval - 1) * linear(0, generating) + linear(prompts, generating) <= prompts * ranks / rate + 1e-9
    if interval < rules.MOST_INTERVAL:
        assert interval * linear(0, generating) + linear(prompts, generating) > prompts * ranks / rate - 1e-9


def test_a_cadence_is_planned_from_recent_arrivals_alone():
    """Five prompts of 5000 tokens in one second, after none for a minute: the rate counts from the first arrival, or of RECENT_S."""
    rule = Cadence(4000, linear)
    for _ in range(5):
        rule.arrived(0.0, 5000)
    first = ranks_at(0, (25_000, 0, 0, 0), generating=[0] * 4)
    assert rule.open_R(first) == [True] * 4
    rule.scheduled(ranks_at(0, (21_000, 0, 0, 0), generating=[1] * 4, now_s=1.0), [True] * 4)
    assert rule.interval == planned_interval(ranks_at(prompts=(0,) * 4), 5, 25_000, 4000, linear) == 10
    assert [rule.open_R(ranks_at(step, (9,) * 4))[0] for step in range(1, 12)] == [False] * 9 + [True, False]
    rule.scheduled(ranks_at(10, (0,) * 4, now_s=1.0 + rules.RECENT_S), [True] * 4)
    assert rule.interval == 1
    assert rule.open_R(ranks_at(0, (9,) * 4)) == [True] * 4  # a new count of steps: the ranks were idle


@pytest.mark.parametrize(
    ("name", "ranks", "said"),
    [
        ("token", 2, "`dispatch`: expected .*requests.*tokens.*cadence, found 'token'"),
        ("tokens:3", 2, "`dispatch`: expected tokens, found 'tokens:3'"),
        ("cadence:3", 2, "`dispatch`: expected cadence, found"),
        ("aligned:-1", 2, "expected aligned:N with a whole number N from 0 on, found 'aligned:-1'"),
        ("interval:0", 2, "expected interval:N with a whole number N from 1 on, found 'interval:0'"),
        ("interval:", 2, "expected interval:N"),
        ("interval:" + "9" * 5000, 2, "expected interval:N"),
        ("aligned:8", 1, "expected two data-parallel ranks or more for aligned"),
    ],
)
def test_refusals(name, ranks, said):
    with pytest.raises(BadInput, match=said):
        dispatch_of(RequestOptions(dispatch=name), ranks, linear)


def test_names():
    made = {name: dispatch_of(RequestOptions(dispatch=name), 4, linear)[1] for name in DISPATCH}
    assert (made["aligned"].most, made["interval"].interval, made["cadence"].max_num_batched_tokens) == (8, 1, 8192)
    assert dispatch_of(RequestOptions(dispatch="aligned:3"), 4, linear)[1].most == 3
