"""Pipeline parallelism: each term by hand, what engines can start, a measured ratio, and consequences that cannot be otherwise."""

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from aurora.advisor.collectives import stage_transfers
from aurora.advisor.disaggregation import pool_rates
from aurora.advisor.engines import SERVING_ENGINES
from aurora.advisor.engines.engine import Layout, ServingWay, staged_layouts
from aurora.advisor.gpu_memory import memory_bytes
from aurora.advisor.serving_case import ServingCase
from aurora.advisor.step_time import SchedulerStep, step_seconds
from aurora.errors import BadInput
from aurora.io.clusters import load_gpus
from aurora.types import RequestLoad
from tests.advisor.test_served_ways import CONFIG, H100, ONE_SERVER
from tests.advisor.test_step_time import CONFIG as SMALL
from tests.advisor.test_step_time import KIND, QUIET, SIZES

BLIND = Path(__file__).parents[2] / "bench/blind.toml"


def test_what_travels_between_stages():
    """Hidden states and residuals: 2 x 600 tokens x 64 x 2 B; a quarter from each of 4 GPUs, gathered from 3 peers."""
    whole = 2 * 600 * 64 * 2
    (send,) = stage_transfers(SIZES, Layout(pipeline=2), 600, 8)
    assert (send.many, send.ranks, send.sent_bytes, send.nic_bytes) == (1, 2, whole, 0)
    send, gather = stage_transfers(SIZES, Layout(4, pipeline=3), 600, 4)  # a server each stage
    assert (send.many, send.sent_bytes, send.nic_bytes) == (2, whole / 4, whole / 4)
    assert (gather.many, gather.sent_bytes, gather.nic_bytes) == (2, 3 * whole / 4, 0)
    inside, across, _ = stage_transfers(SIZES, Layout(2, pipeline=4), 600, 4)  # two stages on each of two servers
    assert (inside.many, across.many) == (2, 1)
    step = SchedulerStep(prefill_tokens=600)
    how = {"constants": QUIET, "nic_Bps": 1e9, "per_server": 4}
    one, two = (step_seconds(SIZES, KIND, Layout(4, pipeline=stages), step, **how) for stages in (1, 2))
    assert two.collectives_s - one.collectives_s == pytest.approx(whole / 4 / 1e9 + 3 * whole / 4 / KIND.link_Bps)
    assert (two.attention_s, two.experts_s) == (one.attention_s, one.experts_s)


def test_a_gpu_holds_the_layers_of_the_largest_stage_and_one_end():
    """4 layers in 3 stages: 2 of them; the embedding or the head, 100 x 64 numbers of 2 B."""
    one, three = (memory_bytes(SMALL, Layout(pipeline=stages), 1000) for stages in (1, 3))
    assert three.experts == one.experts / 2
    assert three.cache == one.cache / 2
    ends = 2 * 100 * 64 * 2
    assert three.weights == (one.weights - ends) / 2 + ends / 2


