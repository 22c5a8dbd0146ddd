"""Plans chosen by simulation."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aurora.errors import BadInput
from aurora.planner.choice import with_time_slice
from aurora.planner.plan import make_plan
from aurora.planner.plan import plan as plan_of
from aurora.simulator.interpreter import simulate_plan
from aurora.types import Curve, PlanOptions
from aurora.types.program import AUTO_TIME_SLICES
from tests.conftest import cluster
from tests.simulator.test_interpreter import profile
from tests.strategies import clusters, profiles


@pytest.mark.full
@settings(max_examples=10)
@given(st.integers(2, 3).flatmap(lambda n: st.tuples(clusters(n), profiles(n), profiles(n))))
def test_turns_are_those_that_are_simulated_faster(case):
    machines, *sources = case
    plans = [make_plan(machines, sources, PlanOptions(time_slice=time_slice)) for time_slice in AUTO_TIME_SLICES]
    chosen = with_time_slice(plans[0], sources)
    equal_s = min(simulate_plan(plan, sources).seconds for plan in plans)
    assert simulate_plan(chosen, sources).seconds == equal_s


def test_turns_on_one_gpu():
    sources = [profile([[[[4, 4]]]], name=name) for name in "ab"]
    assert with_time_slice(make_plan(cluster(1.0), sources), sources).options.time_slice == "exchange"


def test_a_single_model_alone_has_micro_batches():
    sources = [profile([[[[0, 4], [4, 0]]]], name=name) for name in "ab"]
    pair = make_plan(cluster(1.0, 1.0), sources)
    for refused in (
        lambda: pair.with_micro_batches(2),
        lambda: make_plan(cluster(1.0, 1.0), sources, PlanOptions(micro_batches=2)),
    ):
        with pytest.raises(BadInput, match="`micro_batches`: cut the batches of a single model, expected 1, found 2 models"):
            refused()
    for number, found in ((0, "more than zero, found 0"), (5, "at most 4, found 5")):
        with pytest.raises(BadInput, match=f"`micro_batches`: expected {found}"):
            PlanOptions(micro_batches=number)


def test_micro_batches_take_the_faster_time_slice():
    """Experts take about as long as the all-to-alls, so that either slice overlaps them."""
    line = Curve(np.array([0.0, 1.0]), np.array([0.0, 1.0]))
    plain = profile([[[[20, 20], [20, 20]]] * 3])
    shared = replace(plain, curves={"reference": {**plain.curves["reference"], "expert": line}})
    plan, chosen = (plan_of(cluster(1.0, 1.0), shared, PlanOptions(micro_batches=parts)) for parts in (1, 2))
    by_slice_s = [
        simulate_plan(replace(chosen, options=replace(chosen.options, time_slice=time_slice)), [shared]).seconds
        for time_slice in AUTO_TIME_SLICES
    ]
    assert simulate_plan(chosen, [shared]).seconds == min(by_slice_s) < simulate_plan(plan, [shared]).seconds
    assert chosen.options.micro_batches == 2
