"""Drift against counting by hand: what differs, what chance makes of it, and what the plan loses."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aurora.algorithms.workload.load_statistics import variation
from aurora.algorithms.workload.synthetic import draw_profile
from aurora.errors import BadInput
from aurora.planner.evaluate import balance_slowdown, drift, evaluate, overlap
from aurora.planner.plan import make_plan, price
from aurora.types import Placement, SyntheticOptions
from tests.conftest import cluster
from tests.strategies import profiles

CONFIG = {
    "num_local_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 128,
}  # fmt: skip


def drawn(skew, seed, windows=1):
    return draw_profile(skew, CONFIG, SyntheticOptions(sources=4, window_tokens=256, windows=windows, seed=seed))


def turned(profile, by):
    """The same traffic, its experts renumbered."""
    return replace(profile, tokens_TLSE=np.roll(profile.tokens_TLSE, by, axis=3))


@given(profiles(2), st.integers(0, 5))
def test_measures_of_what_differs(profile, by):
    here, there = profile.load_LE, turned(profile, by).load_LE
    apart = variation(here, there)
    for layer in range(profile.layers):
        if here[layer].any():
            shares = [each[layer] / each[layer].sum() for each in (here, there)]
            most = sum(max(a - b, 0) for a, b in zip(*shares, strict=True))  # the largest difference of any event
            assert apart[layer] == pytest.approx(most)
    assert (variation(here, here) == 0).all()
    for hot in range(1, profile.experts + 1):
        assert (overlap(here, here, hot) == 1).all()
        assert ((overlap(here, there, hot) >= 0) & (overlap(here, there, hot) <= 1)).all()
    assert balance_slowdown(here, here, 2) == 0
    assert balance_slowdown(here, there, 2) >= 0


def test_overlap_and_loss_by_hand():
    here, there = np.array([[9, 8, 1, 0]]), np.array([[9, 1, 8, 0]])
    assert overlap(here, there, 2).tolist() == [1 / 3]
    # Balanced for the first: 0 with 3, 1 with 2. For the second: 0 with 3, 2 with 1. Both have 9 on the fullest.
    assert balance_slowdown(here, there, 2) == 0
    # Then 0 and 1 are hot, which sat apart from one another but with 3 and 2, now as hot.
    assert balance_slowdown(here, np.array([[9, 0, 0, 9]]), 2) == 1


@pytest.mark.parametrize("windows", [1, 12])
def test_another_sample_of_the_same_traffic_is_no_drift(windows):
    """Whether tokens are drawn or rounds; false alarms stay rare."""
    whole = drawn("zipf:1", 0, 2 * windows)
    rng, alarms = np.random.default_rng(0), 0
    for _ in range(20):
        order = rng.permutation(2 * windows)
        halves = (replace(whole, tokens_TLSE=whole.tokens_TLSE[each]) for each in (order[:windows], order[windows:]))
        alarms += drift(*halves).moved
    assert alarms <= 4


def test_traffic_that_moved():
    before = drawn("zipf:1", 4)
    found = drift(before, turned(before, 3))
    assert found.moved
    assert found.replan
    assert "plan again: traffic has moved, and the plan loses" in found.reason
    kept = replace(found, threshold=9.0)
    assert not kept.replan
    assert "keep the plan: traffic has moved, but it loses" in kept.reason
    same = drift(before, before)
    assert (same.slowdown, same.moved, same.replan) == (0, False, False)
    assert "two samples as small as these" in same.reason


def test_the_loss_of_a_plan_is_what_evaluating_it_says():
    before = drawn("zipf:1", 0)
    after, plan = turned(before, 3), make_plan(cluster(1e6, 1e6, 1e6, 1e6), [before])
    assert drift(before, after, plan).slowdown == evaluate(plan, [after]).slowdown > 0
    with pytest.raises(BadInput, match="expected a plan for the first profile, 'synthetic' alone, found one made from others"):
        drift(after, before, plan)


def test_one_plan_for_day_and_night_is_named_where_it_serves_both():
    """By day experts 0 and 1 are hot, by night 2 and 3: apart, all four serve both; a plan for the day may pair the others."""
    hot = np.full((2, 8), 1)
    hot[0, :2] = hot[1, 2:4] = 1000
    day, night = (replace(drawn("zipf:1", 0), tokens_TLSE=np.tile(hot_E, (1, 3, 4, 1))) for hot_E in hot)
    plan = make_plan(cluster(1e6, 1e6, 1e6, 1e6), [day])
    # The searches see ties: put the night's two hot experts on one GPU, as a plan for the day alone may do.
    paired = Placement((((0, 4), (1, 5), (2, 3), (6, 7)),) * 3)
    plan = price(plan.cluster, day, paired, plan.options)
    assert plan.objective_s == pytest.approx(make_plan(plan.cluster, [day]).objective_s, rel=2e-3)
    moved = drift(day, night, plan)
    assert moved.replan
    assert moved.joint_serves
    assert max(moved.slowdown_of_joint) < 2e-3 < moved.slowdown
    assert "plan once for both (--domain)" in moved.reason
    # Where each kind of traffic needs what the other cannot have, planning again stays the advice.
    assert not replace(moved, slowdown_of_joint=(0.0, 0.2)).joint_serves
    assert "plan again" in replace(moved, slowdown_of_joint=(0.0, 0.2)).reason


def test_profiles_of_other_models():
    before = drawn("zipf:1", 0)
    with pytest.raises(BadInput, match="with 3 MoE layers of 8 experts, found 2 of 8"):
        drift(before, replace(before, tokens_TLSE=before.tokens_TLSE[:, :2]))
    with pytest.raises(BadInput, match="and other router weights"):
        drift(replace(before, fingerprint="a"), replace(before, fingerprint="b"))
