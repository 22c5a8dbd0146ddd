"""Plans chosen by simulation."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aurora.errors import BadInput
from aurora.planner.plan import make_plan
from aurora.planner.simulated_choice import (
    COLOCATIONS,
    EXCLUSIVE_PLACES,
    TIE,
    WEIGHTS_PAY,
    candidates,
    soonest,
    with_micro_batches,
    with_time_slice,
)
from aurora.simulator.interpreter import simulate_plan
from aurora.types import Curve, PlanOptions
from aurora.types.options import MICRO_BATCH_COUNTS
from aurora.types.program import AUTO_TIME_SLICES
from tests.conftest import cluster
from tests.simulator.test_interpreter import profile
from tests.strategies import clusters, profiles


@pytest.mark.full
@settings(max_examples=10)
@given(st.integers(1, 3).flatmap(lambda n: st.tuples(clusters(n), st.lists(profiles(n), min_size=1, max_size=2))))
def test_no_candidate_is_simulated_shorter(case):
    machines, sources = case
    ways = candidates(PlanOptions(objective="simulated"), sources)
    chosen = soonest([make_plan(machines, sources, options) for options in ways], sources)
    assert chosen.notes == ("chosen by simulation",)
    took = simulate_plan(chosen, sources).seconds
    if len(sources) == 1:
        others = [PlanOptions(place=place) for place in EXCLUSIVE_PLACES]
    else:
        others = [PlanOptions(colocate=name, objective=objective) for name in COLOCATIONS for objective in ("causal", "paper")]
    assert took == min(simulate_plan(make_plan(machines, sources, options), sources).seconds for options in others)


@pytest.mark.full
@settings(max_examples=10)
@given(st.integers(2, 3).flatmap(lambda n: st.tuples(clusters(n), profiles(n), profiles(n))))
def test_turns_are_those_that_are_simulated_faster(case):
    machines, *sources = case
    plans = [make_plan(machines, sources, PlanOptions(time_slice=time_slice)) for time_slice in AUTO_TIME_SLICES]
    chosen = with_time_slice(plans[0], sources)
    equal_s = min(simulate_plan(plan, sources).seconds for plan in plans)
    took_s = simulate_plan(chosen, sources).seconds
    assert took_s * WEIGHTS_PAY < equal_s if chosen.options.weights else took_s == equal_s


def test_turns_are_chosen_by_as_many_windows_as_a_second_or_two_allow(monkeypatch):
    monkeypatch.setattr("aurora.planner.simulated_choice.TRANSFERS", 2 * 2 * 2 * 3)  # of two pairs and two layers
    seen = []
    monkeypatch.setattr(
        "aurora.planner.simulated_choice.simulate_plan", lambda plan, given: seen.append(given) or simulate_plan(plan, given)
    )
    sources = [profile([[[[0, 4], [4, 0]]]] * 5, name=name) for name in "ab"]
    plan = make_plan(cluster(1.0, 1.0), sources)
    with_time_slice(plan, sources)
    assert [[profile.windows for profile in given] for given in seen] == [[3, 3], [3, 3]]
    monkeypatch.setattr("aurora.planner.simulated_choice.TRANSFERS", 7)
    assert with_time_slice(plan, sources) is plan


def test_turns_on_one_gpu():
    sources = [profile([[[[4, 4]]]], name=name) for name in "ab"]
    assert with_time_slice(make_plan(cluster(1.0), sources), sources).options.time_slice == "exchange"


def test_something_must_be_left_to_choose():
    with pytest.raises(BadInput, match="found nothing to choose between"):
        candidates(PlanOptions(objective="simulated", place="balanced"), [None])


def test_micro_batches_are_chosen_where_they_pay(monkeypatch):
    """Experts take about as long as the all-to-alls. On a rank alone nothing can be overlapped."""
    window = [[[20, 20], [20, 20]]] * 3
    line = Curve(np.array([0.0, 1.0]), np.array([0.0, 1.0]))
    shared = replace(profile([window]), curves={"reference": {**profile([window]).curves["reference"], "expert": line}})
    plan = make_plan(cluster(1.0, 1.0), [shared])
    chosen = with_micro_batches(plan, [shared])
    in_s = {
        number: simulate_plan(with_micro_batches(plan, [shared], number), [shared]).seconds for number in MICRO_BATCH_COUNTS
    }
    best = chosen.options.micro_batches
    assert best > 1
    assert best == min(number for number, seconds in in_s.items() if seconds <= min(in_s.values()) * TIE)
    assert chosen.options.time_slice in AUTO_TIME_SLICES
    (note,) = chosen.notes
    assert note.startswith(
        f"micro-batches: {best} (by {chosen.options.time_slice}); in the simulator 1 {in_s[1] * 1e3:.4g} ms, 2 (by"
    )
    monkeypatch.setattr("aurora.planner.simulated_choice.TRANSFERS", 2 * 2 * 8)  # one layer
    assert with_micro_batches(plan, [shared]).options.micro_batches > 1
    starts = replace(plan, cluster=cluster(1.0, 1.0, startup_s=100.0))  # of which micro-batches have more
    assert with_micro_batches(starts, [shared]).options.micro_batches == 1
    alone = profile([[[[40]]]])
    one = with_micro_batches(make_plan(cluster(1.0), [alone]), [alone])
    assert one.options.micro_batches == 1
    assert one.notes[0].startswith("micro-batches: 1; in the simulator 1 ")


@pytest.mark.full
@pytest.mark.parametrize("layers_at_once", [None, 1])
def test_micro_batches_have_layers_that_are_long_enough_for_the_host(monkeypatch, layers_at_once):
    """A layer takes the same in the simulator whether all of them or one are simulated; each micro-batch must have its part of it."""
    window = [[[20, 20], [20, 20]]] * 3
    line = Curve(np.array([0.0, 1.0]), np.array([0.0, 1.0]))
    shared = replace(profile([window]), curves={"reference": {**profile([window]).curves["reference"], "expert": line}})
    plan = make_plan(cluster(1.0, 1.0), [shared])
    layer_s = simulate_plan(plan, [shared]).seconds / 3
    if layers_at_once:
        monkeypatch.setattr("aurora.planner.simulated_choice.TRANSFERS", 2 * 2 * 8)
    best = with_micro_batches(plan, [shared]).options.micro_batches
    assert best > 1
    for least_s, most in ((layer_s / 4.1, 4), (layer_s / 2.1, 2), (layer_s / 1.9, 1), (layer_s * 2, 1)):
        chosen = with_micro_batches(plan, [shared], 0, least_s)
        assert chosen.options.micro_batches == min(best, most)
        assert ("for each micro-batch were expected" in chosen.notes[0]) == (most < 4)
    assert with_micro_batches(plan, [shared], 3, layer_s * 2).options.micro_batches == 3  # asked for


def test_a_single_model_alone_has_micro_batches():
    sources = [profile([[[[0, 4], [4, 0]]]], name=name) for name in "ab"]
    pair = make_plan(cluster(1.0, 1.0), sources, PlanOptions(micro_batches=0))
    assert with_micro_batches(pair, sources).options.micro_batches == 1
    for refused in (
        lambda: pair.with_micro_batches(2),
        lambda: make_plan(cluster(1.0, 1.0), sources, PlanOptions(micro_batches=2)),
    ):
        with pytest.raises(BadInput, match="`micro_batches`: cut the batches of a single model, expected 1, found 2 models"):
            refused()
    with pytest.raises(BadInput, match="expected a number from 1 to 4, found 5"):
        PlanOptions(micro_batches=5)
