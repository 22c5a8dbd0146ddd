"""Layers with experts and sizes of experts, by the names of configurations, beside the modules that transformers builds of them."""

import importlib.util
import json
import os
import re
from pathlib import Path

import pytest

from aurora.algorithms.workload.attention import attention_layers, shared_width
from aurora.algorithms.workload.model_config import Shape
from aurora.algorithms.workload.model_structure import dense_layers, number
from aurora.errors import BadInput
from tests.algorithms.workload.meta_models import sizes_of

PAGE = Path(__file__).parents[3] / "docs/reference/models.md"
REPORTS = Path(os.environ.get("AURORA_DATA", Path(__file__).parents[4] / "shared/data")) / "reports"
QWEN = {"model_type": "qwen3_moe", "num_hidden_layers": 4, "hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 8}
QWEN |= {"num_experts_per_tok": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 128}


def test_names_say_which_layers_have_experts_and_how_large_they_are():
    shape = Shape.of(QWEN | {"mlp_only_layers": [1]})
    assert (shape.decoder_layers, shape.moe_layers, shape.experts, shape.top_k) == (4, (0, 2, 3), 8, 2)
    assert (shape.hidden, shape.dispatched, shape.inner, shape.expert_weights) == (64, 64, 32, 3 * 64 * 32)
    assert dense_layers(QWEN | {"mlp_only_layers": [1]}) == (1,)


def test_ungated_and_hybrid_models():
    sizes = {"hidden_size": 64, "num_hidden_layers": 5, "moe_intermediate_size": 32, "num_attention_heads": 4}
    sizes |= {"n_routed_experts": 8, "num_experts_per_tok": 2, "mlp_hidden_act": "relu2"}
    config = {"model_type": "nemotron_h", **sizes, "hybrid_override_pattern": "MEM*E"}
    shape = Shape.of(config)
    assert (shape.moe_layers, shape.expert_bytes, shape.remarks) == ((1, 4), 2 * 2 * 64 * 32, ())
    latent = Shape.of(config | {"moe_latent_size": 16})  # as Nemotron-3 Super: a row has 2 * 16 B, whichever width is larger
    assert (latent.hidden, latent.dispatched, latent.inner, latent.expert_bytes) == (64, 16, 32, 2 * 2 * 16 * 32)
    same = Shape.of(config | {"moe_latent_size": 16, "moe_intermediate_size": 64})
    assert (same.dispatched, same.inner) == (16, 64)


def test_numbers_that_no_model_has_are_refused():
    for said in ({"num_hidden_layers": 10**9}, {"num_experts": 10**9}, {"text_config": {"num_hidden_layers": 10**9}}):
        with pytest.raises(BadInput, match=r"must be at most [0-9]+, found 1000000000"):
            Shape.of(QWEN | said)
    for name, value, message in (("model_type", 5, "text"), ("first_k_dense_replace", -3, "zero or more")):
        with pytest.raises(BadInput, match=f"{name} must be {message}, found {value}"):
            Shape.of(QWEN | {name: value})


MOE = {"block_type": "moe", "n_routed_experts": 8, "moe_intermediate_size": 24_000_000}
BLOCKS = [{"block_type": "mamba"}, MOE, {"num_experts": 0}]
SIZES = {"hidden_size": 64, "moe_latent_size": 16, "mlp_hidden_act": "relu2", "num_hidden_layers": 4, "num_experts_per_tok": 2}


def test_layers_of_a_config_with_entries_for_each_layer():
    """As Nemotron's and gpt-oss's Puzzle models have: equal layers are read, unequal ones refused with their sizes."""
    small = MOE | {"moe_intermediate_size": 24}
    puzzle = {"model_type": "nemotron_h_puzzle", **SIZES}
    shape = Shape.of(puzzle | {"block_configs": [BLOCKS[0], small, BLOCKS[2], small]})
    assert (shape.moe_layers, shape.experts, shape.dispatched, shape.expert_weights) == ((1, 3), 8, 16, 2 * 16 * 24)
    # (8 * 24e6 + 4 * 48e6) * 2 * 16 = 12.288e9 weights of 2 B
    other = MOE | {"n_routed_experts": 4, "moe_intermediate_size": 48_000_000, "num_experts_per_tok": 3}
    said = "1 of 8 experts of width 24000000, top-2; 1 of 4 experts of width 48000000, top-3: 12 experts in all, 24.6 GB"
    with pytest.raises(BadInput, match=f"config: layers have unequal experts: {said}"):
        Shape.of(puzzle | {"block_configs": [*BLOCKS, other]})
    with pytest.raises(BadInput, match="block_configs does not say which of 4 layers have experts"):
        Shape.of({**SIZES, "block_configs": [MOE, 3]})
    with pytest.raises(BadInput, match="layers have unequal experts: expected n_routed_experts alike"):
        Shape.of({**SIZES, "n_routed_experts": [8, 8, 8, 4], "moe_intermediate_size": 24})
    arctic = {"num_local_experts": 128, "num_experts_per_tok": 2, "hidden_size": 64, "intermediate_size": 32}
    assert Shape.of(arctic | {"num_hidden_layers": 35, "moe_layer_frequency": 2}).moe_layers == tuple(range(1, 35, 2))  # 17


def test_layers_by_a_period_from_an_offset():
    """As Jamba's; and what has no experts with matrices of their own is refused."""
    jamba = {key: value for key, value in QWEN.items() if key != "model_type"}
    assert Shape.of(jamba | {"expert_layer_period": 2, "expert_layer_offset": 1}).moe_layers == (1, 3)
    assert Shape.of(jamba | {"expert_layer_period": 3}).moe_layers == (0, 3)
    with pytest.raises(BadInput, match="expert_layer_period does not say which of 4 layers have experts: 0"):
        Shape.of(jamba | {"expert_layer_period": 0})
    with pytest.raises(BadInput, match="expected experts with matrices of their own, found rows of an embedding"):
        Shape.of(QWEN | {"expert_retrieval_size": 64})


def models_page():
    """The module that writes the page of models; the test is skipped for a transformers that the page is not of."""
    spec = importlib.util.spec_from_file_location("models", PAGE.parents[1] / "models.py")
    models = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(models)
    if f"transformers {models.VERSION};" not in PAGE.read_text():
        pytest.skip(f"the page of models is of another transformers than {models.VERSION}")
    return models


def test_the_page_of_models_is_what_is_read_of_every_moe_type():
    models = models_page()
    assert PAGE.read_text() == models.page(), "run `python docs/models.py`"


# Attention's parameters by names / those of the modules, for the types where names do not tell all: gates, heads of other widths in
# some layers, convolutions.
ROUGH = {
    "afmoe": 0.8, "axk2": 0.746, "bailing_hybrid": 0.469, "beam": 0.7, "diffusion_gemma": 0.9, "dots3_note": 4.93, "gemma4": 0.857,
    "hy_v4": 0.684, "inkling2": 0.673, "inkling_mm_model": 0.871, "inkling_text": 0.871, "jamba": 0.808, "kimi_linear": 0.667,
    "mimo_v2_flash": 1.145, "muse_spark": 0.692, "nemotron_h": 0.462, "qwen3_5_moe": 0.934, "qwen3_next": 0.934, "zaya": 0.94,
}  # fmt: skip
NO_ATTENTION = {"glm5_next", "unlimited_ocr", "jetmoe"}  # whose attention is refused, or has experts
UNBUILT = {"dbrx", "deepseek_ocr2", "hunyuan_v1_moe", "lfm2_moe", "qwen3_omni_moe_talker", "qwen4_exp"}  # of their defaults


@pytest.mark.full
def test_names_tell_what_transformers_builds_of_every_moe_type():
    models, compared = models_page(), set()
    models.load_transformers()
    for name in models.moe_types():
        config, shape, _ = models.readable(name)
        if shape is None or (kind := name.removesuffix("_text")) in UNBUILT or (built := sizes_of(config)) is None:
            continue
        compared.add(kind)
        assert (shape.decoder_layers, shape.moe_layers, shape.experts) == (
            (built.decoder_layers, built.moe_layers, built.experts)
        ), name
        assert {shape.dispatched, shape.inner} == {*built.widths}, name
        assert shape.expert_weights == pytest.approx(built.expert_weights, rel=0.002), name  # biases
        shared = shared_width(config, shape) / shape.inner
        assert shared == pytest.approx(built.shared_weights / built.expert_weights, abs=0.01), name
        if kind not in NO_ATTENTION:
            told = sum(layers.layers * (layers.split_weights + layers.whole_weights) for layers in attention_layers(config))
            ratio = ROUGH.get(name, ROUGH.get(kind, 1.0))
            assert told / built.attention_weights == pytest.approx(ratio, rel=0.02), name
    assert len(compared) > 60, compared


@pytest.mark.skipif(not REPORTS.exists(), reason="recorded data is not here: set AURORA_DATA")
@pytest.mark.parametrize(
    ("case", "layers", "dense", "experts", "top_k", "expert_bytes"),
    [
        ("01-nemotron3-nano", 23, (0, 2, 4, 5), 128, 6, 19_955_712),
        ("03-step35-flash", 42, (0, 1, 2), 288, 8, 31_457_280),
        ("04-trinity-mini", 30, (0, 1), 128, 8, 12_582_912),
        ("06-longcat-flash", 28, (), 512, 12, 75_497_472),
        ("08-qwen3-omni", 48, (), 128, 8, 9_437_184),
        ("09-deepseek-vl2", 29, (0,), 72, 6, 23_592_960),
        ("12-kimi-k2-thinking-int4", 60, (0,), 384, 8, 24_772_608),
        ("14-mistral-large-3-params", 58, (0, 1, 2), 128, 4, 176_160_768),
        ("15-llama4-maverick", 24, (0, 2, 4, 6), 128, 1, 251_658_240),
        ("17-granite4-small", 40, (), 72, 10, 18_874_368),
        ("18-minimax-m2", 62, (), 256, 8, 14_155_776),
        ("19-gpt-oss-120b", 36, (), 128, 4, 13_219_200),
        ("20-kimi-k3-latent", 68, (0,), 896, 16, 66_060_288),
        ("22-grok-style", 64, (), 8, 2, 603_979_776),
        ("23-hunyuan-large", 63, (0,), 16, 1, 702_873_600),
        ("26-phi-motif-first-dense", 76, (0, 1, 2, 3), 256, 8, 100_663_296),
        ("27-dots-llm1", 61, (0,), 128, 6, 34_603_008),
    ],
)
def test_configurations_after_public_reports(case, layers, dense, experts, top_k, expert_bytes):
    (file,) = (REPORTS / case).glob("*.json")
    shape = Shape.of(json.loads(file.read_text()))
    assert (shape.layers, shape.dense_layers[:4], shape.experts, shape.top_k) == (layers, dense, experts, top_k)
    assert shape.expert_bytes == expert_bytes


@pytest.mark.skipif(not REPORTS.exists(), reason="recorded data is not here: set AURORA_DATA")
def test_experts_of_two_kinds_of_tokens_are_refused():
    config = json.loads((REPORTS / "07-ernie45-vl/config.json").read_text())
    with pytest.raises(BadInput, match=r"moe_layer_end_index does not say which of 28 layers have experts: \[29, 28\]"):
        Shape.of(config)


@pytest.mark.skipif(not REPORTS.exists(), reason="recorded data is not here: set AURORA_DATA")
@pytest.mark.parametrize(("method", "gigabytes"), [(None, 162.4), ("mxfp4", 43.1)])
def test_unequal_layers_of_gpt_oss_puzzle(method, gigabytes):
    """15 * 128 + 21 * 64 = 3264 experts of 3 * 2880 ** 2 weights: 162.4 GB at 16 bits, 43.1 at 4.25."""
    config = json.loads((REPORTS / "99-gpt-oss-puzzle/config.json").read_text())
    config["quantization_config"] = method and {"quant_method": method}
    with pytest.raises(BadInput, match=f"15 of 128 experts .*; 21 of 64 .*: 3264 experts in all, {gigabytes} GB"):
        Shape.of(config)


@pytest.mark.parametrize(
    ("config", "found"), [({"hidden_size": "a"}, "'a'"), ({"hidden_size": True}, "True"), ({}, "none: not a MoE model?")]
)
def test_a_size_that_is_no_number_is_shown(config, found):
    with pytest.raises(BadInput, match=f"above zero under hidden_size, found {re.escape(found)}"):
        number(config, "hidden_size")


@pytest.mark.parametrize("names", [("language_model_cfg",), ("backbone", "decoder_config"), ("thinker_config", "text_config")])
def test_parts_of_any_name_and_depth_tell_experts(names):
    """By the type of the part, where transformers knows it, and by the names that it gives."""
    for part in (QWEN | {"mlp_only_layers": [1]}, {**QWEN, "model_type": "to come", "first_k_dense_replace": 1}):
        config = part
        for name in reversed(names):
            config = {"model_type": "sees_and_hears", "vision_config": {"hidden_size": 8, "num_hidden_layers": 2}, name: config}
        shape = Shape.of(config)
        assert (shape.layers, shape.experts, shape.top_k, shape.hidden, shape.inner) == (3, 8, 2, 64, 32)
    with pytest.raises(BadInput, match="expected one part that tells a number of experts, found one, two"):
        Shape.of({"one": {"num_experts": 4}, "two": {"num_experts": 8}})
