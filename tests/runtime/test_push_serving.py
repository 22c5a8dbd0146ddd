"""Runs over ordered push on CPUs, in Triton's interpreter, against the plain model; and what such runs refuse."""

import re
from types import SimpleNamespace

import numpy as np
import pytest

import aurora
from aurora.errors import BadInput
from aurora.io import shipped
from aurora.runtime.run import check_run, verify
from aurora.types import Hierarchy, RunOptions

pytest.importorskip("triton", reason="the kernels' interpreter needs triton")

MIXTRAL = shipped("models/mixtral-topics")


@pytest.fixture(scope="module")
def plan():
    traffic = aurora.synthetic_profile("zipf:1", MIXTRAL / "config.json", aurora.SyntheticOptions(sources=2))
    gpus = tuple(aurora.Gpu(f"gpu-{rank}", "cpu", 0, 1e9, 1e9, 10**9) for rank in range(2))
    return aurora.plan(aurora.Cluster("mine", gpus), traffic)


@pytest.mark.full
def test_ranks_that_push_answer_as_the_plain_model_does(plan):
    """Three prompts of different lengths: padding, a rank that ends first and then takes part without tokens."""
    prompts = [[[76, 107, 104, 35], [5, 9], [80, 11, 30]]]
    options = RunOptions(max_new_tokens=2, transport="push", keep_logits=True, timeout_s=200)
    result = aurora.run(plan, [MIXTRAL], prompts, options)
    assert result.transport == "push"
    assert verify(result, [MIXTRAL], prompts, options) == []


@pytest.mark.parametrize(
    ("wanted", "name"),
    [
        ({"predictable": True}, "predictable"),
        ({"order": "auto"}, "order"),
        ({"deduplicate": False}, "deduplicate"),
        ({"interleave": "processes", "colocate": "mine"}, "interleave"),
    ],
)
def test_what_needs_sizes_on_the_host_is_refused(wanted, name):
    says = f"`transport` push: carries one placement in its planned order, found `{name}`"
    with pytest.raises(BadInput, match=re.escape(says)):
        RunOptions(transport="push", **wanted)


@pytest.mark.parametrize(
    ("models", "micro_batches"),
    [
        ([SimpleNamespace(hierarchy=None)] * 2, 1),
        ([SimpleNamespace(hierarchy=Hierarchy(np.arange(2)))], 1),
        ([SimpleNamespace(hierarchy=None)], 2),
    ],
)
def test_plans_for_several_models_or_servers_are_refused(models, micro_batches, monkeypatch):
    monkeypatch.setattr("aurora.runtime.run.check_plan", lambda plan: None)
    plan = SimpleNamespace(
        models=models, options=SimpleNamespace(micro_batches=micro_batches), cluster=SimpleNamespace(servers=None)
    )
    monkeypatch.setattr("aurora.runtime.run._check_micro_batches", lambda *_: None)
    with pytest.raises(BadInput, match="expected a plan of one model, without micro-batches, whose all-to-alls are flat"):
        check_run(plan, [MIXTRAL] * len(models), [[[1, 2]]] * len(models), RunOptions(transport="push"))
