"""Half and double of each constant of a GPU's memory and of EPLB's stalls: `python bench/gpu_memory.py` writes
bench/results/gpu-memory-DATE.md.

Nothing is measured. The model is DeepSeek-V3 (fp8) on 32 H200 by vLLM, with DeepEP's low-latency kernels and EPLB. Published
rearrangements that waited are from threads of vLLM, whose numbers the first column has.
"""

from dataclasses import replace
from unittest import mock

from tables import Table, write

from aurora.advisor import eplb_pays, gpu_memory
from aurora.advisor.engines import SERVING_ENGINES
from aurora.advisor.engines.engine import EplbSettings
from aurora.io.clusters import load_gpus

KINDS = load_gpus()
DEEPSEEK = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "n_routed_experts": 256,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "first_k_dense_replace": 3,
    "vocab_size": 129280, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "quantization_config": {"quant_method": "fp8"},
}  # fmt: skip
CONSTANTS = ("NCCL_BYTES", "DEEPEP_BYTES", "LOGIT_ROWS", "LOGIT_BYTES", "TABLE_REPLICAS")
STALLS = [  # thread, slots of a GPU, layers, bytes of an expert, GPUs, seconds
    ("43219", 9, 58, 24.8e6, "NVIDIA GB200", True, "0.91 (0.65-1.70)"),
    ("28369", 8, 26, 17.3e6, "NVIDIA H100 80GB HBM3", True, "0.26 (0.42 before)"),
    ("24116", 9, 58, 44.0e6, "NVIDIA H200", False, "up to 15"),
]


def main() -> None:
    """Writes both tables."""
    way = SERVING_ENGINES["vllm"].default(32, 8, 256)
    way = replace(way, exchange="deepep-ll", eplb=EplbSettings(1000, 3000), redundant=32)

    def fit(engine: gpu_memory.EngineMemory) -> gpu_memory.MemoryFit:
        with mock.patch.dict(gpu_memory.ENGINE_MEMORY, vllm=engine):
            return gpu_memory.memory_fit(DEEPSEEK, KINDS["NVIDIA H200"], way, 32, 1280, 1024)

    memory = Table("Constants of memory", "constant | half: GB, most tokens | as it is | double")
    vllm = gpu_memory.ENGINE_MEMORY["vllm"]
    for name in (*CONSTANTS, "graph_bytes"):
        cells = []
        for times in (0.5, 1, 2):
            engine = replace(vllm, graph_bytes=times * vllm.graph_bytes) if name == "graph_bytes" else vllm
            known = {"GIB": gpu_memory.GIB} if name == "graph_bytes" else {name: times * getattr(gpu_memory, name)}
            with mock.patch.multiple(gpu_memory, **known):
                found = fit(engine)
            cells.append(f"{found.parts.total / 1e9:.1f}, {found.most_tokens}")
        memory.add(name, *cells)
    stalls = Table("Rearrangements that wait", "vLLM | published, s | MOVE_S as it is | half | double")
    for thread, slots, layers, size, kind, inside, published in STALLS:
        seconds = []
        for times in (1, 0.5, 2):
            with mock.patch.object(eplb_pays, "MOVE_S", times * eplb_pays.MOVE_S):
                link = 0.7 * KINDS[kind].port_Bps if inside else 0.85 * 50e9
                seconds.append(f"{eplb_pays.rearrangement_s(slots, layers, size, KINDS[kind], link, waits=True):.2f}")
        stalls.add(thread, published, *seconds)
    write("gpu-memory", [__doc__ or ""], memory.lines, stalls.lines)


if __name__ == "__main__":
    main()
