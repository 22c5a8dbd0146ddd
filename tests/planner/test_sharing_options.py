"""Priorities of models that share the GPUs: options, plan files and programs."""

from dataclasses import replace

import pytest

from aurora.algorithms.compile import SLICE_INTERVALS, compile_plan
from aurora.errors import BadInput
from aurora.io.plans import load_plan, save_plan
from aurora.planner.options import with_priorities
from aurora.planner.plan import make_plan
from aurora.types import PlanOptions, SlicePolicy

from ..simulator.test_interpreter import cluster, profile


@pytest.fixture
def pair():
    return [profile([[[[0, 4], [4, 0]]]], name=name) for name in "ab"]


def test_a_plan_keeps_priorities(pair, tmp_path):
    options = PlanOptions(priorities=("interactive", "batch"), preemption_s=0.004)
    plan = make_plan(cluster(1.0, 1.0), pair, options)
    save_plan(plan, tmp_path / "plan.json")
    loaded = load_plan(tmp_path / "plan.json")
    assert loaded == plan
    program = compile_plan(loaded)
    assert program.policies_M == (SlicePolicy(True), SlicePolicy(False, SLICE_INTERVALS * 0.004))
    assert program.plan_model_M == (0, 1)
    assert [program.compute_level(0, "expert"), program.compute_level(1, "gate")] == [2, 0]
    assert [program.preemptive(model) for model in (0, 1)] == [False, True]
    assert compile_plan(make_plan(cluster(1.0, 1.0), pair)).policies_M == (SlicePolicy(),) * 2


def test_other_priorities_than_the_plans(pair):
    plan = make_plan(cluster(1.0, 1.0), pair)
    assert with_priorities(plan, ()) is plan
    assert with_priorities(plan, ["batch", "interactive"]).options.priorities == ("batch", "interactive")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"priorities": ("interactive", "daily")}, "`priorities`: expected one of interactive, batch, found 'daily'"),
        ({"priorities": ("interactive",)}, "`priorities`: expected one for each of 2 models, found 1"),
        ({"priorities": ("interactive", "batch"), "time_slice": "step"}, "`priorities`: .* found `time_slice` step"),
    ],
)
def test_wrong_ones_are_refused(pair, options, message):
    with pytest.raises(BadInput, match=message):
        make_plan(cluster(1.0, 1.0), pair, PlanOptions(**options))


def test_one_model_has_none(pair):
    plan = make_plan(cluster(1.0, 1.0), pair[:1])
    with pytest.raises(BadInput, match="`priorities`: is for models that share the GPUs, found one model"):
        make_plan(cluster(1.0, 1.0), pair[:1], PlanOptions(priorities=("batch",)))
    with pytest.raises(BadInput, match="`priorities`: is for models that share the GPUs, found one model"):
        with_priorities(plan, ["batch"])
    with pytest.raises(BadInput, match="`priorities`: expected one for each of 1 models, found 2"):
        replace(plan, options=replace(plan.options, priorities=("batch", "batch")))
