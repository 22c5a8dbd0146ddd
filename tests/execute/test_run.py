"""Distributed runs against the plain model in one process: the same tokens, the same logits."""

from dataclasses import replace

import numpy as np
import pytest

import aurora
from aurora.errors import BadInput, RankFailed
from aurora.execute.run import verify
from aurora.models.loading import load_model
from aurora.plan.planner import make_plan
from aurora.types import TRACE_PHASES, Curve, PlanOptions, Profile, RunOptions
from tests.conftest import cluster
from tests.models.architectures import CONFIGS, build

WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "while",
    "import",
    "os",
    "prints",
    "every",
    "class",
    "it",
    "has",
    "seen",
]
FLAT = {phase: Curve(np.array([1.0]), np.array([1e-3])) for phase in ("gate", "expert", "aggregate")}


def plan_for(paths, ranks, options=PlanOptions("random", "random", "random", "openshop", seed=2), **gpu):
    profiles = []
    for path in paths:
        model = load_model(path)
        tokens = np.random.default_rng(0).integers(0, 50, (1, len(model.layers), ranks, model.experts)) * model.top_k
        profiles.append(Profile(model.name, model.fingerprint(), tokens, model.top_k, 1, 1, model.expert_bytes,
                                model.other_bytes, {"cpu": FLAT}))  # fmt: skip
    return make_plan(cluster(*[50e6] * ranks, **gpu), profiles, options)


def prompts_for(path, count, seed=0):
    """Prompts of quite different lengths."""
    tokenizer, rng = load_model(path).tokenizer, np.random.default_rng(seed)
    texts = [" ".join(rng.choice(WORDS, rng.integers(1, 9))) for _ in range(count)]
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


def differences(plan, paths, prompts, **options):
    chosen = RunOptions(max_new_tokens=4, batch=3, timeout_s=120, keep_logits=True)
    chosen = replace(chosen, **options)
    result = aurora.run(plan, paths, prompts, chosen)
    for answers, requests in zip(result.answers_M, prompts, strict=True):
        assert sorted(answers.tokens) == sorted(answers.logits) == list(range(len(requests)))
    return result, verify(result, paths, prompts, chosen)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_architecture_gives_the_plain_models_output(name, tmp_path):
    folder = build(name, tmp_path / name)
    _, found = differences(plan_for([folder], 2), [folder], [prompts_for(folder, 5)])
    assert found == []


@pytest.mark.parametrize("transport", ["gloo", "shaped"])
@pytest.mark.parametrize("order", ["openshop", "random", "all-at-once"])
def test_two_shipped_models_on_four_ranks(mixtral, qwen, order, transport):
    paths = [mixtral, qwen]
    plan = plan_for(paths, 4, PlanOptions("random", "random", "random", order, seed=3))
    prompts = [prompts_for(mixtral, 9), prompts_for(qwen, 6, seed=1)]
    result, found = differences(plan, paths, prompts, transport=transport)
    assert found == []
    assert result.transport == transport
    trace = result.trace
    assert (trace.kind, trace.names_M, trace.ranks) == ("measured", ("mixtral-topics", "qwen3moe-stdlib"), 4)
    for phase in TRACE_PHASES:
        assert (trace.phase_X == TRACE_PHASES.index(phase)).any()
    # What is sent is received, and what is dispatched comes back.
    for model in range(2):
        rows = trace.model_X == model
        sent, received = (trace.bytes_X[rows & (trace.sent_X == s) & (trace.peer_X >= 0)].sum() for s in (True, False))
        assert sent == received > 0
        there, back = (trace.bytes_X[rows & (trace.phase_X == TRACE_PHASES.index(p))].sum() for p in ("dispatch", "combine"))
        assert there == back


def test_ranks_without_requests_keep_step(mixtral):
    """Two requests on four ranks, one at a time: ranks 2 and 3 never have any, rank 1 is idle at the end."""
    prompts = prompts_for(mixtral, 5)
    result, found = differences(plan_for([mixtral], 4), [mixtral], [prompts[:2]], batch=1)
    assert found == []
    busy = result.trace.rank_X[result.trace.phase_X == TRACE_PHASES.index("expert")]
    assert set(busy.tolist()) == {0, 1, 2, 3}
    _, found = differences(plan_for([mixtral], 4), [mixtral], [prompts], batch=1)
    assert found == []


