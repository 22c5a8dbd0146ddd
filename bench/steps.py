"""Predicted against measured scheduler steps: `python bench/steps.py` writes bench/results/steps-DATE.md.

Steps are read from AURORA_DATA (default ../shared/data): gpu_steps, measured with vLLM 0.20.1 on one server of eight B300.
Nothing is timed here. Errors are |predicted / measured - 1| of clean rows (empty flag).

"shipped" uses the constants as shipped, of which FREE are fitted to qwen36_tp1_dp1_ep1 and the others come from tables.
"fitted on RUN" fits all constants to that run alone, from START on: clean rows, each phase weighing alike, and sums of blocks.
Both are judged on the other runs of the model. AISimulate is as it comes, on the same rows; its tables are of vLLM 0.24.0.

DeepSeek-V4-Flash: hyper-connections, padded heads and experts at 16 bits are of engines' source and public kernels' times;
index_share and choice_s are fitted to dsv4_tp4_dp1_ep4, and dsv4_tp1_dp1_ep1 is held out.

What is not blind: the numbers of kernels and launches of a layer (KERNELS, BROKEN, PASSES, COLLECTIVE_LAUNCHES in
`aurora/advisor/step_time.py`) are estimates by hand, and were set with all runs of this data in view. One launch less or more
for a collective moves prefill of several ranks by 4 to 9 %.

Other GPUs: fused experts (gpu_moe_aiconfigurator, bf16, SGLang's Triton kernels, balanced) and DeepEP's exchanges on servers of
eight H100, beside what is predicted with the shares of `profiles/gpus.toml`. The shares of large kernels, and the NICs' rate
(low-latency kernels, many tokens), are taken from these tables. To published steps nothing is fitted.
"""

import argparse
import csv
import json
import os
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares
from tables import Table, write

from aurora.advisor.engines.engine import Layout
from aurora.advisor.served_sizes import ServedSizes
from aurora.advisor.step_constants import DEFAULT, StepConstants
from aurora.advisor.step_time import SchedulerStep, step_seconds
from aurora.io.clusters import load_gpus
from aurora.types import GpuKind

