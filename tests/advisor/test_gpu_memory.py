"""Bytes of a GPU's memory, each part by hand, and what fits; sizes of models against those that were published."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from aurora.advisor.engines import SERVING_ENGINES
from aurora.advisor.engines.engine import EplbSettings, Layout
from aurora.advisor.gpu_memory import (
    GIB,
    LOW_LATENCY_LIMIT,
    low_latency_bytes,
    memory_bytes,
    memory_fit,
    most,
    reserved_bytes,
)
from aurora.algorithms.workload.model_structure import flat_config
from aurora.io import load_gpus
from tests.advisor.test_step_time import CONFIG

REPORTS = Path(os.environ.get("AURORA_DATA", Path(__file__).parents[3] / "shared/data")) / "reports"
VLLM, SGLANG = SERVING_ENGINES["vllm"], SERVING_ENGINES["sglang"]
EIGHT = VLLM.default(8, 8, 16)
TWO_SERVERS = VLLM.default(8, 4, 16)
NCCL = 0.96e9
WIDE = {  # of report 91: 384 experts of 3 x 5120 x 1536 numbers
    "model_type": "qwen3_moe", "hidden_size": 5120, "intermediate_size": 6144, "moe_intermediate_size": 1536,
    "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 384,
    "num_experts_per_tok": 8, "vocab_size": 151936,
}  # fmt: skip


def test_weights_and_cache_are_counted_by_hand():
    attention = 64 * (8 * 16) * 2 + 64 * (2 * 16) * 2  # queries and output; keys and values
    expert, shared, router = 3 * 64 * 32, 3 * 64 * 48, 64 * 16
    ends = 2 * 100 * 64
    whole = memory_bytes(CONFIG, Layout(), 0)
    assert whole.weights == 2 * (4 * (attention + shared + router) + ends)
    assert whole.experts == 2 * 4 * 16 * expert
    split = memory_bytes(CONFIG, Layout(2, 2, 4), 100)
    assert split.weights == 2 * (4 * ((attention + shared) / 2 + router) + ends / 2)
    assert split.experts == whole.experts / 4
    assert split.cache == 100 * 4 * 2 * 16 * 2 * 2 / 2
    assert split.total == split.weights + split.experts + split.cache
    three = memory_bytes(CONFIG, EIGHT, 0, slots=3)
    assert three.experts == 3 * 2 * 4 * expert  # physical slots: one more than the two that hold 16 experts on 8 GPUs


@pytest.mark.parametrize(
    ("experts", "tokens", "width", "count", "fits"),
    [  # bytes = 4 x experts x tokens x (2 h + 4 h / 128), as in vLLM's issue 57894; the limit is below 32 GiB
        (448, 2048, 5120, 38_168_166_400, False),
        (448, 1840, 5120, 34_291_712_000, True),
        (448, 1843, 5120, 34_347_622_400, True),  # floor(2^35 / (4 x 448 x 10400)) = 1843
        (448, 1844, 5120, 34_366_259_200, False),
        (384, 2048, 5120, 32_715_571_200, True),
        (288, 128, 7168, 2_146_959_360, True),
    ],
)
def test_the_low_latency_buffer_by_the_formula_of_deepep(experts, tokens, width, count, fits):
    assert low_latency_bytes(experts, tokens, width) == count
    assert (count < LOW_LATENCY_LIMIT) == fits


@pytest.mark.parametrize(
    ("way", "activations", "buffers"),
    [
        # 100 tokens a rank. Rows of 64 x 2 B; two of each token: 2 x 100 x 128 = 25,600. Logits: 100 x 100 x 6 = 60,000.
        # Experts' workspaces, of a token: 2 choices x (max(32, 64) + max(64, 64)) + 64 = 320 numbers, 640 B.
        (EIGHT, 25_600 + 8 * 100 * 640, 2 * NCCL),  # gathered from 8 ranks; communicators of DP and EP
        (replace(EIGHT, exchange="deepep-ht"), 25_600 + 100 * 640, 2 * NCCL + GIB),
        (replace(TWO_SERVERS, exchange="deepep-ht"), 25_600 + 100 * 640, 2 * NCCL + 2 * GIB),
        # slots for 100 tokens of 8 ranks in each of 2 slots: 1,600 x (64 + 32) x 2 B
        (replace(EIGHT, exchange="deepep-ll"), 25_600 + 1_600 * 192, 2 * NCCL + GIB + 4 * 16 * 100 * 128),
        (replace(EIGHT, exchange="nixl"), 25_600 + 1_600 * 192, 2 * NCCL + 4 * 16 * 100 * 128),
        # slots for all ranks' tokens, there and back, with 2 choices of 8 B
        (replace(EIGHT, exchange="nvlink-one-sided"), 25_600 + 8 * 100 * 640, 2 * NCCL + 800 * (2 * 128 + 16)),
        (replace(EIGHT, exchange="deepep-v2"), 25_600 + 100 * 640, 2 * NCCL + 800 * (128 + 16)),
        (replace(TWO_SERVERS, exchange="deepep-v2"), 25_600 + 100 * 640, 2 * NCCL + 100 * (8 + 1 + 2) * (128 + 16)),
        # decode alone: slots for the 300 requests of a rank
        (replace(SGLANG.default(8, 8, 16), exchange="deepep"), 25_600 + 100 * 640, 2 * NCCL + GIB + 4 * 16 * 300 * 128),
        (replace(EIGHT, layout=Layout(4), exchange="all-reduce"), 25_600 + 100 * 640, NCCL),
    ],
    ids=lambda way: getattr(way, "exchange", None),
)  # fmt: skip
def test_activations_and_buffers_by_hand(way, activations, buffers):
    parts = memory_bytes(CONFIG, way, 0, sequences=300, slots=2, tokens=100)
    assert parts.activations == activations
    assert parts.buffers == pytest.approx(buffers)
    assert parts.graphs == (0 if way.exchange == "deepep-ht" else 1.4 * GIB if way.engine == "vllm" else 6.19 * GIB)


def test_eplb_holds_a_layer_twice_while_it_moves():
    """3 slots of 12,288 B; of vLLM 4 layers x (1000 steps x 24 slots x 4 B + 16 experts x 1024 x 8 B) = 908,288 B beside."""
    settings = EplbSettings(1000, 3000)
    found = {
        name: memory_bytes(
            CONFIG, replace(SERVING_ENGINES[name].default(8, 8, 16), eplb=settings, redundant=8), 0, slots=3
        ).eplb
        for name in ("vllm", "sglang", "trtllm")
    }
    assert found == {"vllm": 3 * 12_288 + 908_288, "sglang": 3 * 12_288, "trtllm": 0}
    planned = replace(EIGHT, placement="plan", redundant=8)  # the plugin's way into vLLM's replicas is its balancer
    assert memory_bytes(CONFIG, planned, 0, slots=3).eplb == found["vllm"]
    assert memory_bytes(CONFIG, EIGHT, 0, slots=2).eplb == 0


def test_what_does_not_fit_says_why_and_how_much_would():
    kind = load_gpus()["NVIDIA H200"]
    low = replace(VLLM.default(32, 8, 384), exchange="deepep-ll", placement="plan", redundant=64)
    fit = memory_fit(WIDE, kind, low, 32, 1280, 8192)
    assert (fit.why, fit.most_tokens, fit.tokens, fit.more_slots) == ("", 1843, 1843, 2)
    most_slots = fit.most_slots
    assert (
        low_latency_bytes((12 + most_slots) * 32, 1843, 5120)
        < LOW_LATENCY_LIMIT
        <= low_latency_bytes((13 + most_slots) * 32, 1843, 5120)
    )
    many = memory_fit(WIDE, kind, low, 2048, 16, 8192)
    assert many.why == (
        "the low-latency buffer of 448 experts x 2048 tokens has 35.55 GiB, and its offsets reach 32 GiB: at most 1843 tokens"
    )
    small = memory_fit(WIDE, replace(kind, memory_bytes=32 * 10**9), low, 32, 1280, 8192)
    assert small.why == "a GPU needs 50 GB (experts 32, weights 8, cache 4), and has 29 GB"  # 0.92 x 32
    assert (small.most_tokens, small.most_slots) == (0, 0)
    whole = memory_fit(WIDE, kind, VLLM.default(32, 8, 384), 32, 1280, 8192)
    assert whole.parts.total <= whole.usable_bytes == 0.92 * kind.memory_bytes
    more = memory_bytes(
        WIDE, VLLM.default(32, 8, 384), 32 * 1280, sequences=32, slots=12 + whole.most_slots + 1, tokens=whole.tokens
    )
    assert more.total > whole.usable_bytes
    assert [most(limit.__ge__, 9) for limit in (0, 1, 5, 9, 20)] == [0, 1, 5, 9, 9]


@pytest.mark.skipif(not REPORTS.exists(), reason="recorded data is not here: set AURORA_DATA")
@pytest.mark.parametrize(
    ("case", "published"),
    [
        ("19-gpt-oss-120b", 65.25e9),  # its checkpoint: 60.8 GiB (model card)
        ("18-minimax-m2", 230e9),  # 230 billion, fp8
        ("15-llama4-maverick", 2 * 400.7e9),  # billions of parameters at 16 bits: with a shared expert, and wider dense layers
        ("06-longcat-flash", 2 * 560e9),  # two dense parts in each layer
        ("27-dots-llm1", 2 * 142.8e9),
        ("03-step35-flash", 2 * 196.8e9),
        ("04-trinity-mini", 2 * 26.1e9),
        ("17-granite4-small", 2 * 32.2e9),
        ("01-nemotron3-nano", 2 * 31.6e9),  # its Mamba layers have no feed-forward part
    ],
)
def test_sizes_of_models_are_those_that_were_published(case, published):
    """Reports name few entries; the others are transformers' defaults, as in the published configurations."""
    from transformers import CONFIG_MAPPING

    reported = json.loads((REPORTS / case / "config.json").read_text())
    text = CONFIG_MAPPING[reported["model_type"]].from_dict(reported).get_text_config()
    config = text.to_dict() | flat_config(reported)
    assert memory_bytes(config, Layout(), 0).total == pytest.approx(published, rel=0.03)


def test_sglang_reserves_memory_by_its_rule_by_hand():
    """H200 (140 GiB): 512 + 1.5 x 8192 + 2 x 512 + 128 x 8 = 14,848 MiB; with data-parallel attention 4.5 x 512 x 8 more.

    L4 (24 GB, 22 GiB): 512 + 1.5 x 2048 + 2 x 32 + 128 = 3,776 MiB.
    """
    h200, l4 = load_gpus()["NVIDIA H200"], load_gpus()["NVIDIA L4"]
    assert reserved_bytes(h200, Layout(tensor=8)) == 14_848 * 2**20
    assert reserved_bytes(h200, Layout(data=8)) == (14_848 + 18_432) * 2**20
    assert reserved_bytes(l4, Layout()) == 3_776 * 2**20
    assert reserved_bytes(h200, Layout()) == 13_440 * 2**20  # 512 + 1.5 x 8192 + 2 x 256 + 128
