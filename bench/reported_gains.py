"""Reported gains of balancing beside predicted ones: `python bench/reported_gains.py` writes a dated table to bench/results.

The reports are public, and their figures were known when this was written: nothing here is blind. Inputs and the way to
intervals were committed before predicted and reported figures were put side by side. No constant is fitted to a report: steps
are `aurora.advisor.step_time` with its shipped constants, and imbalance follows from how uneven experts' popularity is:

    load of a GPU over the mean varies by sqrt(variance / experts per GPU); the busiest of R GPUs is at 1 + Blom(R) of it

with variances of popularity from elsewhere (VARIANCE). What reports do not say (concurrency, lengths) is a range. An interval
spans what the ranges give, and is cut to POINTS around its middle. Tokens of a prompt choose alike: a second table has what
that adds to a step, by recorded routing; it is no part of the intervals.
"""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from routed_tasks import Traffic, deepseek
from scipy.special import ndtri
from tables import Table, write

from aurora.advisor.engines.engine import Layout
from aurora.advisor.gpu_memory import memory_bytes
from aurora.advisor.served_sizes import ServedSizes
from aurora.advisor.step_time import SchedulerStep, step_seconds
from aurora.io.clusters import load_gpus

POINTS = 0.10  # width of an interval at most
VARIANCE = {  # of experts' popularity over its mean
    "text": (0.35, 0.8),  # recorded routing of DeepSeek-V2-Lite and OLMoE, by layer and domain (medians)
    "random": (1.9, 1.9),  # aiconfigurator's log with random tokens: the busiest of 8 GPUs with 32 of 256 experts at 1.35
}
STATIC = (1.02, 1.03)  # what a map of other windows of the same traffic leaves of large steps
SPARE = (1.0, 1.01)  # with replicas
NVFP4 = {"quant_method": "nvfp4", "ignore": ["linear_attn", "self_attn", "shared_expert"]}  # of NVIDIA's checkpoint
QWEN = {  # Qwen/Qwen3.5-397B-A17B, config.json
    "num_hidden_layers": 60,
    "hidden_size": 4096,
    "vocab_size": 248320,
    "num_attention_heads": 32,
    "head_dim": 256,
    "num_key_value_heads": 2,
    "attn_output_gate": True,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 64,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 1024,
    "decoder_sparse_step": 1,
    "shared_expert_intermediate_size": 1024,
    "quantization_config": {"quant_method": "nvfp4"},
}
PRO = {  # deepseek-ai/DeepSeek-V4-Pro, config.json
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "vocab_size": 129280,
    "num_attention_heads": 128,
    "head_dim": 512,
    "num_key_value_heads": 1,
    "q_lora_rank": 1536,
    "o_lora_rank": 1024,
    "o_groups": 16,
    "sliding_window": 128,
    "hc_mult": 4,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 1024,
    "n_routed_experts": 384,
    "num_experts_per_tok": 6,
    "n_shared_experts": 1,
    "moe_intermediate_size": 3072,
    "expert_dtype": "fp4",
    "first_k_dense_replace": 0,
    "compress_ratios": [128, 128, *[4, 128] * 29, 4, 0],
    "quantization_config": {"quant_method": "fp8"},
}
R1 = {  # deepseek-ai/DeepSeek-R1, config.json
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "vocab_size": 129280,
    "num_attention_heads": 128,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "intermediate_size": 18432,
    "first_k_dense_replace": 3,
    "n_group": 8,
    "topk_group": 4,
    "quantization_config": {"quant_method": "fp8"},
}


@dataclass(frozen=True)
class Report:
    """A reported gain and what is known of how it was measured.

    Attributes:
        name: what was compared.
        source: where it is reported.
        reported: gains of throughput, least and most.
        config: the model's.
        kind: of the GPUs.
        layout: of the engine.
        exchange: as in step_seconds.
        steps: what a rank may have run; the report does not say which.
        before, after: imbalance, least and most.
        cost_s: seconds that the method adds to a step, least and most.
        seconds: of experts before over after, least and most, where chance in small steps and not the rows decides; else None.
        nic_Bps: of a GPU, where several servers are.
    """

    name: str
    source: str
    reported: tuple[float, float]
    config: Mapping[str, Any]
    kind: str
    layout: Layout
    exchange: str
    steps: tuple[SchedulerStep, ...]
    before: tuple[float, float] = (1.0, 1.0)
    after: tuple[float, float] = (1.0, 1.0)
    cost_s: tuple[float, float] = (0.0, 0.0)
    seconds: tuple[float, float] | None = None
    nic_Bps: float | None = None


