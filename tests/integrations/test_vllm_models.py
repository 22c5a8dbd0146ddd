"""Models with experts, or files, of another kind than Qwen3-MoE's, in a real vLLM on the CPU: `make test-vllm` runs it."""

from types import SimpleNamespace

import numpy as np
import pytest
from aurora_vllm.served_plan import read_model

from aurora.io import save
from aurora.profiler.merge_records import load_records
from tests.integrations import test_vllm
from tests.integrations.test_vllm import (  # noqa: F401
    KEEP_STATE,
    NEW,
    PROMPTS,
    SAVE_MAP,
    Ranks,
    alone,
    check_planned,
    check_same,
    checkpoints,
    counted,
    eplb,
    nothing_goes_on,
    pytestmark,
    scattered,
)

slow = pytest.mark.slow


@pytest.fixture
def llama4(checkpoints, monkeypatch):  # noqa: F811
    """The checkpoint of a Llama 4, which `aurora profile` cannot count: plans are made for made-up loads."""
    checkpoint = checkpoints("llama4")
    identity, experts = read_model(str(checkpoint))
    moe = SimpleNamespace(top_k=1, row_bytes=256, fingerprint=lambda: identity.fingerprint)
    monkeypatch.setattr(test_vllm, "counted", lambda *_args: (moe, np.ones((len(identity.layers), experts), dtype=np.int64)))
    return checkpoint


def test_a_bias_of_the_router_is_no_expert_of_this_rank(tmp_path, checkpoints, alone):  # noqa: F811
    """GLM-4.5 has one beside its experts, as DeepSeek-V3 has: records of ranks with unequal counts agree on an expert's bytes."""
    name, checkpoint = "glm4moe", checkpoints("glm4moe")
    save(scattered(checkpoint, 2), tmp_path / "plan.json")
    settings = {"plan": str(tmp_path / "plan.json"), "order": "plan", "record": str(tmp_path / "seen"), "required": True}
    run = Ranks(tmp_path / "run", 2, model=str(checkpoint), dp=2, additional_config={"aurora": settings}, commands=[["write"]])
    check_same(run.answers(), alone(name))
    assert not run.warnings()
    _, load_LE = counted(checkpoint, PROMPTS, NEW)
    np.testing.assert_array_equal(load_records(tmp_path / "seen").tokens_TLSE.sum(axis=(0, 2)), load_LE)


def test_experts_of_gpt_oss_are_recorded(tmp_path, checkpoints, alone):  # noqa: F811
    """They are of a class of the model's own."""
    checkpoint = checkpoints("gptoss")
    settings = {"record": str(tmp_path / "seen"), "required": True}
    run = Ranks(tmp_path / "run", 2, model=str(checkpoint), dp=2, additional_config={"aurora": settings}, commands=[["write"]])
    check_same(run.answers(), alone("gptoss"))
    assert not run.warnings()
    _, load_LE = counted(checkpoint, PROMPTS, NEW)
    np.testing.assert_array_equal(load_records(tmp_path / "seen").tokens_TLSE.sum(axis=(0, 2)), load_LE)


@slow
def test_fused_weights_are_placed_by_expert_maps(tmp_path, llama4, alone):  # noqa: F811
    save(scattered(llama4, 2, most=5), tmp_path / "plan.json")  # vLLM's loader needs an expert of each layer on each rank
    settings = {"aurora": {"plan": str(tmp_path / "plan.json"), "order": "plan", "required": True}}
    run = Ranks(tmp_path / "run", 2, model=str(llama4), dp=2, additional_config=settings)
    check_same(run.answers(), alone("llama4"))
    assert not run.warnings()


def test_fused_weights_move_to_the_plan_at_the_first_rearrangement(tmp_path, llama4, alone):  # noqa: F811
    """Through EPLB, which loads Llama 4's experts in its own places: answers stay while they move."""
    plan = scattered(llama4, 2, most=4)  # vLLM cannot load fused weights with redundant experts
    save(plan, tmp_path / "plan.json")
    settings = {"aurora": {"plan": str(tmp_path / "plan.json"), "order": "stock", "required": True}}
    run = Ranks(
        tmp_path / "run", 2, model=str(llama4), dp=2, additional_config=settings, repeat=2,
        llm=eplb(0), before=KEEP_STATE, after=SAVE_MAP, environ={"MAP": str(tmp_path / "map")},
    )  # fmt: skip
    check_same(run.answers(), alone("llama4"))
    assert not run.warnings()
    assert "they stay until EPLB first rearranges them, and move to the plan's places then" in run.said()[0]
    maps = [np.load(tmp_path / f"map{rank}.npy") for rank in range(2)]
    np.testing.assert_array_equal(*maps)
    check_planned(maps[0], plan)
