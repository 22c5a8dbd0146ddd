"""Weights of time slices by need: a case by hand, and where they are not tried or not taken."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aurora.planner.plan import make_plan
from aurora.planner.simulated_choice import LEAST_WEIGHTS, small_weights, weights_by_need, with_time_slice
from aurora.simulator.interpreter import simulate_plan
from aurora.types.options import MOST_WEIGHT
from tests.conftest import cluster
from tests.simulator.test_interpreter import KEEP, profile

LAYER = [[0, 4], [4, 0]]  # four seconds of each port


def pair(layers=(4, 2), experts_s=(4, 8)):
    return [profile([[LAYER] * each], expert=s, name=n) for each, s, n in zip(layers, experts_s, "ab", strict=True)]


def test_a_model_with_twice_the_layers_has_two_slices_for_one_of_the_other():
    """Every exchange takes 4 s. With two slices for one the port serves a, b, aa, b, aa, b, aa, b, a: 48 s, and 4 s for each of
    b's layers, in which a waits to gate until b's experts are done. With one each it is idle for 4 s in each of b's layers too,
    and then a goes on alone for two layers, 12 s each."""
    sources = pair()
    plan = make_plan(cluster(1.0, 1.0), sources, KEEP)
    equal_s, weighted_s = (
        simulate_plan(replace(plan, options=replace(plan.options, time_slice="exchange", weights=weights)), sources).seconds
        for weights in ((1, 1), (2, 1))
    )
    assert (equal_s, weighted_s) == pytest.approx((64, 56))
    chosen = with_time_slice(plan, sources, ("exchange",))
    assert chosen.options.weights == (2, 1)
    said = "1 each take 64 s (by exchange), 2 and 1 by need of exchanges 56 s (by exchange)"
    assert chosen.notes == (f"`weights`: 2 and 1; in the simulator {said}",)


def test_weights_of_one_are_kept_where_others_bring_nothing():
    """One layer and two, whose experts take no time: the port is busy whatever goes first."""
    sources = pair(layers=(1, 2), experts_s=(0, 0))
    chosen = with_time_slice(make_plan(cluster(1.0, 1.0), sources, KEEP), sources)
    assert chosen.options.weights == ()
    assert chosen.notes[0].startswith("`weights`: 1 each; in the simulator 1 each take 24 s")


def test_weights_are_left_alone_where_they_are_given_or_models_need_the_same():
    sources = pair()
    for options in (replace(KEEP, weights=(1, 1)), replace(KEEP, priorities=("interactive", "batch"))):
        plan = make_plan(cluster(1.0, 1.0), sources, options)
        assert weights_by_need(plan, sources) == {}
        chosen = with_time_slice(plan, sources)
        assert (chosen.options.weights, chosen.notes) == (options.weights, ())
    alike = pair(layers=(2, 2))
    assert weights_by_need(make_plan(cluster(1.0, 1.0), alike), alike) == {}
    alone = alike[:1]
    assert weights_by_need(make_plan(cluster(1.0, 1.0), alone), alone) == {}


def test_models_may_need_exchanges_and_bytes_in_different_proportions():
    a, b = profile([[LAYER] * 3]), profile([[[[0, 20], [20, 0]]] * 1] * 2, name="b")
    assert weights_by_need(make_plan(cluster(1.0, 1.0), [a, b]), [a, b]) == {(3, 2): "exchanges", (2, 7): "bytes"}
    silent = profile([[[[0, 0], [0, 0]]] * 3])  # has exchanges, but no bytes
    assert weights_by_need(make_plan(cluster(1.0, 1.0), [a, b]), [silent, b]) == {(3, 2): "exchanges"}


@given(st.lists(st.floats(1.0, 200.0), min_size=1, max_size=5))
def test_weights_are_close_to_needs(need_M):
    weights_M = small_weights(need_M)
    off = max(abs(weight / weights_M[0] * need_M[0] / need - 1) for weight, need in zip(weights_M, need_M, strict=True))
    assert min(weights_M) <= LEAST_WEIGHTS
    assert off <= (1 + 1 / (2 * LEAST_WEIGHTS)) / (1 - 1 / (2 * LEAST_WEIGHTS)) - 1 + 1e-9
    assert max(small_weights([1.0, 1e9])) == MOST_WEIGHT