def test_one_rank_alone(mixtral):
    result, found = differences(plan_for([mixtral], 1), [mixtral], [prompts_for(mixtral, 2)])
    assert found == []
    assert not (result.trace.peer_X >= 0).any()


def test_one_model_may_finish_long_before_the_other(mixtral, qwen):
    paths = [mixtral, qwen]
    _, found = differences(plan_for(paths, 2), paths, [prompts_for(mixtral, 1), prompts_for(qwen, 12)], batch=2)
    assert found == []


def test_verify_sees_a_wrong_token_and_a_wrong_logit(mixtral):
    options = RunOptions(max_new_tokens=2, keep_logits=True, timeout_s=60)
    prompts = [prompts_for(mixtral, 2)]
    result = aurora.run(plan_for([mixtral], 2), [mixtral], prompts, options)
    assert verify(result, [mixtral], prompts, options) == []
    result.answers_M[0].logits[0][0, 0] += 2e-4
    result.answers_M[0].tokens[1][0] += 1
    found = verify(result, [mixtral], prompts, options)
    assert len(found) == 2
    assert "prompt 0: logits 2.0" in found[0]
    assert "prompt 1: tokens" in found[1]


def test_experts_live_only_where_the_plan_says(mixtral):
    """A rank's share of the expert weights, counted after the layers are replaced."""
    import torch

    from aurora.execute.experts import DistributedExperts
    from aurora.execute.session import Session
    from aurora.execute.turnstile import Turnstile
    from aurora.types import Recorder

    class Here:
        rank, ranks = 1, 2

    layer = load_model(mixtral).layers[0]
    before = {name: p.clone() for name, p in layer.experts.named_parameters()}
    session = Session(0, Here(), Turnstile(1), Recorder("measured", ("m",), 2), 0.0)
    held = (4, 6)
    spread = DistributedExperts(layer.experts, ((0, 1, 2, 3, 5, 7), held), (), 0, session)
    for name, parameter in spread.local.named_parameters():
        assert torch.equal(parameter, before[name][list(held)])


def test_plans_of_other_models_are_refused_before_anything_starts(mixtral, qwen):
    prompts = [prompts_for(mixtral, 1)]
    with pytest.raises(
        BadInput, match=r"model 'qwen3moe-stdlib': the plan was made for 'mixtral-topics'.*other router weights"
    ):
        aurora.run(plan_for([mixtral], 2), [qwen], prompts)
    with pytest.raises(BadInput, match="the plan has 1 models, found 2"):
        aurora.run(plan_for([mixtral], 2), [mixtral, qwen], prompts * 2)
    with pytest.raises(BadInput, match="at least one prompt"):
        aurora.run(plan_for([mixtral], 2), [mixtral], [[]])
    with pytest.raises(BadInput, match="--transport nccl: expected a CUDA device for each of 2 ranks"):
        aurora.run(plan_for([mixtral], 2), [mixtral], prompts, RunOptions(transport="nccl"))


def test_a_run_that_hangs_is_ended(mixtral):
    """Ports of a byte a second: nothing arrives in time."""
    plan = plan_for([mixtral], 2)
    slow = replace(plan.cluster, gpus=tuple(replace(g, out_Bps=10.0, in_Bps=10.0) for g in plan.cluster.gpus))
    crawling = make_plan(slow, [_profile_of(mixtral, 2)])
    with pytest.raises(RankFailed, match="no answer within 4 s"):
        aurora.run(crawling, [mixtral], [prompts_for(mixtral, 4)], RunOptions(transport="shaped", timeout_s=4.0))


def _profile_of(path, ranks):
    model = load_model(path)
    tokens = np.ones((1, len(model.layers), ranks, model.experts), dtype=int) * model.top_k
    return Profile(model.name, model.fingerprint(), tokens, model.top_k, 1, 1, 1, 1, {"cpu": FLAT})