DATA = Path(os.environ.get("AURORA_DATA", Path(__file__).parents[2] / "shared" / "data")) / "gpu_steps"
FILES = {
    "Qwen3.6-35B-A3B": ("steps_qwen36_35b_a3b.csv", "qwen36_tp1_dp1_ep1"),
    "DeepSeek-V4-Flash": ("steps_dsv4_flash.csv", "dsv4_tp4_dp1_ep4"),
    "Qwen3-32B": ("steps_qwen3_32b_dense_control.csv", "qwen3_32b_tp1"),
}  # file of a model, and the configuration whose rows its constants are fitted to
FREE = ("grouped_share", "linear_share", "evenness", "kernel_s", "launch_s", "eager_s", "step_s")  # fitted for DEFAULT
AISIMULATE = {
    "Qwen3.6-35B-A3B": "Qwen/Qwen3.5-35B-A3B",  # of the same sizes, whose config it ships
    "DeepSeek-V4-Flash": "deepseek-ai/DeepSeek-V4-Flash",
    "Qwen3-32B": "Qwen/Qwen3-32B",
}
START = StepConstants(
    memory_share=0.83,  # AISimulate's tables of B300: grouped kernels that read all experts, 6.7 of 8.0 TB/s
    flops_share=0.6,  # AISimulate: dense products of 4,096 rows and more
    grouped_share=0.4,  # the same tables: Qwen3.6's experts with 8,192 tokens and more, activations counted apart
    attention_share=0.4,
    linear_share=0.06,  # chunked gated delta rule of Qwen3.6 on B300: 34 GFLOP in 0.19 to 0.32 ms
    index_share=0.22,  # dsv4_tp4_dp1_ep4: prompts of more than 512 tokens, with and without earlier chunks, all else as it is
    choice_s=2.1e-7,  # the same fit
    hyper_s=28e-6,  # vLLM's kernels before and after half a layer, 1 to 64 tokens on one B200 (mirage-project/mirage pull 677)
    quantised_share=0.6,  # median of eight, 0.24 to 0.80: vllm's pulls 13932 (DeepGEMM, Triton), 24700 and 53710, sglang's pull
    # 11730, flashinfer's pull 5301, and DeepSeek-V4-Flash's steps on one and four B300
    evenness=2.0,  # recorded routing of DeepSeek-V2-Lite and OLMoE: variances of popularity 0.35 to 0.8
    kernel_s=3e-6,  # AISimulate's system file of B300: constant latency of a memory operation
    launch_s=20e-6,
    eager_s=20e-6,  # vLLM's all-reduce outside graphs, small messages on B300: 20 us
    step_s=5e-4,
    reduce_s=7e-6,  # the same within graphs
    collective_s=5.5e-6,  # NCCL's allgather and reduce-scatter on 2, 4, 8 B300: 8, 10.6, 16 us
    collective_rank_s=1.3e-6,
    link_share=0.7,  # NCCL on eight A100 and H100, 67 MB and more: 0.56 to 0.72 of the link; all-reduces on H100 0.8 to 0.96
    small_share=0.2,  # the same, up to 1 MB
    large_s=16e-6,  # the same: from 1 MB on, beyond what bytes take
    nic_share=0.85,  # DeepEP on 2 to 8 servers of H100: 41 to 46 of 50 GB/s
    coordination_s=5e-4,
)  # where fits start
TABLES = DATA.parent / "gpu_moe_aiconfigurator"
TABLE_KINDS = {"a100_sxm": "NVIDIA A100-SXM4-80GB", "h100_sxm": "NVIDIA H100 80GB HBM3", "l40s": "NVIDIA L40S"}
MANY = 256  # tokens of a rank, from which DeepEP's host side is hidden
ROWS = ((0, 64), (64, 1024), (1024, 1 << 30))  # of an expert
STEP_ERROR, START_ERROR = 0.05, 0.25  # of steps, beyond which they weigh less, and of constants where a fit starts (logarithms)
FLASH = "DeepSeek-V4-Flash"
MODEL = "Qwen3.6-35B-A3B"  # whose configuration the shipped constants are fitted to
KIND = "NVIDIA B300 SXM6 AC"
SIZES = ((0, "all"), (1, "up to 512 tokens"), (2, "above 512 tokens"))


@dataclass(frozen=True)
class Row:
    """A measured step, or the chunks of one prompt.

    Attributes:
        run: its configuration.
        layout: of the configuration.
        phase: context, decode, mixed or prefill_request.
        steps: what ran; several for a prompt in chunks.
        seconds: median.
    """

    run: str
    layout: Layout
    phase: str
    steps: tuple[SchedulerStep, ...]
    seconds: float

    @property
    def tokens(self) -> int:
        """Tokens of all its steps."""
        return sum(step.tokens for step in self.steps)


