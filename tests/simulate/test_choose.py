"""Plans chosen by simulation."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aurora.errors import BadInput
from aurora.plan.planner import make_plan
from aurora.simulate.choose import ALONE, TOGETHER, simulated_plan, with_turns
from aurora.simulate.interpreter import simulate_plan
from aurora.types import TURNS, PlanOptions
from tests.conftest import cluster
from tests.simulate.test_interpreter import profile
from tests.strategies import clusters, profiles


@settings(max_examples=10)
@given(st.integers(1, 3).flatmap(lambda n: st.tuples(clusters(n), st.lists(profiles(n), min_size=1, max_size=2))))
def test_no_candidate_is_simulated_shorter(case):
    machines, sources = case
    chosen = simulated_plan(machines, sources, PlanOptions(objective="simulated"))
    assert chosen.methods["chosen"] == "simulated"
    took = simulate_plan(chosen, sources).seconds
    if len(sources) == 1:
        others = [PlanOptions(place=place) for place in ALONE]
    else:
        others = [PlanOptions(colocate=name, objective=objective) for name in TOGETHER for objective in ("causal", "paper")]
    assert took == min(simulate_plan(make_plan(machines, sources, options), sources).seconds for options in others)


@settings(max_examples=10)
@given(st.integers(2, 3).flatmap(lambda n: st.tuples(clusters(n), profiles(n), profiles(n))))
def test_turns_are_those_that_are_simulated_faster(case):
    machines, *sources = case
    plans = [make_plan(machines, sources, PlanOptions(turns=turns)) for turns in TURNS]
    chosen = with_turns(plans[0], sources)
    assert simulate_plan(chosen, sources).seconds == min(simulate_plan(plan, sources).seconds for plan in plans)


def test_turns_are_chosen_by_as_many_windows_as_a_second_or_two_allow(monkeypatch):
    monkeypatch.setattr("aurora.simulate.choose.TRANSFERS", 2 * 2 * 2 * 3)  # of two pairs and two layers
    seen = []
    monkeypatch.setattr(
        "aurora.simulate.choose.simulate_plan", lambda plan, given: seen.append(given) or simulate_plan(plan, given)
    )
    sources = [profile([[[[0, 4], [4, 0]]]] * 5, name=name) for name in "ab"]
    plan = make_plan(cluster(1.0, 1.0), sources)
    with_turns(plan, sources)
    assert [[profile.windows for profile in given] for given in seen] == [[3, 3], [3, 3]]
    monkeypatch.setattr("aurora.simulate.choose.TRANSFERS", 7)
    assert with_turns(plan, sources) is plan


def test_turns_on_one_gpu():
    sources = [profile([[[[4, 4]]]], name=name) for name in "ab"]
    assert with_turns(make_plan(cluster(1.0), sources), sources).methods["turns"] == "exchange"


def test_something_must_be_left_to_choose():
    with pytest.raises(BadInput, match="found nothing to choose between"):
        simulated_plan(None, [None], PlanOptions(place="balanced"))
