"""Experts that compute while rows of other groups of experts travel: the plain model's answers, and the simulator's transfers."""

import pytest

import aurora
from aurora.errors import BadInput
from aurora.planner.plan import make_plan
from aurora.profiler.profile_model import profile_model
from aurora.simulator.interpreter import simulate_plan
from aurora.types import TRACE_PHASES, ProfileOptions, RunOptions
from tests.conftest import cluster
from tests.models.architectures import build
from tests.runtime.test_micro_batches import cut
from tests.runtime.test_run import answered, moved, plan_for, prompts_for, with_replicas


@pytest.mark.parametrize(("groups", "transport"), [(2, "gloo"), (2, "shaped"), (4, "memory")])
def test_overlapped_stages_give_the_plain_models_output(mixtral, groups, transport):
    """With replicas, more groups than some ranks have experts, ranks without requests, and prompts of different lengths."""
    plan = with_replicas(plan_for([mixtral], 4))
    result = answered(plan, [mixtral], [prompts_for(mixtral, 7)], transport=transport, overlap=groups)
    experts = (result.trace.phase_X == TRACE_PHASES.index("expert")) & (result.trace.rank_X == 0)
    first = experts & (result.trace.step_X == 0) & (result.trace.layer_X == 0)
    assert first.sum() == groups


@pytest.mark.parametrize("given", [{"transport": "nccl"}, {"transport": "push"}, {"order": "auto"}, {"deduplicate": True}])
def test_runs_that_cannot_overlap_are_refused(given, mixtral):
    with pytest.raises(BadInput, match="`overlap`: runs on CPUs, one model in its planned orders"):
        RunOptions(overlap=2, **given)
    with pytest.raises(BadInput, match="`overlap`: expected a plan of one model, without micro-batches"):
        aurora.run(cut(plan_for([mixtral], 2), 2), [mixtral], [[[1], [2]]], RunOptions(overlap=2))


def test_other_architectures(tmp_path):
    folder = build("deepseek_v3", tmp_path / "model")
    answered(plan_for([folder], 2), [folder], [prompts_for(folder, 5)], transport="memory", overlap=3)


def test_a_simulation_of_overlapped_stages_has_their_transfers(mixtral, text):
    """The bytes of every step, layer and phase between every two ranks, and as many transfers: the same groups on both sides."""
    profile = profile_model(mixtral, [text], ProfileOptions(sources=2, prompt_tokens=16, limit=8))
    plan = make_plan(cluster(50e6, 50e6), [profile])
    options = RunOptions(max_new_tokens=3, batch=4, timeout_s=120, transport="memory", predictable=True, overlap=3)
    result = aurora.run(plan, [mixtral], [prompts_for(mixtral, 9)], options)
    simulated = simulate_plan(plan, result.conditions.traffic([profile]), overlap=3)
    for columns in ("step layer phase rank peer", "step layer phase rank peer bytes"):
        assert +moved(simulated, columns) == +moved(result.trace, columns)
