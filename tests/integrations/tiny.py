"""Checkpoints of tiny random models whose experts matter: `python tiny.py NAME FOLDER`."""

import sys
from pathlib import Path

import torch
import transformers

SHARED = {
    "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256,
    "max_position_embeddings": 256, "tie_word_embeddings": False,
}  # fmt: skip
QWEN = {
    "intermediate_size": 96, "moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
CONFIGS = {
    "qwen3moe": ("Qwen3MoeConfig", SHARED | QWEN | {"head_dim": 32}),
    "qwen2moe": ("Qwen2MoeConfig", SHARED | QWEN | {"hidden_size": 128, "shared_expert_intermediate_size": 96}),
    "mixtral": (
        "MixtralConfig", SHARED | {"intermediate_size": 64, "num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 32},
    ),
    "olmoe": (
        "OlmoeConfig",
        SHARED | {"hidden_size": 128, "num_key_value_heads": 4, "intermediate_size": 64, "num_experts": 8,
                  "num_experts_per_tok": 3, "eos_token_id": None},
    ),
    "gptoss": (
        "GptOssConfig",
        SHARED | {"intermediate_size": 64, "num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 32,
                  "layer_types": ["full_attention"] * 3},
    ),
    "llama4": (
        "Llama4TextConfig",
        SHARED | {"intermediate_size": 64, "intermediate_size_mlp": 96, "num_local_experts": 8, "num_experts_per_tok": 1,
                  "head_dim": 32, "interleave_moe_layer_step": 1, "attn_temperature_tuning": False},
    ),
    "glm4moe": (
        "Glm4MoeConfig",
        SHARED | {"intermediate_size": 96, "moe_intermediate_size": 64, "n_routed_experts": 8, "num_experts_per_tok": 2,
                  "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "head_dim": 32},
    ),
}  # fmt: skip


def make(name: str, folder: Path, seed: int = 0) -> None:
    torch.manual_seed(seed)
    kind, sizes = CONFIGS[name]
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**sizes), dtype=torch.float32)
    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.ndim > 1:
                tensor.normal_(0, 0.15)
    model.save_pretrained(folder)


if __name__ == "__main__":
    make(sys.argv[1], Path(sys.argv[2]))
