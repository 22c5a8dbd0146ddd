"""A stand-in for aiconfigurator-core: one system of four GPUs with a few rows in each table."""

from pathlib import Path

import pytest

SPECS = """
gpu: {mem_capacity: 1000000, mem_bw: 1000, mem_empirical_constant_latency: 0.5}
node: {num_gpus_per_node: 4, intra_node_bw: 500}
"""
CONFIG = {
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
MOE = {"moe_dtype": "bfloat16", "distribution": "balanced", "moe_tp_size": 1, "topk": 2, "num_experts": 4, "kernel_source": "k"}
GEMM = {"gemm_dtype": "bfloat16"}
ATTENTION = {
    "attn_dtype": "bfloat16",
    "kv_cache_dtype": "bfloat16",
    "step": 0,
    "num_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "batch_size": 1,
    "window_size": 0,
}


def nccl(operation, dtype, gpus, elements, milliseconds):
    """A row of NCCL's table."""
    return {
        "op_name": operation,
        "nccl_dtype": dtype,
        "num_gpus": gpus,
        "message_size": elements,
        "latency": milliseconds,
        "device": "NVIDIA One",
    }


def write(folder, name, rows):
    """Write a table."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    folder.mkdir(parents=True)
    parquet.write_table(arrow.table({key: [row[key] for row in rows] for key in rows[0]}), folder / f"{name}.parquet")


def install(folder: Path, monkeypatch, name: str = "aiconfigurator_core") -> Path:
    """Makes the package importable, with specs of the systems `one` and `unmeasured`; returns the folder of one's tables."""
    package = folder / name
    (package / "systems" / "data" / "one").mkdir(parents=True)
    (package / "__init__.py").touch()
    for system in ("one", "unmeasured"):
        (package / "systems" / f"{system}.yaml").write_text(SPECS)
    monkeypatch.syspath_prepend(folder)
    return package / "systems" / "data" / "one"


def write_all(tables: Path) -> None:
    """Write all tables of a system; an older version has the model's experts, the newest another model's."""
    write(tables / "comm" / "nccl" / "2.9", "nccl_perf", [nccl("alltoall", "int8", 2, 2000, 1000.0)])
    moe = [
        MOE | {"hidden_size": 8, "inter_size": 16, "moe_ep_size": ep, "num_tokens": tokens, "latency": tokens * 1e3 / ep}
        for ep in (1, 2, 4)
        for tokens in (2, 4, 8)
    ]
    write(tables / "moe" / "vllm" / "0.9", "moe_perf", moe)
    write(tables / "moe" / "vllm" / "0.10", "moe_perf", [row | {"hidden_size": 64} for row in moe])
    gemm = [GEMM | {"m": m, "n": n, "k": k, "latency": m * n * k} for m in (1, 64) for n in (4, 32) for k in (4, 32)]
    write(tables / "gemm" / "vllm" / "0.9", "gemm_perf", gemm)
    attention = [ATTENTION | {"isl": tokens, "latency": 7.0 * tokens} for tokens in (1, 64)]
    write(tables / "attention" / "vllm" / "0.9", "context_attention_perf", attention)