def configs() -> dict[str, dict[str, Any]]:
    """Returns the configs of the models by name, from the sizes beside the measurements."""
    facts = json.loads((DATA / "model_facts.json").read_text())

    def flat(name: str, *parts: str) -> dict[str, Any]:
        model = facts[name]
        values = {key: value for key, value in model.items() if not isinstance(value, dict)}
        for part in parts:
            values |= {key: value for key, value in model[part].items() if not isinstance(value, dict)}
        return values

    flash = flat("deepseek-ai/DeepSeek-V4-Flash", "attention")
    flash |= facts["deepseek-ai/DeepSeek-V4-Flash"]["attention"]["indexer"]
    dense = flash.pop("dense_first_layers")
    ratios = [0, 0, *(4 if layer % 2 == 0 else 128 for layer in range(41)), 0]  # as the facts tell in words
    flash |= {"compress_ratios": ratios, "first_k_dense_replace": dense, "expert_dtype": "fp4"}
    flash["hc_mult"] = facts["deepseek-ai/DeepSeek-V4-Flash"]["hyper_connections"]["hc_mult"]
    flash |= {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    qwen = flat("Qwen/Qwen3.6-35B-A3B", "full_attention", "linear_attention")
    return {
        "Qwen3.6-35B-A3B": qwen | {"attn_output_gate": True, "decoder_sparse_step": 1},
        "DeepSeek-V4-Flash": flash,
        "Qwen3-32B": flat("Qwen/Qwen3-32B (dense control)"),
    }


def rows_of(name: str) -> list[Row]:
    """Returns the clean rows of a file."""
    with (DATA / name).open() as file:
        read = [row for row in csv.DictReader(file) if row["phase"] != "prefill_request" or not row["flag"]]
    rows = []
    for row in read:
        if row["flag"]:
            continue
        layout = Layout(*(int(row[key] or 1) for key in ("tp", "dp", "ep")))
        step = step_of(row)
        steps = chunks(read, row["run"], step.prefill_tokens) if row["phase"] == "prefill_request" else (step,)
        rows.append(Row(row["run"], layout, row["phase"], steps, float(row["latency_ms_median"]) / 1e3))
    return rows


def chunks(read: Iterable[dict[str, str]], run: str, tokens: int) -> tuple[SchedulerStep, ...]:
    """Returns the steps of one prompt, in the two chunks that the run has such rows of, else in one."""
    alone = [row for row in read if row["run"] == run and row["phase"] == "context" and row["prefill_requests"] == "1"]
    starts = {int(row["prefill_tokens"]) for row in alone if row["kv_tokens"] == "0"}
    for row in alone:
        first, rest = int(row["kv_tokens"]), int(row["prefill_tokens"])
        if first + rest == tokens and first in starts:
            return SchedulerStep(first), SchedulerStep(rest, kv_tokens=first)
    return (SchedulerStep(tokens),)


@cache
def sizes() -> dict[str, ServedSizes]:
    """Returns the sizes of the models."""
    return {name: ServedSizes.of(config) for name, config in configs().items()}


def predict(model: str, kind: GpuKind, row: Row, constants: StepConstants) -> float:
    """Returns predicted seconds of a row."""
    return sum(step_seconds(sizes()[model], kind, row.layout, step, constants=constants).total for step in row.steps)


def fit(
    constants: StepConstants,
    sizes: ServedSizes,
    kind: GpuKind,
    layout: Layout,
    steps: Sequence[SchedulerStep | Mapping[SchedulerStep, float]],
    measured_s: Sequence[float],
    weights: Sequence[float] | None = None,
    names: Sequence[str] | None = None,
) -> StepConstants:
    """Returns constants by measured steps of one configuration: least squares of logarithms, outliers weighing less.

    Constants that the steps say nothing about stay as they are.

    Args:
        constants: where the fit starts.
        sizes, kind, layout: as in `step_seconds`.
        steps: what was run; steps that were timed together as a mapping to how many they were.
        measured_s: seconds of each entry.
        weights: of the entries; None: alike.
        names: of the constants that are fitted; None: all.

    """
    names = [field.name for field in fields(StepConstants)] if names is None else names
    start, log_measured = np.log([getattr(constants, name) for name in names]), np.log(measured_s)
    roots = np.sqrt(np.ones(len(steps)) if weights is None else np.asarray(weights))
    counted = [{step: 1.0} if isinstance(step, SchedulerStep) else step for step in steps]

    def with_logs(logs: Any) -> StepConstants:
        return replace(constants, **{name: float(np.exp(log)) for name, log in zip(names, logs, strict=True)})

    def residuals(logs: Any) -> Any:
        tried = with_logs(logs)
        predicted = [
            sum(many * step_seconds(sizes, kind, layout, step, constants=tried).total for step, many in each.items())
            for each in counted
        ]
        apart = (np.log(predicted) - log_measured) / STEP_ERROR
        robust = np.sign(apart) * np.sqrt(2 * np.sqrt(1 + apart**2) - 2)  # soft L1 as a residual
        return np.concatenate([roots * robust, (logs - start) / START_ERROR])

    upper = [0.0 if name.endswith("_share") else np.inf for name in names]
    return with_logs(least_squares(residuals, start, bounds=(-np.inf, upper)).x)


def fitted(model: str, kind: GpuKind, rows: Sequence[Row], names: Sequence[str] | None = None) -> StepConstants:
    """Returns constants by one configuration: its clean rows, each phase weighing alike, and sums of its blocks of traffic."""
    name, run = FILES[model]
    mine = [row for row in rows if row.run == run]
    steps: list[Any] = [dict.fromkeys(row.steps, 1.0) for row in mine]
    seconds, phases = [row.seconds for row in mine], [row.phase for row in mine]
    for block, seconds_of_block in sums(name, run):
        steps.append(block)
        seconds.append(seconds_of_block)
        phases.append("block")
    weights = [10 / phases.count(phase) for phase in phases]
    return fit(START, sizes()[model], kind, mine[0].layout, steps, seconds, weights, names)


def sums(name: str, run: str) -> list[tuple[dict[SchedulerStep, float], float]]:
    """Returns the steps of each block of traffic with their counts, and its seconds without stalls.

    Left out are blocks of which stalls or unstable steps are more than a tenth.
    """
    with (DATA / "workload_sums.csv").open() as file:
        blocks = {row["workload"]: row for row in csv.DictReader(file) if row["run"] == run}
    with (DATA / name).open() as file:
        read = [row for row in csv.DictReader(file) if row["run"] == run and row["phase"] != "prefill_request"]
    found = []
    for workload, block in blocks.items():
        total_s, bad_s = float(block["latency_sum_ms"]) / 1e3, 0.0
        steps: dict[SchedulerStep, float] = {}
        for row in read:
            if row["workload"] != workload:
                continue
            row_s = float(row["latency_ms_median"]) * int(row["count"]) / 1e3
            if "stall" in row["flag"] or "unstable" in row["flag"] or "first_seen" in row["flag"]:
                bad_s += row_s
                continue
            step = step_of(row)
            steps[step] = steps.get(step, 0.0) + int(row["count"])
        if bad_s < 0.1 * total_s and steps:
            found.append((steps, total_s - bad_s))
    return found


def step_of(row: dict[str, str]) -> SchedulerStep:
    """Returns the step of a row."""
    names = ("prefill_tokens", "decode_requests", "kv_tokens", "prefill_kv_tokens", "prefill_requests")
    return SchedulerStep(*(int(row[name] or 0) for name in names))


def quantiles(errors: Sequence[float]) -> str:
    """Returns median and p90 of absolute errors in per cent, and how far the median row is off with its sign."""
    if not errors:
        return "- | - | -"
    errors = [error for error in errors if error == error]
    part = np.abs(errors)
    return f"{np.median(part):.1%} | {np.quantile(part, 0.9):.1%} | {np.median(errors):+.1%}"


def pairs(rows: Sequence[Row], predicted: Sequence[float], alike: bool) -> tuple[int, int]:
    """Returns how many pairs of configurations are more than 5 % apart in the same step, and how many of them are named right.

    Args:
        rows: measured.
        predicted: seconds of each.
        alike: only pairs on equally many GPUs.
    """
    single = [(row, value) for row, value in zip(rows, predicted, strict=True) if row.phase != "prefill_request"]
    right = total = 0
    for (one, one_s), (other, other_s) in combinations(single, 2):
        a, b = one.steps[0], other.steps[0]
        same = one.run != other.run and one.phase == other.phase and a.decode_requests == b.decode_requests
        same = same and abs(a.prefill_tokens - b.prefill_tokens) <= 0.02 * a.prefill_tokens
        same = (
            same and abs(a.kv_tokens - b.kv_tokens) <= 0.1 * a.kv_tokens and (not alike or one.layout.gpus == other.layout.gpus)
        )
        if same and max(one.seconds, other.seconds) / min(one.seconds, other.seconds) > 1.05:
            total += 1
            right += (one_s < other_s) == (one.seconds < other.seconds)
    return total, right


def aisimulated(python: str, model: str, rows: Sequence[Row]) -> list[float]:
    """Returns seconds of rows by AISimulate; not a number where it has none."""
    lines = []
    for row in rows:
        sizes = {"tp": row.layout.tensor, "dp": row.layout.data, "ep": row.layout.expert, "experts": model != "Qwen3-32B"}
        steps = [list(vars(step).values()) for step in row.steps]
        lines.append(json.dumps({"model": AISIMULATE[model], **sizes, "steps": steps}))
    script = Path(__file__).with_name("steps_aisimulate.py")
    done = subprocess.run([python, script], input="\n".join(lines), capture_output=True, text=True, check=True)
    return [float("nan") if line == "null" else float(line) / 1e3 for line in done.stdout.split()]


V3 = {
    "model_type": "deepseek_v3", "num_hidden_layers": 61, "hidden_size": 7168, "vocab_size": 129280, "num_attention_heads": 128,
    "num_key_value_heads": 128, "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1,
    "moe_intermediate_size": 2048, "intermediate_size": 18432, "first_k_dense_replace": 3, "moe_layer_freq": 1,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}  # fmt: skip
QWEN3 = {
    "model_type": "qwen3_moe", "num_hidden_layers": 48, "hidden_size": 2048, "vocab_size": 151936, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
    "intermediate_size": 6144, "decoder_sparse_step": 1,
}  # fmt: skip
PUBLISHED = (  # name, kind, config, layout, step, exchange and overlap, tokens per second and GPU
    ("DeepSeek-V3, prompts, 32 GPUs (deepseek-ai/profile-data)", "NVIDIA H800", V3, Layout(data=32, expert=32),
     SchedulerStep(16384, prefill_requests=4), ("deepep-ht", True), 7839),
    ("DeepSeek-V3, answers, 128 GPUs (deepseek-ai/profile-data)", "NVIDIA H800", V3, Layout(data=128, expert=128),
     SchedulerStep(0, 128, 128 * 4989), ("deepep-ll", True), 2324),
    ("Qwen3-30B-A3B, prompts, SGLang (alibaba/InferSim)", "NVIDIA H20", QWEN3, Layout(),
     SchedulerStep(16384, prefill_requests=4), ("allgather", False), 16594),
    ("Qwen3-30B-A3B, answers, 4 GPUs, SGLang (alibaba/InferSim)", "NVIDIA H20", QWEN3, Layout(data=4, expert=4),
     SchedulerStep(0, 100, 100 * 5120), ("allgather", False), 2749),
)  # fmt: skip


def published(changed: Mapping[str, float] = {}) -> list[tuple[str, float, float]]:
    """Returns the name, measured seconds and error of each published step, with some constants times a factor."""
    found = []
    for name, kind, config, layout, step, (exchange, overlap), rate in PUBLISHED:
        constants = StepConstants.of(load_gpus()[kind])
        constants = replace(constants, **{key: getattr(constants, key) * factor for key, factor in changed.items()})
        how = {"exchange": exchange, "overlap": overlap, "nic_Bps": 50e9, "constants": constants, "fused": not overlap}
        seconds = step_seconds(config, load_gpus()[kind], layout, step, **how).total
        found.append((name, step.tokens / rate, seconds / (step.tokens / rate) - 1))
    return found


def fused_experts() -> list[tuple[str, float, float]]:
    """Returns the kind, rows of an expert and error of each recorded time of fused experts, on one GPU."""
    found = []
    for file, name in TABLE_KINDS.items():
        kind = load_gpus()[name]
        constants = replace(StepConstants.of(kind), evenness=float("inf"))  # drawn evenly
        for row in csv.DictReader((TABLES / f"moe_bf16_{file}.csv").read_text().splitlines()):
            if (row["moe_ep_size"], row["distribution"]) == ("1", "balanced"):
                hidden, inner, top_k, experts = (int(row[k]) for k in ("hidden_size", "inter_size", "topk", "num_experts"))
                config = QWEN3 | {"num_hidden_layers": 1, "hidden_size": hidden, "moe_intermediate_size": inner}
                config |= {"num_experts": experts, "num_experts_per_tok": top_k}
                tokens = int(row["num_tokens"])
                seconds = step_seconds(config, kind, Layout(), SchedulerStep(tokens), constants=constants).experts_s
                found.append((name, tokens * top_k / experts, seconds / (float(row["latency_ms"]) / 1e3) - 1))
    return found


def exchanges() -> list[tuple[str, int, int, float]]:
    """Returns the exchange, servers, tokens of a rank and error of each recorded dispatch and combine by DeepEP."""
    found, columns = [], {"deepep_ll": "avg_t_us", "deepep_normal": "transmit_us"}
    config, kind = V3 | {"num_hidden_layers": 1, "first_k_dense_replace": 0}, load_gpus()[TABLE_KINDS["h100_sxm"]]
    for file, column in columns.items():
        for row in csv.DictReader((TABLES / f"{file}_h100_sxm.csv").read_text().splitlines()):
            servers, tokens = int(row["node_num"]), int(row["num_token"])
            sizes_of = tuple(row[key] for key in ("hidden_size", "num_topk", "num_experts"))
            if sizes_of != ("7168", "8", "256") or not 8 <= tokens <= 16384 or row.get("dispatch_sms", "24") != "24":
                continue
            step = SchedulerStep(0, tokens) if file == "deepep_ll" else SchedulerStep(tokens)
            layout, exchange = Layout(data=8 * servers, expert=8 * servers), "deepep-ll" if file == "deepep_ll" else "deepep-ht"
            seconds = step_seconds(config, kind, layout, step, exchange=exchange, nic_Bps=50e9).collectives_s
            measured = sum(float(row[f"{way}_{column}"]) for way in ("dispatch", "combine")) / 1e6
            found.append((exchange, servers, tokens, seconds / measured - 1))
    return found


def other_gpus() -> list[list[str]]:
    """Returns tables of what was measured on other GPUs than B300."""
    steps = Table("Published steps of other GPUs", "step | GPU | measured | error")
    for (name, seconds, error), (_, kind, *_) in zip(published(), PUBLISHED, strict=True):
        steps.add(name, kind, f"{seconds:.3f} s", f"{error:+.0%}")
    kernels, places = (
        Table("Fused experts by kind", "GPU | rows of an expert | times | median | p90 | signed median"),
        fused_experts(),
    )
    for name in TABLE_KINDS.values():
        for least, most in ROWS:
            part = [error for kind, rows, error in places if kind == name and least <= rows < most]
            kernels.add(name, f"{least} to {most}" if most < 1 << 30 else f"from {least}", len(part), quantiles(part))
    heads = "exchange | servers | tokens of a rank | times | median | p90 | signed median"
    apart, times = Table("DeepEP between servers of H100", heads), exchanges()
    for exchange, servers, many in dict.fromkeys((*of, tokens >= MANY) for *of, tokens, _ in times):
        part = [error for *of, tokens, error in times if (*of, tokens >= MANY) == (exchange, servers, many)]
        apart.add(exchange, servers, f"from {MANY}" if many else f"below {MANY}", len(part), quantiles(part))
    return [steps.lines, kernels.lines, apart.lines]


def halves_and_doubles(rows: Sequence[Row], kind: GpuKind) -> list[str]:
    """Returns a table of the errors with half and double of each constant: of held-out steps on B300, and of published ones."""
    heads = " | ".join(f"median error of {of}: half | as it is | double" for of in ("Qwen3.6", FLASH, "published steps"))
    table = Table("Constants, half and double", f"constant | value | {heads}")
    flash = [row for row in rows_of(FILES[FLASH][0]) if row.run != FILES[FLASH][1]]
    for name, value in vars(DEFAULT).items():
        cells: list[str] = []
        for of in (
            lambda factor, name=name, value=value: [
                predict(MODEL, kind, row, replace(DEFAULT, **{name: value * factor})) / row.seconds - 1 for row in rows[::7]
            ],
            lambda factor, name=name, value=value: [
                predict(FLASH, kind, row, replace(StepConstants.of(kind), **{name: value * factor})) / row.seconds - 1
                for row in flash
            ],
            lambda factor, name=name: [error for *_, error in published({name: factor})],
        ):
            cells += [f"{np.median(np.abs(of(factor))):.1%}" for factor in (0.5, 1, 2)]
        table.add(name, f"{value:.3g}", *cells)
    return table.lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--aisimulate", metavar="PYTHON", help="interpreter that has AISimulate, whose errors stand beside")
    options = parser.parse_args()
    if not DATA.is_dir():
        raise SystemExit(f"expected measured steps in {DATA}, found none")
    kind = load_gpus()[KIND]
    table = Table("Errors of predicted steps", "model | constants | run | phase | size | rows | median | p90 | signed median")
    held = Table("Held-out configurations", "model | constants | phase | rows | median | p90 | signed median")
    named = Table("Faster of two configurations", "model | constants | pairs on | more than 5 % apart | named right")
    shown = Table("Constants", "model | " + " | ".join(vars(DEFAULT)))
    for model, (name, run) in FILES.items():
        rows = rows_of(name)
        if model == MODEL:
            shown.add("shipped, before rounding", *(f"{value:.3g}" for value in vars(fitted(model, kind, rows, FREE)).values()))
        ways: list[tuple[str, list[float]]] = []
        for title, constants in (("shipped", StepConstants.of(kind)), (f"fitted on {run}", fitted(model, kind, rows))):
            shown.add(f"{model}, {title}", *(f"{value:.3g}" for value in vars(constants).values()))
            ways.append((title, [predict(model, kind, row, constants) for row in rows]))
        if options.aisimulate:
            ways.append(("AISimulate", aisimulated(options.aisimulate, model, rows)))
        for title, predicted in ways:
            errors = [(row, value / row.seconds - 1) for row, value in zip(rows, predicted, strict=True)]
            for which in dict.fromkeys(row.run for row in rows):
                for phase in dict.fromkeys(row.phase for row in rows):
                    for size, label in SIZES[1:]:
                        part = [
                            e
                            for row, e in errors
                            if (row.run, row.phase) == (which, phase) and (row.tokens > 512) == (size == 2)
                        ]
                        if part:
                            table.add(model, title, which, phase, label, len(part), quantiles(part))
            for phase in ("decode", "mixed", "context", "prefill_request", ""):
                part = [e for row, e in errors if row.run != run and phase in ("", row.phase)]
                held.add(model, title, phase or "all", len(part), quantiles(part))
            for alike, label in ((True, "equally many GPUs"), (False, "any GPUs")):
                total, right = pairs(rows, predicted, alike)
                if total:
                    named.add(model, title, label, total, f"{right} ({right / total:.0%})")
    further = [*other_gpus(), halves_and_doubles([row for row in rows_of(FILES[MODEL][0]) if row.run != FILES[MODEL][1]], kind)]
    write("steps", [__doc__.strip()], shown.lines, held.lines, named.lines, *further, table.lines, out=options.out)


if __name__ == "__main__":
    main()
