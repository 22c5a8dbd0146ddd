"""vLLM's second model runner (V2, its default on GPUs) on the CPU, with the plugin: `make test-vllm` runs it.

V2 needs Triton kernels. vLLM's CPU build has no compiler for them, so Triton's interpreter runs vLLM's own kernels: the processes
have TRITON_INTERPRET=1, and V2_BEFORE hands Triton to the modules of V2, which are imported after it.
"""

import numpy as np
import pytest

from aurora.io import save
from aurora.profiler.merge_records import load_records
from tests.integrations.test_vllm import (  # noqa: F401
    KEEP_EPLB,
    KEEP_STATE,
    NEW,
    PROMPTS,
    SAVE_HELD,
    SAVE_MAP,
    SWITCHING,
    Ranks,
    alone,
    check_followed,
    check_planned,
    check_same,
    checkpoints,
    counted,
    eplb,
    nothing_goes_on,
    pytestmark,
    scattered,
    switching,
)

slow = pytest.mark.slow

V2_BEFORE = """
import sys
import triton, triton.language as tl
import vllm.triton_utils as utils, vllm.config.vllm as config
assert not [name for name in sys.modules if name.startswith("vllm.v1.worker.gpu.")], "V2 has been imported without Triton"
utils.triton, utils.tl, utils.HAS_TRITON, config.HAS_TRITON = triton, tl, True, True
"""


WARM_UP = """
from vllm.v1.worker.cpu_worker import CPUWorker
warm_up = CPUWorker.compile_or_warm_up_model
def warm_up_as_on_gpus(self):
    from vllm.v1.worker.gpu.warmup import run_mixed_prefill_decode_warmup
    assert run_mixed_prefill_decode_warmup(self.model_runner, self.execute_model, self.sample_tokens, 16)
    return warm_up(self)
CPUWorker.compile_or_warm_up_model = warm_up_as_on_gpus
"""  # passes of requests that nobody has sent


class V2Ranks(Ranks):
    """Processes of vLLM whose workers have the model runner V2."""

    def __init__(self, folder, ranks=1, **job):
        job["before"] = V2_BEFORE + job.get("before", "")
        job["environ"] = {"VLLM_USE_V2_MODEL_RUNNER": "1", **job.get("environ", {})}
        super().__init__(folder, ranks, **job)

    def answers(self):
        answers = super().answers()
        assert "Using V2 Model Runner" in self.said()[0]
        return answers


@pytest.mark.cell("V2", "record", "order")
def test_a_record_and_orders_made_for_every_batch(tmp_path, checkpoints, alone):  # noqa: F811
    """Answers are as V1's of one rank; the record is count for count what transformers counts, warm-up left out."""
    checkpoint = checkpoints("qwen3moe")
    settings = {"aurora": {"order": "online", "record": str(tmp_path / "seen"), "required": True}}
    run = V2Ranks(
        tmp_path / "run", 2, model=str(checkpoint), dp=2, additional_config=settings, commands=[["write"]], before=WARM_UP
    )
    check_same(run.answers(), alone("qwen3moe"))
    assert not run.warnings()
    _, load_LE = counted(checkpoint, PROMPTS, NEW)
    np.testing.assert_array_equal(load_records(tmp_path / "seen").tokens_TLSE.sum(axis=(0, 2)), load_LE)


@pytest.mark.cell("V2", "place by maps")
def test_placed_by_expert_maps_in_the_plans_order(tmp_path, checkpoints, alone):  # noqa: F811
    """Unequal counts, a rank without experts in a layer, prompts in chunks, and an idle rank."""
    checkpoint = checkpoints("qwen3moe")
    save(scattered(checkpoint, 2), tmp_path / "plan.json")
    settings = {"aurora": {"plan": str(tmp_path / "plan.json"), "order": "plan", "required": True}}
    run = V2Ranks(
        tmp_path / "run", 2, model=str(checkpoint), dp=2, additional_config=settings, max_num_batched_tokens=32, idle=[1]
    )
    check_same(run.answers(), alone("qwen3moe"))
    assert not run.warnings()


@pytest.mark.cell("V2", "EPLB")
def test_eplb_serves_by_the_plan_and_records(tmp_path, checkpoints, alone):  # noqa: F811
    """With replicas; rearrangements move nothing."""
    checkpoint = checkpoints("qwen3moe")
    plan = scattered(checkpoint, 2, most=5, replicas=2)
    save(plan, tmp_path / "plan.json")
    settings = {"plan": str(tmp_path / "plan.json"), "order": "plan", "record": str(tmp_path / "seen"), "required": True}
    run = V2Ranks(
        tmp_path / "run", 2, model=str(checkpoint), dp=2, additional_config={"aurora": settings}, repeat=2, commands=[["write"]],
        llm=eplb(0), before=KEEP_STATE, after=SAVE_MAP, environ={"MAP": str(tmp_path / "map")},
    )  # fmt: skip
    check_same(run.answers(), alone("qwen3moe"))
    assert not run.warnings()
    _, load_LE = counted(checkpoint, PROMPTS, NEW)
    np.testing.assert_array_equal(load_records(tmp_path / "seen").tokens_TLSE.sum(axis=(0, 2)), 2 * load_LE)
    assert run.said()[0].count("Rearranging experts") >= 3
    maps = [np.load(tmp_path / f"map{rank}.npy") for rank in range(2)]
    np.testing.assert_array_equal(*maps)
    check_planned(maps[0], plan)


@pytest.mark.cell("V2", "adapt")
@pytest.mark.parametrize("in_background", [False, pytest.param(True, marks=slow)], ids=["serving-waits", "in-background"])
def test_experts_follow_traffic_that_switches(in_background, tmp_path, checkpoints, alone):  # noqa: F811
    """Through EPLB on two ranks with a replica each."""
    checkpoint = checkpoints("qwen3moe")
    settings = {"adapt": True, "loss": 0.0, "required": True}
    job = switching(checkpoint, [[[0, 1, 2, 3, 4], [5, 6, 7, 0, 1]]] * 3)
    run = V2Ranks(
        tmp_path / "run", 2, model=str(checkpoint), dp=2, **job, additional_config={"aurora": settings},
        llm=eplb(2, use_async=in_background), before=KEEP_EPLB, after=SAVE_HELD, environ={"MAP": str(tmp_path / "map")},
    )  # fmt: skip
    check_same(run.answers(), alone("qwen3moe", SWITCHING))
    assert not run.warnings()
    check_followed(run, job, tmp_path)
