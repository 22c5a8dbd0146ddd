"""Every MoE causal LM of transformers: profiled, planned and run like the plain model, or refused with the reason."""

import json
from dataclasses import replace

import pytest
import torch
from aurora_vllm.served_plan import read_model

import aurora
from aurora.errors import BadInput
from aurora.models.decoding import NOT_PADDED
from aurora.models.loading import NOT_PLACED, load_model
from aurora.planner.plan import make_plan
from aurora.profiler import profile_model as profiling
from aurora.runtime.run import verify
from aurora.types import PHASES, ComputeCurves, Curve, PlanOptions, ProfileOptions, RunOptions
from tests.conftest import cluster
from tests.models.architectures import MOE_TYPES, build, load_plain, registered_moe_types

QUICK = ("deepseek_v3", "gpt_oss", "mixtral", "qwen3_moe")


@pytest.mark.full
def test_the_list_is_that_of_transformers():
    assert registered_moe_types() == MOE_TYPES
    assert set(NOT_PLACED) <= set(MOE_TYPES)


@pytest.mark.parametrize("name", NOT_PLACED)
def test_a_model_that_cannot_be_placed_is_refused_with_the_reason(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": name}))
    with pytest.raises(BadInput, match=f"experts of {name} cannot be placed: {NOT_PLACED[name]}"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.full) for name in MOE_TYPES if name not in NOT_PLACED],
)
def test_every_architecture_gives_the_plain_models_output(name, tmp_path, text, monkeypatch):
    """Two ranks in one process; prompts of different lengths, one a batch where padding changes the plain model's answers."""
    curve = Curve([1.0], [1e-3])
    curves = ComputeCurves("m", "", 1, 1, 1, {"cpu": dict.fromkeys(PHASES, curve)})
    monkeypatch.setattr(profiling, "measure_curves", lambda *_, **__: curves)
    folder = build(name, tmp_path / name)
    profile = profiling.profile_model(folder, [text], ProfileOptions(sources=2, prompt_tokens=12, batch=2, limit=4))
    assert int(profile.tokens_TLSE[0, :, 0].sum(axis=1).min()) == 2 * 12 * profile.top_k  # no choice is lost
    checkpoint, experts = read_model(str(folder))
    assert experts == profile.experts
    assert checkpoint.fingerprint == profile.fingerprint  # as the vLLM plugin compares them
    assert len(checkpoint.layers) == profile.layers
    plan = make_plan(cluster(50e6, 50e6), [profile], PlanOptions("random", "random", "random", "openshop", seed=2))
    prompts = [torch.randint(3, 259, (length,)).tolist() for length in (3, 11, 7, 5, 9)]
    options = RunOptions(max_new_tokens=3, batch=2, timeout_s=120, keep_logits=True, transport="memory")
    if name in NOT_PADDED:
        with pytest.raises(BadInput, match="padding changes its answers"):
            aurora.run(plan, [folder], [prompts], options)
        options = replace(options, batch=1)
    with torch.no_grad():  # as it is loaded here, and by transformers
        logits, expected = (
            each(input_ids=torch.tensor(prompts[1:2])).logits for each in (load_model(folder).model, load_plain(folder).eval())
        )
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    result = aurora.run(plan, [folder], [prompts], options)
    assert len(result.answers_M[0].logits) == len(prompts)
    assert verify(result, [folder], [prompts], options) == []
