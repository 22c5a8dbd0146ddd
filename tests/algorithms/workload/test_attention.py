"""What attention caches, by hand from configs."""

import pytest

from aurora.algorithms.workload.attention import attention_layers, kv_bytes_per_sequence, kv_bytes_per_token
from aurora.errors import BadInput

GROUPED = {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16}
LATENT = GROUPED | {"kv_lora_rank": 32, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
WINDOWS = GROUPED | {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 10}
DELTA = GROUPED | {
    "full_attention_interval": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4,
}  # fmt: skip
COMPRESSED = GROUPED | {  # the last ratio is of the layer of multi-token prediction
    "compress_ratios": [0, 4, 128, 4, 0], "q_lora_rank": 24, "o_lora_rank": 24, "o_groups": 2, "sliding_window": 10,
    "index_topk": 8, "index_n_heads": 4, "index_head_dim": 128,
}  # fmt: skip


def test_grouped_heads_are_split_as_far_as_there_are():
    a_layer = 2 * 2 * 16 * 2  # keys and values, two heads, width, bytes
    assert kv_bytes_per_token(GROUPED) == 4 * a_layer
    assert kv_bytes_per_token(GROUPED, tensor=2) == 4 * a_layer / 2
    assert kv_bytes_per_token(GROUPED, tensor=8) == 4 * a_layer / 2


def test_latent_attention_is_whole_on_every_rank():
    assert kv_bytes_per_token(LATENT) == kv_bytes_per_token(LATENT, tensor=8) == 4 * (32 + 8) * 2
    heads, plain, values = (LATENT[name] for name in ("num_attention_heads", "qk_nope_head_dim", "v_head_dim"))
    (layers,) = attention_layers(LATENT)
    assert layers.pair_flops == 2 * heads * (2 * 32 + 8)  # answers: with the cache's 32 + 8 numbers, and 32 back
    assert layers.prompt_pair_flops == 2 * heads * (plain + 8 + values)  # prompts: with expanded keys and values
    assert layers.expand_flops == 2 * heads * 32 * (plain + values)


def test_an_indexer_has_a_key_for_each_token():
    indexed = LATENT | {"index_topk": 4, "index_n_heads": 4, "index_head_dim": 128}
    assert kv_bytes_per_token(indexed) == 4 * ((32 + 8) * 2 + 132)
    shared = indexed | {
        "indexer_types": ["full", "shared", "full", "shared"]
    }  # two layers attend to what others' indexers chose
    assert kv_bytes_per_token(shared) == 4 * (32 + 8) * 2 + 2 * 132
    assert [(of.kind, of.layers, of.index_flops, of.chosen) for of in attention_layers(shared)] == [
        ("sparse", 2, 2 * 4 * 128, 4),
        ("sparse", 2, 0, 4),
    ]


def test_windows_and_states_take_the_same_whatever_the_length():
    a_layer = 2 * 2 * 16 * 2
    assert kv_bytes_per_token(WINDOWS) == 2 * a_layer
    assert kv_bytes_per_sequence(WINDOWS) == 2 * a_layer * 10
    assert kv_bytes_per_token(DELTA) == a_layer  # one layer of four
    states = 4 * 8 * 8 * 4 + (2 * 2 * 8 + 4 * 8) * 3 * 2  # of float32; of the convolution at half precision
    assert kv_bytes_per_sequence(DELTA) == 3 * states


def test_compressed_entries_are_fewer():
    entry = 16 * 2
    assert kv_bytes_per_token(COMPRESSED) == 2 * (entry + 132) / 4 + entry / 128
    assert kv_bytes_per_sequence(COMPRESSED) == 4 * 10 * entry


def test_bad_configs():
    sideways = GROUPED | {"layer_types": ["sideways"] * 4}
    for config, message in (({"num_hidden_layers": 2, "hidden_size": 8}, "heads of attention"), (sideways, "found sideways")):
        with pytest.raises(BadInput, match=message):
            attention_layers(config)


def test_patterns_name_layers_without_attention():
    config = GROUPED | {"hybrid_override_pattern": "M*E*"} | {"mamba_num_heads": 2, "mamba_head_dim": 4, "ssm_state_size": 8}
    assert [(each.kind, each.layers) for each in attention_layers(config)] == [("linear", 1), ("full", 2)]


def test_a_token_attends_to_its_window_and_to_entries_beyond():
    sliding, full = attention_layers(WINDOWS)
    assert (sliding.attended(4), sliding.attended(40), sliding.held(40)) == (4, 10, 10)
    assert (full.attended(40), full.held(40)) == (40, 40)
    near, chosen, every = attention_layers(COMPRESSED)
    assert near.attended(400) == near.held(400) == 10  # a window alone
    assert (chosen.attended(400), chosen.held(400)) == (10 + 8, 10 + 100)  # eight of the entries of four tokens
    assert every.attended(1280) == every.held(1280) == 10 + 10
