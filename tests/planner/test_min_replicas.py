"""Plans that keep a floor: every expert on so many GPUs and nodes, what survives, and moving to them."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aurora.algorithms.check.plans import check_plan
from aurora.errors import BadInput, BrokenPlan, InfeasiblePlan
from aurora.io import load_plan, save
from aurora.planner.evaluate import evaluate
from aurora.planner.plan import make_plan
from aurora.types import Cluster, Curve, Gpu, PlanOptions, Profile
from tests.strategies import clusters, profiles


@settings(max_examples=8, deadline=None)
@given(st.data(), st.integers(1, 2))
def test_with_a_floor_experts_are_on_as_many_nodes_and_plans_say_what_survives(data, min_replicas):
    made = data.draw(clusters(4))
    cluster = replace(made, gpus=tuple(replace(gpu, node=number // 2) for number, gpu in enumerate(made.gpus)))
    profile = data.draw(profiles(4))
    options = PlanOptions(
        min_replicas=min_replicas, slots_per_gpu=profile.experts, aim=data.draw(st.sampled_from(["sum", "worst"]))
    )
    plan = make_plan(cluster, [profile], options)
    assert (plan.options.min_replicas, plan.options.place) == (min_replicas, "aurora")
    assert plan.survival_LK.shape == (profile.layers, 1)
    for layer, held_G in enumerate(plan.models[0].placement.slots_LG):
        nodes = [set(held_G[0] + held_G[1]), set(held_G[2] + held_G[3])]
        every = set(range(profile.experts))
        assert plan.survival_LK[layer, 0] == sum(held == every for held in nodes) / 2
        for expert in every:
            assert sum(expert in held for held in held_G) >= min_replicas
            assert sum(expert in held for held in nodes) >= min_replicas
    assert evaluate(plan, [profile]).replanned.objective_s == plan.objective_s
    assert plan.bound_s <= plan.objective_s
    assert plan.assignment_bound_s is None


def test_what_a_floor_refuses(tmp_path):
    cluster = Cluster("two", tuple(Gpu(f"g{i}", "k", i, 1.0, 1.0, 10**9) for i in range(2)))
    curves = {"k": dict.fromkeys(("gate", "expert", "aggregate"), Curve([1.0], [1.0]))}
    profile = Profile("m", "", [[[[1, 2, 3]] * 2]], 1, 1, 1, 1, 1, curves)
    with pytest.raises(
        InfeasiblePlan, match="`min_replicas` 3: replicas of an expert are on different nodes, cluster 'two' has 2 nodes"
    ):
        make_plan(cluster, [profile], PlanOptions(min_replicas=3))
    for given_, message in (
        (([profile] * 2, PlanOptions(min_replicas=1)), "`min_replicas`: is for a plan of one model"),
        (
            ([profile], PlanOptions(min_replicas=1, place="swap-search")),
            "`place`: expected one of auto, aurora, mro",
        ),
        (([profile], PlanOptions(place="mro")), "`place`: expected one of"),
    ):
        with pytest.raises(BadInput, match=message):
            make_plan(cluster, *given_)
    plan = make_plan(cluster, [profile], PlanOptions(min_replicas=2))
    save(plan, tmp_path / "p.json")
    read = load_plan(tmp_path / "p.json")
    assert (read.options.min_replicas, read.survival_LK.tolist()) == (2, [[1.0]])
    one = replace(plan.options, min_replicas=1)
    for broken in ({"survival_LK": [[0.5]]}, {"survival_LK": [[1.0, 1.0]]}, {"options": one, "survival_LK": [[2.0]]}):
        with pytest.raises(BrokenPlan, match="plan: expected"):
            check_plan(replace(plan, **broken))
    alone = make_plan(cluster, [profile])
    with pytest.raises(BrokenPlan, match="an expert is on 1 GPUs, expected 2 or all"):
        check_plan(replace(alone, options=plan.options, survival_LK=[[1.0]]))
