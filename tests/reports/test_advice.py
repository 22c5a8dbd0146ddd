"""What to do next follows from figures."""

from dataclasses import replace

import numpy as np

from aurora.planner.make_plan import make_plan
from aurora.reports.advice import advice
from aurora.reports.inputs import ReportInputs
from aurora.reports.numbers import ReportNumbers
from aurora.types import Profile
from tests.conftest import cluster
from tests.reports.conftest import profile


def told(inputs, word):
    return [sentence for sentence in advice(ReportNumbers(inputs)) if word in sentence]


def test_a_hot_expert_is_to_be_replicated():
    tokens_SE = np.full((4, 4), 10)
    tokens_SE[:, 2] = 200
    hot = Profile("m", "", tokens_SE[None, None], 1, 100, 100, 10, 10, profile().curves)
    plan = make_plan(cluster(*[1e6] * 4), [hot])
    (sentence,) = told(ReportInputs(plan, (), (hot,)), "Replicate expert 2")
    gpu = next(g for g, held in enumerate(plan.models[0].placement.slots_LG[0]) if 2 in held)
    assert f"The port of GPU {gpu} is the bottleneck of m, layer 0" in sentence
    assert "--slots-per-gpu 2" in sentence


def test_prediction_drift_and_network(alone, together):
    (sentence,) = told(alone, "were predicted")
    assert "25.0%" in sentence
    near = tuple(
        (name, replace(trace, kind="measured" if name == "b.npz" else "predicted"))
        for name, trace in (alone.traces[0], ("b.npz", alone.traces[0][1]))
    )
    assert not told(replace(alone, traces=near), "were predicted")
    assert any("Replan one for its later traffic" in sentence for sentence in told(together, "Replan"))
    assert not any("Replan two" in sentence for sentence in told(together, "Replan"))
    assert told(alone, "second model")
    assert told(together, "Faster ports")


def test_something_is_always_said(alone):
    assert advice(ReportNumbers(ReportInputs(alone.plan)))
