"""Which decoder layers have experts, by what configs of transformers say."""

import numpy as np
import pytest

from aurora.algorithms.workload.model_config import Shape, other_weight_bits, weight_bits
from aurora.algorithms.workload.model_structure import dense_layers, expert_groups, moe_layers, top_k
from aurora.errors import BadInput

SIZES = {"num_local_experts": 4, "num_experts_per_tok": 1, "hidden_size": 8, "intermediate_size": 8}


@pytest.mark.parametrize(
    ("said", "dense"),
    [
        ({}, ()),
        ({"first_k_dense_replace": 3}, (0, 1, 2)),
        ({"first_k_dense_replace": 1, "moe_layer_freq": 2}, (0, 1, 3, 5)),
        ({"moe_layer_freq": [0, 1, 1, 1, 1, 0]}, (0, 5)),
        ({"mlp_only_layers": [1, 4], "decoder_sparse_step": 1}, (1, 4)),
        ({"mlp_only_layers": [], "decoder_sparse_step": 2}, (0, 2, 4)),
        ({"interleave_moe_layer_step": 2}, (0, 2, 4)),
        ({"moe_layers": [1, 3], "interleave_moe_layer_step": 2}, (0, 2, 4, 5)),
        ({"mlp_layer_types": ["dense", "sparse", "sparse", "dense", "sparse", "sparse"]}, (0, 3)),
        ({"moe_layer_start_index": 1, "moe_layer_end_index": 4, "moe_layer_interval": 1}, (0, 5)),
        ({"moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 2}, (0, 2, 4)),
        ({"first_k_dense_replace": None, "mlp_only_layers": None}, ()),
    ],
)
def test_layers_without_experts(said, dense):
    config = {"num_hidden_layers": 6, **said}
    assert dense_layers(config) == dense
    shape = Shape.of(SIZES | config)
    assert (shape.layers, shape.dense_layers, shape.decoder_layers) == (6 - len(dense), dense, 6)
    assert sorted((*shape.moe_layers, *dense)) == list(range(6))
    assert moe_layers(shape.layers, dense) == shape.moe_layers
    assert Shape.of({"num_hidden_layers": 1, "text_config": SIZES | config}).dense_layers == dense


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"first_k_dense_replace": "three"}, "first_k_dense_replace does not say which of 6 layers have experts: three"),
        ({"mlp_layer_types": ["dense"]}, "mlp_layer_types does not say which"),
        ({"moe_layer_freq": 0}, "moe_layer_freq does not say which"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step does not say which"),
        ({"mlp_only_layers": 3}, "mlp_only_layers does not say which"),
        ({"moe_layers_enum": "1,1_0"}, "moe_layers_enum does not say which of 6 layers have experts: 1,1_0"),
        ({"first_k_dense_replace": 6}, "expected 1 <= top-k <= experts and a MoE layer"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be at most 4096"),
    ],
)
def test_configs_that_do_not_say(said, message):
    with pytest.raises(BadInput, match=message):
        Shape.of(SIZES | {"num_hidden_layers": 6} | said)


def test_a_number_for_each_layer_counts_where_all_are_alike():
    """As Hunyuan's configs give them."""
    config = {"num_experts": 8, "moe_topk": [2, 2, 2], "num_hidden_layers": 3}
    assert top_k(config) == 2
    with pytest.raises(BadInput, match=r"expected moe_topk alike for all layers and kinds of tokens, found \[2, 1, 2\]"):
        top_k(config | {"moe_topk": [2, 1, 2]})


def test_groups_of_experts_that_a_token_is_limited_to():
    v3 = {"n_routed_experts": 256, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4}
    assert expert_groups(v3) == (8, 4)
    for said in ({"topk_method": "greedy"}, {"n_group": 1, "topk_group": 1}, {"n_group": None}, {"topk_group": 8}):
        assert expert_groups(v3 | said) == (1, 1)
    shape = Shape.of(SIZES | {"num_hidden_layers": 6, "n_group": 2, "topk_group": 1})
    assert (shape.groups, shape.token_groups) == (2, 1)
    for said in ({"n_group": 7}, {"topk_group": 9}, {"n_group": 256}):
        with pytest.raises(BadInput, match="n_group that divides 256 experts and a topk_group with 8 experts or more"):
            expert_groups(v3 | said)


def test_layers_that_a_config_does_not_tell_of():
    """None of the names that are looked for: all layers, with a remark; a name of layers that is not known: refused."""
    shape = Shape.of(SIZES | {"num_hidden_layers": 6})
    assert shape.layers == 6
    assert shape.remarks == ("all 6 layers are taken to have experts, as the config names none without",)
    assert Shape.of(SIZES | {"num_hidden_layers": 6, "first_k_dense_replace": 1}).remarks == ()
    with pytest.raises(BadInput, match="config: first_moe_layer_at is not known, so that layers with experts cannot be told"):
        Shape.of(SIZES | {"num_hidden_layers": 6, "first_moe_layer_at": 3})


@pytest.mark.parametrize(
    ("said", "layers"),
    [
        ({"num_hidden_layers": 6, "hybrid_override_pattern": "ME*EME"}, (1, 3, 5)),
        ({"layers_block_type": ["mamba", "moe", "attention", "moe"]}, (1, 3)),
        ({"layers_block_type": ["mamba", "attention"]}, (0, 1)),
        ({"num_hidden_layers": 4, "num_dense_layers": 2}, (2, 3)),
        ({"num_hidden_layers": 4, "moe_layer_num_skipped": 1}, (1, 2, 3)),
        ({"num_hidden_layers": 4, "moe_layers_enum": "1,3"}, (1, 3)),
        ({"num_layers": 3}, (0, 1, 2)),
    ],
)
def test_dialects_of_layers(said, layers):
    assert Shape.of(SIZES | said).moe_layers == layers


