"""Tiny random models of every MoE causal LM that transformers has, saved as folders with the shipped byte-level tokenizer."""

import dataclasses
import shutil

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from aurora.io import shipped
from aurora.models.loading import LOADING

SERVED = ("mixtral", "qwen2_moe", "deepseek_v3", "gpt_oss")  # by ranks in processes of their own
MOE_TYPES = (
    "afmoe", "aria_text", "axk1", "axk2", "bailing_hybrid", "beam", "cohere2_moe", "dbrx", "deepseek_v2", "deepseek_v3",
    "deepseek_v32", "deepseek_v4", "doge", "dots1", "dots3_note", "dots3_note_text", "ernie4_5_moe", "exaone_moe", "flex_olmo",
    "flint", "gemma4", "gemma4_text", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "gpt_oss", "granitemoe", "granitemoe_swa",
    "granitemoehybrid", "granitemoeshared", "hunyuan_v1_moe", "hy_v3", "hy_v4", "inkling2_text", "inkling_text", "jamba",
    "jetmoe", "kimi_linear", "kolibri1", "laguna", "lfm2_moe", "llama4", "llama4_text", "longcat_flash", "mellum",
    "mimo_v2_flash", "minimax", "minimax_m2", "minimax_m3_vl_text", "mixtral", "nemotron_h", "olmoe", "phimoe", "qwen2_moe",
    "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_moe", "qwen3_next", "qwen4_exp", "qwen4_exp_text", "solar_open", "zaya",
)  # fmt: skip
LAYERS = 4
SIZES = {
    "hidden_size": 32, "d_model": 32, "n_heads": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16,
    "num_hidden_layers": LAYERS, "n_layers": LAYERS, "vocab_size": 259, "max_position_embeddings": 256, "max_seq_len": 256,
    "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2, "sliding_window": 64,
    "intermediate_size": 24, "intermediate_size_mlp": 24, "moe_intermediate_size": 24, "ffn_hidden_size": 24,
    "expert_ffn_hidden_size": 24, "shared_intermediate_size": 16, "shared_expert_intermediate_size": 16,
    "shared_experts_intermediate_size": 16, "moe_shared_expert_intermediate_size": 16, "first_k_dense_replace": 1,
    "num_dense_layers": 1, "moe_layer_end_index": -1,
    "num_experts": 6, "num_local_experts": 6, "n_routed_experts": 6, "moe_num_experts": 6, "n_shared_experts": 1,
    "num_experts_per_tok": 2, "num_experts_per_token": 2, "moe_topk": 2, "moe_k": 2, "moe_top_k": 2, "top_k_experts": 2,
    "n_group": 2, "topk_group": 1, "num_expert_group": 2,
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "o_lora_rank": 8,
    "index_n_heads": 2, "index_head_dim": 8, "index_topk": 64, "mamba_d_state": 4, "mamba_n_heads": 4, "mamba_d_head": 16,
    "ssm_state_size": 4, "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2, "linear_head_dim": 8,
    "linear_num_heads": 2, "linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}  # fmt: skip
MAY_BE_NONE = ("head_dim", "n_routed_experts", "num_experts_per_tok", "n_shared_experts", "pad_token_id", "bos_token_id",
               "eos_token_id")  # fmt: skip
HYBRID = ["linear_attention", "full_attention"] * 2
SPECIAL = {
    "bailing_hybrid": {"layer_group_size": 2},
    "dots3_note": {"vision_config": {"adapter_out_dim": 32}, "audio_config": {"adapter_out_dim": 32}},
    "dots3_note_text": {
        "swa_num_attention_heads": 2, "swa_num_key_value_heads": 2, "swa_q_lora_rank": 8, "swa_kv_lora_rank": 8,
        "swa_head_dim": 16, "swa_qk_nope_head_dim": 8, "swa_v_head_dim": 8,
    },
    "gemma4_text": {
        "enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 24,
        "vocab_size_per_layer_input": 259, "hidden_size_per_layer_input": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "granitemoehybrid": {"layer_types": HYBRID},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 2},
    "kimi_linear": {"layer_types": HYBRID},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mimo_v2_flash": {"num_attention_heads": 4, "head_dim": 24, "v_head_dim": 16},
    "mixtral": {"num_local_experts": 5},
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention", "moe"], "moe_latent_size": 16},
    "qwen4_exp_text": {
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 64, "indexer_compress_ratio": 4,
    },
}  # fmt: skip


def registered_moe_types():
    """The model types of transformers' causal LMs whose config, or a part of it, has a number of experts."""
    return tuple(name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if _has_experts(CONFIG_MAPPING[name]))


def _has_experts(config_class):
    if not dataclasses.is_dataclass(config_class):  # it stands for configs of any type
        return False
    names = {field.name for field in dataclasses.fields(config_class)}
    parts = [part for key, part in config_class.sub_configs.items() if key in ("text_config", "ffn_config")]
    return any("experts" in name for name in names) or any(map(_has_experts, parts))


def tiny_config(name, **more):
    """A config of the model type `name` with the sizes above, or `more`."""
    config_class = CONFIG_MAPPING[name]
    if (text := config_class.sub_configs.get("text_config")) is not None:
        return config_class(text_config=tiny_config(text.model_type).to_dict(), **SPECIAL.get(name, {}))
    defaults = {field.name: field.default for field in dataclasses.fields(config_class)}
    sizes = {
        key: size for key, size in SIZES.items() if defaults.get(key) is not None or (key in defaults and key in MAY_BE_NONE)
    }
    if "qk_rope_head_dim" in defaults:
        sizes["head_dim"] = sizes["qk_rope_head_dim"]
    return config_class(**sizes | SPECIAL.get(name, {}) | more)


def build(name, folder, dtype=torch.float32):
    """Weights of a size at which experts matter to the output."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(tiny_config(name)).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.15)
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(shipped("models/mixtral-topics") / file, folder / file)
    return folder


def load_plain(folder, **options):
    """The model as transformers loads it, while no rank that is a thread loads one: two at once leave transformers changed."""
    with LOADING:
        return AutoModelForCausalLM.from_pretrained(folder, **options)
