"""Prefill and decode apart: each term by hand, and the best split."""

import re
from dataclasses import replace

import pytest

from aurora.advisor.disaggregation import attention_apart, of_stage, pool_rates, prompt_kv_bytes, splits_of
from aurora.advisor.engines import SERVING_ENGINES
from aurora.advisor.engines.engine import Layout
from aurora.advisor.gpu_memory import memory_bytes
from aurora.advisor.recommend import recommend, save_recommendation
from aurora.advisor.step_time import SchedulerStep, step_seconds
from aurora.errors import BadInput
from aurora.reports.advice import recommendation_lines
from aurora.reports.json_objects import recommendation_json
from aurora.types import RequestLoad
from tests.advisor.test_served_ways import CONFIG, H100, ONE_SERVER, traffic

POOL = SERVING_ENGINES["vllm"].default(4, 8, 16)


@pytest.mark.parametrize(("nic_Bps", "osl", "limit"), [(None, 64, "decode"), (50e9, 1, "prefill"), (1e6, 64, "transfer")])
def test_pools_by_hand(nic_Bps, osl, limit):
    """4 + 4 data-parallel GPUs, 8 x 16 requests in flight. A prompt's cache: 4 layers x 2 x 4 heads x 64 x 2 B x 512 tokens."""
    case = replace(ONE_SERVER, load=RequestLoad(512, osl, 16), nic_Bps=nic_Bps, per_server=8 if nic_Bps is None else 4)
    rates = pool_rates(case, POOL, POOL)
    assert rates.kv_bytes == prompt_kv_bytes(CONFIG, 512, Layout(4)) == 2_097_152
    assert prompt_kv_bytes(CONFIG, 512, Layout(8)) == 2 * 2_097_152  # 8 GPUs of 4 heads hold each twice
    link_Bps = 0.7 * 450e9 if nic_Bps is None else 0.85 * nic_Bps  # large transfers reach 0.7 of NVLink, 0.85 of a NIC
    assert rates.transfer_s == pytest.approx(16 * 2_097_152 / link_Bps)  # 16 prompts of 512 are a step of 8192
    assert rates.transfer_per_s == pytest.approx(4 * link_Bps / 2_097_152)

    def seconds(step):
        return step_seconds(CONFIG, H100, POOL.layout, step, ratio=1.0).total

    def decode_s(requests):
        return seconds(SchedulerStep(decode_requests=requests, kv_tokens=requests * (512 + osl // 2)))

    prompt_s, many = seconds(SchedulerStep(16 * 512, 0, 0, 0, 16)), rates.requests
    assert rates.prefill_per_s == pytest.approx(4 * 16 / prompt_s)
    assert (rates.limit, rates.service.tpot_s) == (limit, pytest.approx(decode_s(many)))
    assert rates.service.tokens_per_s == pytest.approx(osl * rates.per_s)
    assert rates.service.ttft_s == pytest.approx(prompt_s + rates.transfer_s + decode_s(many) / 2)
    if limit == "decode":  # requests in flight are computed, travel or generate: one more on each of 4 ranks would be too many
        flying = [4 * each * (1 + (prompt_s + rates.transfer_s) / (osl * decode_s(each))) for each in (many, many + 1)]
        assert flying[0] <= 8 * 16 < flying[1]
        assert rates.decode_per_s == pytest.approx(4 * many / (osl * decode_s(many)))
        least = memory_bytes(CONFIG, POOL, 8 * 576, sequences=8, slots=4, tokens=8).total  # 8 of the 32 for each GPU
        small = replace(case, kind=replace(H100, memory_bytes=int(least / 0.92) + 2))
        assert pool_rates(small, POOL, POOL).requests == 8


def test_the_best_split_is_found_and_each_pool_gets_its_files(tmp_path):
    found, *ones = (recommend("h100:3", "vllm", model=CONFIG, prefill_gpus=number) for number in ("auto", 1, 2))
    assert found.disaggregation.gain == pytest.approx(max(one.disaggregation.gain for one in ones))
    assert found.disaggregation.low < found.disaggregation.gain / 1.1 + 1e-9
    assert any(re.match("(Keep|Serve) prefill and decode (together|apart)", line) for line in recommendation_lines(found))
    assert recommendation_json(found)["disaggregation"]["limit"] == found.disaggregation.rates.limit
    seen = replace(traffic().at_sources(4), stage_T=("prefill", "decode") * 10)
    assert (of_stage(seen, "decode").tokens_TLSE == seen.tokens_TLSE[1::2]).all()
    given = recommend("h100:4", "sglang", model=CONFIG, profile=seen, decode_gpus=2)
    command = save_recommendation(replace(given, disaggregation=replace(given.disaggregation, low=1.1)), tmp_path, "M")
    assert all((tmp_path / stage / "cluster.toml").exists() for stage in ("prefill", "decode"))
    assert "--disaggregation-mode prefill --disaggregation-transfer-backend nixl --disaggregation-boot" in command
    assert "CUDA_VISIBLE_DEVICES=2" in command.split("# decode, 2 GPUs")[1]
    way = replace(POOL, stage="decode", first_gpu=4)
    command = SERVING_ENGINES["vllm"].command(way, "M", tmp_path / "plan.json")
    for words in ("CUDA_VISIBLE_DEVICES=4,5,6,7 ", "SIDE_CHANNEL_PORT=5604 ", '"kv_role": "kv_consumer"', "--port 8004"):
        assert words in command


def test_attention_apart_from_experts_by_hand():
    """2 GPUs with 16 requests each: one computes attention of 32, the other all experts, twice what each has; the longer counts."""
    way = SERVING_ENGINES["vllm"].default(2, 8, 16)
    one, both = (step_seconds(CONFIG, H100, way.layout, SchedulerStep(decode_requests=many, kv_tokens=many * 544), ratio=1.0)
                 for many in (16, 32))  # fmt: skip
    slowest_s = max(both.attention_s + both.dense_s, 2 * one.experts_s)
    assert attention_apart(ONE_SERVER, way) == (1, pytest.approx(one.total / slowest_s))


@pytest.mark.parametrize(
    ("gpus", "prefill", "decode", "why"),
    [(8, 0, None, "found 0 and 8"), (8, 9, None, "found 9 and -1"), (8, 4, 3, "all 8 together, found 4 and 3"),
     (1, "auto", None, "two GPUs or more"), (8, "half", None, "a number of GPUs or auto")],
)  # fmt: skip
def test_pools_that_cannot_be_are_refused(gpus, prefill, decode, why):
    with pytest.raises(BadInput, match=why):
        splits_of(gpus, prefill, decode)
    with pytest.raises(BadInput, match="GPUs of one kind"):
        recommend("h100:4,h20:4", "vllm", model=CONFIG, prefill_gpus=4)
