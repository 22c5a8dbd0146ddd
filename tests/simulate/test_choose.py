"""Plans chosen by simulation."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aurora.errors import BadInput
from aurora.plan.planner import make_plan
from aurora.simulate.choose import ALONE, TOGETHER, simulated_plan
from aurora.simulate.interpreter import simulate_plan
from aurora.types import PlanOptions
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


def test_something_must_be_left_to_choose():
    with pytest.raises(BadInput, match="found nothing to choose between"):
        simulated_plan(None, [None], PlanOptions(place="balanced"))
