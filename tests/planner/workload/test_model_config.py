"""Which decoder layers have experts, by what configs of transformers say."""

import pytest

from aurora.errors import BadInput
from aurora.planner.workload.model_config import (
    Shape,
    dense_layers,
    expert_groups,
    moe_layers,
    one_moe_layer,
    top_k,
    weight_format,
)

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
    assert Shape.of(one_moe_layer(SIZES | config)).moe_layers == (0,)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"first_k_dense_replace": "three"}, "first_k_dense_replace does not say which of 6 layers have experts: three"),
        ({"mlp_layer_types": ["dense"]}, "mlp_layer_types does not say which"),
        ({"moe_layer_freq": 0}, "moe_layer_freq does not say which"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step does not say which"),
        ({"mlp_only_layers": 3}, "mlp_only_layers does not say which"),
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
    with pytest.raises(BadInput, match=r"expected a whole number above zero under .*moe_topk"):
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


@pytest.mark.parametrize(
    ("quantised", "named", "expert_bytes"),
    [
        (None, "bfloat16", 2 * 3 * 64 * 32),
        ({"quant_method": "fp8"}, "fp8", 3 * 64 * 32),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8_block", 3 * 64 * 32),
        ({"quant_method": "mxfp4"}, "w4a16_mxfp4", 3 * 64 * 32 * 17 // 32),
        ({"quant_method": "awq"}, "awq", 2 * 3 * 64 * 32),
    ],
)
def test_weights_have_the_type_of_the_config(quantised, named, expert_bytes):
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    }
    config = sizes | ({} if quantised is None else {"quantization_config": quantised})
    assert (weight_format(config), Shape.of(config).expert_bytes) == (named, expert_bytes)
    assert weight_format({"text_config": sizes, "quantization_config": quantised}) == named