def busiest(variance: float, experts: int, gpus: int) -> float:
    """Returns the expected load of the busiest GPU over the mean, of experts in sequence whose popularity varies so."""
    return float(1 + ndtri((gpus - 0.375) / (gpus + 0.25)) * np.sqrt(variance * gpus / experts))


def spread(kind: str, experts: int, gpus: int) -> tuple[float, float]:
    """Returns least and most imbalance of experts in sequence."""
    low, high = (busiest(variance, experts, gpus) for variance in VARIANCE[kind])
    return low, high


def active_ratio(variance: float, tokens: int, seed: int = 0) -> float:
    """Returns active experts of the busiest of 16 GPUs, in sequence over round robin, for DeepSeek-R1's group-limited router.

    Scores are logarithms of gamma popularity with Gumbel noise; a token takes the four groups of eight with the highest sum of
    two scores, and eight experts of those.
    """
    rng = np.random.default_rng(seed)
    most = np.zeros(2)
    for _ in range(400):
        popular_E = np.log(rng.gamma(1 / variance, variance, 256) + 1e-9)
        score_TE = popular_E + rng.gumbel(size=(tokens, 256))
        group_TG = np.sort(score_TE.reshape(tokens, 8, 32), axis=2)[:, :, -2:].sum(axis=2)
        allowed_TG = np.argsort(group_TG, axis=1)[:, -4:]
        kept_TE = np.full((tokens, 8, 32), -np.inf)
        for token, groups in enumerate(allowed_TG):
            kept_TE[token, groups] = score_TE[token].reshape(8, 32)[groups]
        active_E = np.unique(np.argsort(kept_TE.reshape(tokens, 256), axis=1)[:, -8:])
        most += [np.bincount(active_E // 16, minlength=16).max(), np.bincount(active_E % 16, minlength=16).max()]
    return float(most[0] / most[1])


def alike_within_prompts(traffic: Traffic, experts: int, gpus: int) -> float:
    """Returns the intra-class correlation of choices of a prompt's tokens for GPUs with experts in sequence; 0: independent.

    Source: the method of moments, Williams, Applied Statistics 31(2), 1982.
    """
    layers, top_k = traffic.experts_ULK.shape[1:]
    prompts, prompt_U = np.unique(traffic.sequence_U, return_inverse=True)
    chosen_UG = np.zeros((len(prompts), layers, gpus))
    gpu_ULK = traffic.experts_ULK.astype(np.int64) * gpus // experts
    np.add.at(chosen_UG, (prompt_U[:, None, None], np.arange(layers)[:, None], gpu_ULK), 1)
    pairs_U = np.bincount(prompt_U)[:, None, None] * top_k
    share_LG = chosen_UG.sum(axis=0) / pairs_U.sum()
    chance = pairs_U * share_LG * (1 - share_LG)
    return float((((chosen_UG - pairs_U * share_LG) ** 2).sum() - chance.sum()) / ((pairs_U - 1) * chance).sum())


def decode(requests: int, length: int) -> SchedulerStep:
    """Returns a step of so many requests with sequences of so many tokens."""
    return SchedulerStep(decode_requests=requests, kv_tokens=requests * length)


def reports() -> tuple[Report, ...]:
    """Returns the eight reports with their inputs."""
    eight, sixteen = Layout(data=8, expert=8), Layout(data=16, expert=16)
    qwen = spread("text", 512, 8)
    qwen_steps = (decode(8, 1000), decode(32, 1000), decode(128, 1000), SchedulerStep(prefill_tokens=4096, decode_requests=32))
    pro, pro_steps = spread("random", 384, 8), (SchedulerStep(prefill_tokens=8192),)
    vllm, atom = "vllm-project/vllm pull 41141", "ROCm/ATOM pull 1210"
    h20 = {"kind": "NVIDIA H20", "config": R1, "layout": sixteen, "exchange": "deepep", "nic_Bps": 50e9}
    linear_over_round = [active_ratio(variance, 8) for variance in VARIANCE["text"]]
    return (
        Report(
            "offline map over none", vllm, (0.034, 0.038), QWEN, "NVIDIA B200", eight, "allgather", qwen_steps, qwen, STATIC
        ),
        Report(  # vLLM's defaults: 3,000 steps between rearrangements, which stop serving for 0.3 to 1 s
            "online EPLB over none", vllm, (0.019, 0.019), QWEN, "NVIDIA B200", eight, "allgather", qwen_steps, qwen, STATIC,
            cost_s=(0.3 / 3000, 1 / 3000),
        ),
        Report(
            "rearranged over none", atom, (0.167, 0.167), PRO, "AMD Instinct MI355X", eight, "mori-ht", pro_steps, pro, STATIC
        ),
        Report(
            "64 redundant over none", atom, (0.244, 0.244), PRO, "AMD Instinct MI355X", eight, "mori-ht", pro_steps, pro, SPARE
        ),
        Report(
            "64 redundant, biased, over none", atom, (0.34, 0.34), PRO, "AMD Instinct MI355X", eight, "mori-ht", pro_steps,
            pro, (1.0, 1.0),
        ),
        Report(  # per step: what random choice of replicas leaves of EPLB's balance; a solver of 50 to 150 us a layer
            "LPLB over EPLB's random choice of replicas", "sgl-project/sglang pull 24515", (0.01, 0.05),
            steps=(decode(128, 1000), SchedulerStep(prefill_tokens=1024, decode_requests=64)), before=(1.08, 1.15),
            after=(1.01, 1.03), cost_s=(58 * 50e-6, 58 * 150e-6), **h20,
        ),
        Report(  # eight requests on 16 ranks
            "round robin over sequence", "vllm-project/vllm pull 28449", (0.1457, 0.1457), steps=(decode(1, 1300),),
            seconds=(min(linear_over_round), max(linear_over_round)), **h20,
        ),
        Report(
            "CRAFT over EPLB with a replica a GPU and layer", "arXiv:2603.28768, mean over models", (0.14, 0.14), R1,
            "NVIDIA H100 80GB HBM3", Layout(data=64, expert=64), "deepep", (decode(64, 4000),), nic_Bps=50e9,
        ),
    )  # fmt: skip


def gains(report: Report) -> list[float]:
    """Returns gains of throughput over the ranges of a report's inputs."""
    sizes, kind = ServedSizes.of(report.config), load_gpus()[report.kind]
    found = []
    for step, before, after, cost_s in product(report.steps, report.before, report.after, report.cost_s):

        def seconds(imbalance: float, step: SchedulerStep = step) -> Any:
            return step_seconds(
                sizes, kind, report.layout, step, imbalance=imbalance, exchange=report.exchange, nic_Bps=report.nic_Bps
            )

        then = seconds(after)
        if report.seconds is not None:
            found += [then.experts_s * (ratio - 1) / then.total for ratio in report.seconds]
        else:
            found.append(seconds(before).total / (then.total + cost_s) - 1)
    if report.name.startswith("CRAFT"):
        found = [gain + of_cache for gain in found for of_cache in cache_gains(report)]
    return found


def cache_gains(report: Report) -> tuple[float, float]:
    """Returns gains by the memory of replicas that CRAFT leaves to the cache: none, or throughput by the cache's size.

    EPLB has a replica on each GPU and layer; CRAFT as much balance with few of them.
    """
    sizes, kind = ServedSizes.of(report.config), load_gpus()[report.kind]
    free = 0.85 * kind.memory_bytes - memory_bytes(report.config, report.layout, 0).total
    replicas = sizes.moe_layers * sizes.expert_bytes
    return 0.0, free / (free - replicas) - 1


def interval(values: list[float]) -> tuple[float, float]:
    """Returns the span of values, cut to POINTS around its middle."""
    low, high = min(values), max(values)
    middle, half = (low + high) / 2, min(high - low, POINTS) / 2
    return middle - half, middle + half


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    table = Table("Reported and predicted gains", "report | source | reported | predicted | inside")
    inside = 0
    for report in reports():
        low, high = interval(gains(report))
        hit = low <= report.reported[0] and report.reported[1] <= high
        inside += hit
        shown = " to ".join(f"{value:+.1%}" for value in dict.fromkeys(report.reported))
        table.add(report.name, report.source, shown, f"{low:+.1%} to {high:+.1%}", "yes" if hit else "no")
    table.lines += ["", f"Inside: {inside} of {len(reports())}."]
    about = "Added: to the load of the busiest of 8 GPUs over the mean, in a step of 8 prompts of 8,192 tokens."
    alike = Table("Tokens of a prompt that choose alike", "DeepSeek-V2-Lite, task | prompts | correlation | added", about)
    recorded = deepseek(list(range(26)))
    for name, task in () if recorded is None else recorded.tasks.items():
        correlation = alike_within_prompts(task, 64, 8)
        pairs, top_k = 8 * 8192 * 6, 6
        more = float(ndtri((8 - 0.375) / 8.25)) * np.sqrt(7 / pairs * max(0.0, (8192 * top_k - 1) * correlation))
        alike.add(name, len(np.unique(task.sequence_U)), f"{correlation:.4f}", f"{more:.1%}")
    write("reported-gains", [__doc__.strip()], table.lines, alike.lines, out=out)


if __name__ == "__main__":
    main()
