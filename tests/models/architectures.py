"""Tiny random models of every architecture that aurora names, saved as folders with the shipped byte-level tokenizer."""

import shutil

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    MixtralConfig,
    OlmoeConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from aurora.io import shipped

SHAPE = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 259,
    "max_position_embeddings": 256, "num_experts_per_tok": 2, "pad_token_id": 0, "eos_token_id": 1, "intermediate_size": 24,
}  # fmt: skip
MLA = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "head_dim": 8}
DEEPSEEK = {**SHAPE, **MLA, "num_hidden_layers": 3, "first_k_dense_replace": 1, "n_routed_experts": 6, "n_shared_experts": 1,
            "moe_intermediate_size": 24, "n_group": 2, "topk_group": 1}  # fmt: skip

CONFIGS = {
    "mixtral": lambda: MixtralConfig(**SHAPE, num_local_experts=5),
    "qwen2_moe": lambda: Qwen2MoeConfig(**SHAPE, num_experts=6, moe_intermediate_size=24, shared_expert_intermediate_size=16),
    "qwen3_moe": lambda: Qwen3MoeConfig(**SHAPE, num_experts=7, moe_intermediate_size=24, head_dim=16),
    "olmoe": lambda: OlmoeConfig(**SHAPE, num_experts=8),
    "deepseek_v2": lambda: DeepseekV2Config(**DEEPSEEK, topk_method="greedy"),
    "deepseek_v3": lambda: DeepseekV3Config(**DEEPSEEK),
}


def build(name, folder):
    """Weights of a size at which experts matter to the output."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]()).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.15)
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(shipped("models/mixtral-topics") / file, folder / file)
    return folder
