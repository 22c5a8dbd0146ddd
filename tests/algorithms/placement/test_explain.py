"""Explained layers add up to the plan, and name the GPUs that are slowest."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aurora.algorithms.placement.explain import explain
from aurora.planner.plan import make_plan
from aurora.reports.plan_tables import explain_tables
from aurora.types import PlanOptions
from tests.conftest import cluster
from tests.planner.test_plan import profile
from tests.reports.as_text import as_text
from tests.strategies import clusters, profiles


@pytest.mark.full
@given(st.integers(1, 3).flatmap(lambda n: st.tuples(clusters(n), profiles(n), profiles(n))), st.booleans())
def test_layers_add_up_to_the_objective(case, both):
    machines, *sources = case
    chosen = sources if both else sources[:1]
    plan = make_plan(machines, chosen, PlanOptions(aim="own"))
    found = explain(plan, chosen)
    assert sum(one.value_s for one in found) == pytest.approx(plan.objective_s)
    for one in found:
        assert one.seconds_X @ one.times_X == pytest.approx(one.value_s)
        if both:
            assert (one.assignment_bound_s, one.bound_term) == (None, None)
        else:
            assert one.assignment_bound_s <= one.value_s * (1 + 1e-9)
            assert one.bound_term in one.terms


def test_the_slow_gpu_is_named_with_its_experts():
    """Rank 0 sends 6 tokens to expert 1 on the slow GPU, whose port takes 6 s, and its expert 12 s more at 2 s a token."""
    source = profile([[[[3, 6], [0, 0]]]], rate=2.0, name="toy")
    machines = cluster(1.0, 1.0)
    plan = make_plan(machines, [source], PlanOptions(place="contiguous", assign="contiguous"))
    (one,) = explain(plan, [source])
    assert dict(zip(one.terms, one.seconds_X, strict=True)) == {
        "gate + dispatch": 6, "expert + combine": 18, "aggregate": 0,
    }  # fmt: skip
    assert one.gpu_X.tolist()[:2] == [0, 1]
    assert one.phases_MYG[0, :, 1].tolist() == [0, 6, 12, 6, 0]
    assert (one.value_s, one.assignment_bound_s) == (24, 18)  # expert 1 beside its tokens: 3 and then 12 + 3
    text = as_text(explain_tables(plan, [one]))
    assert "gap 33.3%" in text
    assert "toy" in text


def test_unequal_layers_are_explained_by_the_longer():
    rng = np.random.default_rng(0)
    pair = [profile(rng.integers(1, 9, (1, layers, 2, 2))) for layers in (2, 3)]
    plan = make_plan(cluster(1.0, 2.0), pair)
    assert [one.layer for one in explain(plan, pair)] == [0, 1, 2]
