"""What a report refuses to be made from."""

from dataclasses import replace

import numpy as np
import pytest

from aurora.errors import BadInput
from aurora.reports.html import page
from aurora.reports.inputs import ReportInputs, named_traces
from aurora.reports.numbers import ReportNumbers
from aurora.reports.perfetto import perfetto
from aurora.simulator.interpreter import simulate_plan
from aurora.types import TraceRecorder
from tests.reports.conftest import measured, profile


def test_traces_of_other_plans(alone):
    (_, trace), _ = alone.traces
    plan = alone.plan
    beyond = replace(trace, layer_X=trace.layer_X + 1)
    strange = replace(trace, phase_X=trace.phase_X + 3)
    for other, found in (
        (replace(trace, names_M=("two",)), "expected one on 4 ranks, found two on 4"),
        (replace(trace, names_M=("two", "three")), "expected one on 4 ranks, found two and three on 4"),
        (replace(trace, ranks=5), "expected one on 4 ranks, found one on 5"),
        (beyond, "expected 2 MoE layers of 'one', found layer 2"),
        (strange, "expected phase 0 to 6, found 8"),
        (replace(trace, peer_X=trace.peer_X + 9), "expected peer 0 to 3"),
    ):
        with pytest.raises(BadInput, match=f"x.npz: a trace of another plan: .*{found}"):
            ReportInputs(plan, (("x.npz", other),))
    with pytest.raises(BadInput, match=r"x\.npz: expected events, found an empty trace"):
        ReportInputs(plan, (("x.npz", TraceRecorder("measured", ("one",), 4).trace()),))


def test_profiles_of_other_plans(alone):
    for other, found in ((profile(sources=3), "come from 3 source ranks"), (profile(layers=3), "found 3 of 8")):
        with pytest.raises(BadInput, match=found):
            ReportInputs(alone.plan, (), (other,))
    with pytest.raises(BadInput, match="expected 1 profiles as in the plan, found 2"):
        ReportInputs(alone.plan, (), (profile(), profile()))


def test_names_tell_traces_and_models_apart(alone):
    (_, a), (_, b) = alone.traces
    assert list(named_traces(["x/a.npz", "y/b.npz"], [a, b])) == ["a.npz", "b.npz"]
    assert list(named_traces(["x/a.npz", "y/a.npz"], [a, b])) == ["x/a.npz", "y/a.npz"]
    assert list(named_traces(["x/a.npz", "x/a.npz"], [a, a])) == ["x/a.npz", "x/a.npz (1)"]
    same = replace(alone.plan, models=alone.plan.models * 2)
    assert ReportInputs(same).models == ("one (0)", "one (1)")
    assert np.array_equal(ReportInputs(same).gpus, ["0", "1", "2", "3"])


def test_traces_of_micro_batches(alone):
    """Beside a trace of whole batches: each has its own names, and tokens are those of all micro-batches."""
    plan = alone.plan.with_micro_batches(3)
    trace = simulate_plan(plan, alone.profiles)
    inputs = ReportInputs(
        plan, (("a.npz", trace), ("b.npz", measured(trace)), ("whole.npz", alone.traces[0][1])), alone.profiles
    )
    assert inputs.traced == inputs.names_in(trace) == ("one/0", "one/1", "one/2")
    assert inputs.names_in(alone.traces[0][1]) == inputs.models == ("one",)
    found = ReportNumbers(inputs)
    assert found.comparison.error == pytest.approx(1 / 1.25 - 1)
    assert found.serving.tokens == pytest.approx(ReportNumbers(alone).serving.tokens)
    assert "one/2" in page(inputs)
    assert b"one/2" in perfetto(inputs)
    with pytest.raises(BadInput, match="a trace of another plan: expected one and two on 4 ranks, found one/0 and one/1"):
        ReportInputs(replace(alone.plan, models=(*alone.plan.models, replace(alone.plan.models[0], model="two"))),
                     (("a", simulate_plan(alone.plan.with_micro_batches(2), alone.profiles)),))  # fmt: skip