def test_an_expert_is_as_large_as_its_matrices():
    """Of their own width, which is never the dense layers'; two if they are ungated; on a projection of the token if it is said."""
    config = {"num_experts": 4, "num_experts_per_tok": 1, "num_hidden_layers": 2, "hidden_size": 8, "intermediate_size": 64}
    assert Shape.of(config).expert_bytes == 2 * 3 * 8 * 64
    for name in ("moe_intermediate_size", "expert_ffn_hidden_size", "moe_ffn_hidden_size", "expert_hidden_dim"):
        assert Shape.of(config | {name: 16}).expert_bytes == 2 * 3 * 8 * 16
    assert Shape.of(config | {"moe_intermediate_size": 16, "mlp_hidden_act": "relu2"}).expert_bytes == 2 * 2 * 8 * 16
    latent = Shape.of(config | {"moe_intermediate_size": 16, "routed_expert_hidden_size": 4})
    assert (latent.hidden, latent.dispatched, latent.expert_bytes) == (8, 4, 2 * 3 * 4 * 16)
    assert latent.profile(np.ones((1, 2, 1, 4), dtype=np.int64), {}).dispatch_bytes == 2 * 4
    with pytest.raises(BadInput, match=r"expected moe_intermediate_size alike .*, found \[1536, 512\]"):
        Shape.of(config | {"moe_intermediate_size": [1536, 512]})
    nested = {"language_config": config}, {"thinker_config": {"text_config": config}}, {"llm_config": config}
    assert {Shape.of(each).expert_bytes for each in nested} == {2 * 3 * 8 * 64}
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "expert_hidden_dim": 16}
    mistral = {"dim": 8, "n_layers": 3, "hidden_dim": 64, "moe": moe}
    assert (Shape.of(mistral).layers, Shape.of(mistral).expert_bytes) == (3, 2 * 3 * 8 * 16)


MIXED = {
    "model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"},
    "model.layers.0.mlp.experts.0.up_proj": {"quant_algo": "NVFP4"},
}
MIXED = {"quant_method": "modelopt", "quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": MIXED}}


@pytest.mark.parametrize(
    ("quantised", "bits"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 8),
        ({"quant_method": "mxfp4"}, 4.25),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 4 + 20 / 128),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32}, 4 + 20 / 32),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, 8),
        ({"quant_method": "auto-round", "bits": 2, "group_size": 64}, 2 + 18 / 64),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 8),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4.5),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 4.5),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "FP8"}}, 8),
        ({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp4", "group_size": 32}}}, 4.25),
        ({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp8_e4m3", "group_size": None}}}, 8),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "MXFP8", "group_size": 32}}, 8.25),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "W4A16_AWQ", "group_size": 64}}, 4.25),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "NVFP4", "exclude_modules": ["*.experts.*"]}}, 16),
        (MIXED, 4.5),
        ({"quant_method": "modelopt", "quant_algo": "INT٤"}, None),
        ({"quant_method": "fp8", "modules_to_not_convert": ["model.layers.3.mlp.experts"]}, 16),
        ({"quant_method": "fp8", "modules_to_not_convert": ["lm_head", "re:.*shared_experts.*"]}, 8),
        ({"quant_method": "a method to come"}, None),
        ({"quant_method": "modelopt", "quant_algo": "A TO COME"}, None),
    ],
)
def test_bits_of_a_quantised_weight(quantised, bits):
    config = SIZES | {"num_hidden_layers": 2, "moe_layers": [0, 1], "quantization_config": quantised}
    assert weight_bits(config) == bits
    shape = Shape.of(config)
    assert shape.weight_bits == (16 if bits is None else bits)
    assert [remark[:52] for remark in shape.remarks] == ["experts' weights are taken to have 16 bits: quantisa"][: bits is None]


def test_bits_of_compressed_tensors():
    def bits(weights, scheme="pack-quantized"):
        groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
        return weight_bits(
            {"quantization_config": {"quant_method": "compressed-tensors", "format": scheme, "config_groups": groups}}
        )

    assert bits({"num_bits": 4, "type": "int", "group_size": 32, "strategy": "group", "symmetric": True}) == 4.5
    assert bits({"num_bits": 4, "type": "int", "group_size": 32, "strategy": "group", "symmetric": False}) == 4 + 20 / 32
    assert bits({"num_bits": 8, "type": "float", "strategy": "channel"}, "float-quantized") == 8
    assert bits({"num_bits": 4, "type": "float", "group_size": 16, "strategy": "tensor_group"}, "nvfp4-pack-quantized") == 4.5


def test_experts_of_four_bits_beside_other_weights_of_eight():
    config = SIZES | {"num_hidden_layers": 1, "quantization_config": {"quant_method": "fp8"}}
    assert (weight_bits(config), Shape.of(config).expert_bytes) == (8, 3 * 8 * 8)
    assert weight_bits(config | {"expert_dtype": "fp4"}) == 4 + 8 / 32  # a scale of 8 bits for 32 numbers


@pytest.mark.parametrize(
    ("quantised", "bits"),
    [
        (None, 16),
        ({"quant_method": "fp8"}, 8),
        ({"quant_method": "mxfp4"}, 16),  # of experts alone
        ({"quant_method": "nvfp4", "ignore": ["model.layers.0.self_attn"]}, 16),
        ({"quant_method": "nvfp4", "ignore": ["lm_head"]}, 4.5),
    ],
)
def test_bits_outside_experts(quantised, bits):
    assert other_weight_bits({"quantization_config": quantised}) == bits
