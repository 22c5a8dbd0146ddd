"""Micro-batches of one model in real runs: the plain model's answers, traces of their own, and weights that are held once."""

from dataclasses import replace

import numpy as np
import pytest

import aurora
from aurora.errors import BadInput
from aurora.planner.plan import make_plan
from aurora.profiler.profile_model import profile_model
from aurora.runtime import serving_rank
from aurora.simulator.interpreter import simulate_plan
from aurora.types import Hierarchy, ProfileOptions, RunOptions
from tests.conftest import cluster
from tests.models.architectures import build
from tests.runtime.test_run import answered, hierarchical, moved, plan_for, prompts_for, with_replicas


def own_buffers(tree):
    """Those of the model, without the maps that say which rank holds which expert."""
    return [buffer for name, buffer in tree.named_buffers() if "expert_map" not in name]


def cut(plan, parts, time_slice="exchange"):
    return replace(plan, options=replace(plan.options, micro_batches=parts, time_slice=time_slice))


@pytest.mark.parametrize(
    ("parts", "time_slice", "ranks", "transport", "order"),
    [
        (2, "layer", 4, "gloo", "plan"),
        pytest.param(3, "exchange", 2, "shaped", "plan", marks=pytest.mark.full),
        pytest.param(4, "layer", 2, "memory", "auto", marks=pytest.mark.full),
    ],
)
def test_micro_batches_give_the_plain_models_output(mixtral, parts, time_slice, ranks, transport, order):
    """Prompts of quite different lengths, a round of batches and a rest."""
    plan, prompts = cut(plan_for([mixtral], ranks), parts, time_slice), prompts_for(mixtral, 4 * ranks + 2)
    result = answered(plan, [mixtral], [prompts], transport=transport, order=order, batch=4)
    assert result.trace.names_M == tuple(f"mixtral-topics/{part}" for part in range(parts))
    assert set(result.trace.model_X.tolist()) == set(range(parts))
    assert len(result.orders_M) == (parts if order == "auto" else 0)


@pytest.mark.full
def test_replicas_and_all_to_alls_over_servers(mixtral):
    plan = hierarchical(with_replicas(plan_for([mixtral], 4)), Hierarchy(np.array([1, 0, 1, 0]), 2))
    answered(cut(plan, 2, "layer"), [mixtral], [prompts_for(mixtral, 9)], transport="memory")


@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss"])
def test_other_architectures(name, tmp_path):
    folder = build(name, tmp_path / name)
    answered(cut(plan_for([folder], 2), 2), [folder], [prompts_for(folder, 9)], transport="memory")


@pytest.mark.parametrize("interleave", ["off", "processes"])
def test_micro_batches_one_after_the_other_and_beside_other_processes(mixtral, interleave, monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    colocate = {"colocate": "parts"} if interleave == "processes" else {}
    prompts = prompts_for(mixtral, 8)
    plan = cut(plan_for([mixtral], 2), 2, "layer")
    answered(plan, [mixtral], [prompts], transport="memory", interleave=interleave, **colocate)


def test_streams_without_requests_leave_the_others_alone(mixtral):
    plan = cut(plan_for([mixtral], 2), 3)
    result = answered(plan, [mixtral], [prompts_for(mixtral, 1)], transport="memory")
    assert set(result.trace.model_X.tolist()) == {0}


def test_streams_decode_their_part_of_the_ranks_batch_beside_each_other(mixtral):
    plan = cut(plan_for([mixtral], 2), 2)
    result = answered(plan, [mixtral], [prompts_for(mixtral, 20)], transport="memory", batch=5)
    for stream, (batch, requests) in enumerate(((3, 6), (2, 4))):  # of ten requests on each rank
        steps = result.trace.step_X[result.trace.model_X == stream]
        assert steps.max() + 1 <= -(-requests // batch) * 4


def test_ranks_hold_weights_once_however_many_micro_batches_there_are(mixtral, monkeypatch):
    """Memory of the tensors of all workers' modules, by address, on two ranks that are threads."""
    made, workers_of = [], serving_rank._workers
    monkeypatch.setattr(serving_rank, "_workers", lambda *given: made.append(workers_of(*given)) or made[-1])
    plan, prompts = plan_for([mixtral], 2), [prompts_for(mixtral, 8)]
    held = {}
    for parts in (1, 4):
        made.clear()
        answered(cut(plan, parts) if parts > 1 else plan, [mixtral], prompts, transport="memory", batch=4)
        assert [len(workers) for workers in made] == [parts] * 2
        trees = [worker._model.model for workers in made for worker in workers]
        tensors = [tensor for tree in trees for tensor in (*tree.parameters(), *own_buffers(tree))]
        held[parts] = sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())
    assert held[4] == held[1]


@pytest.mark.full
def test_a_simulation_of_a_runs_micro_batches_has_its_transfers(mixtral, text):
    """The run's routing by micro-batch, which the simulator takes as it is: the bytes of every step, layer and phase."""
    profile = profile_model(mixtral, [text], ProfileOptions(sources=2, prompt_tokens=16, limit=8))
    plan = cut(make_plan(cluster(50e6, 50e6), [profile]), 2, "layer")
    options = RunOptions(max_new_tokens=3, batch=4, timeout_s=120, transport="memory", predictable=True)
    result = aurora.run(plan, [mixtral], [prompts_for(mixtral, 9)], options)
    simulated = simulate_plan(plan, result.conditions.traffic([profile]))
    assert simulated.names_M == result.trace.names_M
    expected = moved(result.trace, "model step layer phase")
    assert {model for model, *_ in +expected} == {0, 1}
    assert +moved(simulated, "model step layer phase") == +expected


def test_runs_that_cannot_have_micro_batches(mixtral, qwen):
    plan, prompts = cut(plan_for([mixtral], 2), 3), [[[1], [2], [3]]]
    for options, sentence in (
        (RunOptions(batch=2), "`batch`: expected a prompt for each of 3 micro-batches at least, found 2"),
        (RunOptions(predictable=True), "`compare`: expected 3 prompts on a rank, one for each micro-batch, found 2"),
    ):
        with pytest.raises(BadInput, match=sentence):
            aurora.run(plan, [mixtral], prompts, options)
    with pytest.raises(BadInput, match="`micro_batches`: cut the batches of a single model"):
        cut(plan_for([mixtral, qwen], 2), 2)