@pytest.mark.parametrize(("stages", "concurrency"), [(1, 4), (2, 4), (3, 4), (4, 1)])
def test_steps_of_stages_by_hand(stages, concurrency):
    """Requests divide over the stages' steps; prompts of 3 chunks take (3 + P - 1) / 3P of three passes; a round gives a token.

    With 3 stages of 4 layers the largest has 2: all take as long as it does, 3 x 2 / 4 of a pass.
    """
    case, osl, pace = replace(ONE_SERVER, load=RequestLoad(1200, 8, concurrency)), 8, -(-4 // stages) * stages / 4
    layout = Layout(2, pipeline=stages)
    way = ServingWay("vllm", layout, "all-reduce", batched_tokens=400)
    requests = concurrency * 2 * stages
    assert case.requests(layout) == requests
    assert case.step_tokens(layout, 400) == (400, concurrency * 2)

    def seconds(step):
        return step_seconds(CONFIG, H100, layout, step, ratio=1.0).total * pace

    passes = sum(seconds(SchedulerStep(400, 0, before, before, 1)) for before in (0, 400, 800))
    assert case.prompt_s(way) == pytest.approx(passes * (2 + stages) / (3 * stages))
    assert case.prompt_period_s(way) == pytest.approx(passes / stages)  # of prompts that wait, 2 a stage or more
    batch = requests // stages
    decode_s = seconds(SchedulerStep(decode_requests=batch, kv_tokens=batch * (1200 + osl // 2)))
    assert case.decode_s(way) == pytest.approx(decode_s)
    cycle_s = osl * decode_s + requests * case.prompt_s(way)
    assert case.service(way).tokens_per_s == pytest.approx(requests * osl / cycle_s)


def test_a_prefill_pool_in_stages_computes_a_step_a_stage_at_a_time():
    case = replace(ONE_SERVER, load=RequestLoad(512, 1, 64), nic_Bps=1e9, per_server=4)
    decode = SERVING_ENGINES["vllm"].default(4, 4, 16)
    first = ServingWay("vllm", Layout(4, pipeline=2), "all-reduce", per_server=4)
    rates = pool_rates(case, first, decode)
    pass_s = step_seconds(CONFIG, H100, first.layout, SchedulerStep(16 * 512, prefill_requests=16), ratio=1.0,
                          nic_Bps=1e9, per_server=4).total  # fmt: skip
    assert rates.prefill_per_s == pytest.approx(16 / (pass_s / 2))
    assert rates.transfer_s == pytest.approx(2_097_152 * max(16 / 8, 1) / (0.85 * 1e9))  # 8 GPUs hold the caches of 16 prompts


def test_engines_start_the_stages_that_they_can(tmp_path):
    file = tmp_path / "plan.json"
    assert [str(layout) for layout in staged_layouts(8, 8)] == ["TP 4 PP 2", "TP 2 PP 4", "PP 8"]
    assert str(staged_layouts(32, 8)[0]) == "2 copies, each TP 8 PP 2"
    expected = {
        "vllm": "--tensor-parallel-size 8 --pipeline-parallel-size 2 --enable-expert-parallel --nnodes 2 --node-rank 1",
        "sglang": "--tp-size 8 --pp-size 2 --ep-size 8 --nnodes 2 --node-rank 1",
    }
    whole = Layout(8, expert=8, pipeline=2)
    for name, words in expected.items():
        engine = SERVING_ENGINES[name]
        assert words in engine.command(ServingWay(name, whole, "all-reduce"), "M", file)
        with pytest.raises(BadInput, match="stages"):
            engine.check(ServingWay(name, Layout(data=8, expert=8, pipeline=2), "allgather"))
        with pytest.raises(BadInput, match="stages"):
            engine.check(ServingWay(name, whole, "all-reduce", placement="plan"))
    trtllm = SERVING_ENGINES["trtllm"]
    staged = {way.layout: way for way in trtllm.ways(16, 8, 128) if way.layout.pipeline > 1}
    spread = staged[Layout(data=8, expert=8, pipeline=2)]
    assert "pipeline_parallel_size: 2" in trtllm.files(spread, file)["options.yaml"]
    assert "mpirun -n 16" in trtllm.command(spread, "M", file)


def test_more_prompts_a_second_than_one_server_as_measured():
    """DeepSeek-V3.1 on H20, chunks of 12K: 3.31 times one server's with PP 4 (lmsys.org, 15 January 2026). Within 15 %."""
    config = {"model_type": "deepseek_v3", **tomllib.loads(BLIND.read_text())["models"]["r1"]}
    case = ServingCase(config, load_gpus()["NVIDIA H20"], RequestLoad(131_072, 1, 1), 50e9, 8)
    one, four = (
        case.prompt_s(ServingWay("sglang", Layout(8, pipeline=stages), "all-reduce", batched_tokens=12_288))
        for stages in (1, 4)
    )
    assert 3.31 / 1.15 < one / four < 3.31 * 1.15


def test_stages_are_for_slow_nics_and_never_for_one_request_on_one_server():
    alone = replace(ONE_SERVER, load=RequestLoad(512, 64, 1))
    tensor = alone.decode_s(ServingWay("vllm", Layout(8), "all-reduce"), requests=1)
    for layout in staged_layouts(8, 8):
        assert alone.decode_s(ServingWay("vllm", layout, "all-reduce"), requests=1) > tensor

    def prompts_per_s(layout, nic_Bps):
        case = ServingCase(CONFIG, H100, RequestLoad(8192, 1, 4), nic_Bps, 8)
        return 1 / case.prompt_period_s(ServingWay("vllm", layout, "all-reduce"))

    gains = [
        prompts_per_s(Layout(8, pipeline=2), nic_Bps) / prompts_per_s(Layout(16), nic_Bps) for nic_Bps in (1e9, 1e10, 5e10)
    ]
    assert gains == sorted(gains, reverse=True)
    assert gains[0] > 2
