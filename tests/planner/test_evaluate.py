"""A plan on other traffic: its objective there, and what a plan of its own would take."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aurora.algorithms.network.switch import timed
from aurora.algorithms.placement.grouping import PLACE
from aurora.algorithms.replicas.registry import REPLICAS
from aurora.algorithms.workload.traffic import layer_traffic
from aurora.errors import BadInput
from aurora.planner.evaluate import evaluate
from aurora.planner.plan import make_plan
from aurora.types import PlanOptions, Servers
from tests.conftest import cluster
from tests.planner.scenarios.test_exclusive import drawn, priced
from tests.strategies import clusters, profiles

ONE = st.integers(1, 4).flatmap(lambda n: st.tuples(clusters(n), profiles(n)))
SHARED = Servers.of("aabb", 5e5, shared_nic=True)
TWO = st.integers(1, 3).flatmap(lambda n: st.tuples(clusters(n), profiles(n), profiles(n)))


@pytest.mark.full
@given(ONE, st.sampled_from([*PLACE, "swap-search", *REPLICAS]), st.sampled_from(["sum", "mean", "cvar", "worst"]))
def test_nothing_is_lost_on_its_own_profile(case, place, aim):
    machines, source = case
    slots = -(-source.experts // len(machines)) + 1
    plan = make_plan(machines, [source], PlanOptions(place, slots_per_gpu=slots, aim=aim, seed=3))
    found = evaluate(plan, [source])
    assert found.slowdown == pytest.approx(0)
    assert found.served_s_L.sum() == pytest.approx(plan.objective_s)
    assert found.replanned.models[0].placement == plan.models[0].placement
    assert found.dispatch_s_ML[0] == pytest.approx(plan.models[0].dispatch_s_L)


@pytest.mark.full
@given(TWO)
def test_two_models_lose_nothing_on_their_own_profiles(case):
    machines, a, b = case
    plan = make_plan(machines, [a, b])
    found = evaluate(plan, [a, b])
    assert found.slowdown == pytest.approx(0)
    assert len(found.served_s_L) == max(a.layers, b.layers)
    for took, model in zip(found.dispatch_s_ML, plan.models, strict=True):
        assert took == pytest.approx(model.dispatch_s_L)


@pytest.mark.parametrize("options", [PlanOptions(), PlanOptions(slots_per_gpu=3)])
def test_other_traffic_is_priced_where_the_experts_are(options):
    machines = cluster(1e3, 2e3, 1e3, 4e3)
    made_for, served = drawn(0), drawn(1)
    plan = make_plan(machines, [made_for], options)
    found = evaluate(plan, [served])
    assert found.served_s_L.sum() == pytest.approx(priced(plan, served))
    assert found.replanned.objective_s == make_plan(machines, [served], options).objective_s
    assert found.slowdown == pytest.approx(found.served_s_L.sum() / found.replanned.objective_s - 1)
    assert found.slowdown > 0
    there = layer_traffic(served, 0, plan.models[0].placement.split_EG(0))
    order = plan.models[0].dispatch_L[0]
    assert found.dispatch_s_ML[0][0] == pytest.approx(timed(order, there, machines.network).makespan_s)


def test_profiles_that_the_plan_is_not_for():
    machines, source = cluster(1.0, 1.0, 1.0, 1.0), drawn(0)
    plan = make_plan(machines, [source])
    for given_, message in (
        ([source, source], "expected 1 profiles as in the plan, found 2"),
        ([drawn(0, sources=2)], "come from 2 source ranks"),
        ([drawn(0, experts=4)], "expected 'm' with 1 MoE layers of 8 experts, found 1 of 4"),
        ([replace(source, fingerprint="another")], "and other router weights"),
    ):
        with pytest.raises(BadInput, match=message):
            evaluate(plan, given_)


@pytest.mark.parametrize("order", ["all-at-once", "openshop", "auto"])
@pytest.mark.parametrize(
    "change",
    [{"incast": 0.3}, {"servers": SHARED}, {"incast": 0.3, "servers": SHARED}],
    ids=["incast", "servers", "both"],
)
def test_a_plan_takes_on_its_own_profile_what_it_says(change, order):
    """`evaluate` once dropped the cluster's incast, so that a plan looked 2.4 times as fast on the profile it was made for."""
    source = drawn(0)
    plan = make_plan(replace(cluster(1e6, 1e6, 1e6, 1e6, startup_s=1e-5), **change), [source], PlanOptions(order=order))
    assert evaluate(plan, [source]).dispatch_s_ML[0].tolist() == plan.models[0].dispatch_s_L.tolist()
    plain = make_plan(cluster(1e6, 1e6, 1e6, 1e6, startup_s=1e-5), [source], PlanOptions(order=order))
    if order == "all-at-once":
        assert (plan.models[0].dispatch_s_L > plain.models[0].dispatch_s_L).all()
