"""vllm-ascend, vLLM's plugin for Ascend NPUs: it chooses the exchange by device and batch, and reads a placement file.

Settings that matter for MoE models: flag or subject | default | effect, and what it goes with | source.

exchange | by device and batch | without expert parallelism an allgather. A2: MC2 from 16 devices on with at most 24 experts
  each, for batches that fit its capacity, otherwise an allgather. A3: MC2, and HCCL's all-to-all for larger batches. 950: the
  same, but an allgather for larger batches where there are no more devices than experts of a token |
  vllm_ascend/ascend_forward_context.py (select_moe_comm_method)
enable_fused_mc2 | 0 | 1: MC2 fused with the experts, on A3 | vllm_ascend/ascend_config.py,
  vllm_ascend/ascend_forward_context.py (select_moe_comm_method)
--enable-dbo | off | ignored | vllm_ascend/platform.py
eplb_config.expert_map_path | none: experts in sequence | a placement that stays; model runner V1 (VLLM_USE_V2_MODEL_RUNNER=0)
  | docs/source/user_guide/feature_guide/expert_parallelism_load_balancer.md
eplb_config.dynamic_eplb | off | model runner V1, with DYNAMIC_EPLB=true: load of 600 steps, 50 for the algorithm on the CPU,
  then a layer a step | docs/source/user_guide/feature_guide/expert_parallelism_load_balancer.md
--enable-eplb | off | model runner V2: vLLM's own balancer, with --eplb-config.use_async false; then serving waits for moves |
  docs/source/user_guide/feature_guide/expert_parallelism_load_balancer.md
"""

import json
import shlex
from pathlib import Path
from typing import Any

from aurora.advisor.engines.engine import EplbSettings, ServingEngine, ServingWay, launch_lines
from aurora.advisor.engines.vllm import serve_words

CHOSEN = "by device and batch"


def refuses(way: ServingWay) -> dict[str, bool]:
    """Checks whether vllm-ascend can serve in a way; returns a dict from each possible reason against it to its truth."""
    layout = way.layout
    return {
        f"`expert`: experts are divided over all {layout.stage_gpus} devices of a stage or over none": layout.expert
        not in (1, layout.stage_gpus),
        "stages of data-parallel ranks lie side by side, as vLLM's": layout.pipeline > 1 and layout.data > 1,
        "its balancer's interval is longer than its window": way.eplb is not None and way.eplb.interval <= way.eplb.window,
    }


def launch(way: ServingWay, model: str, file: Path) -> str:
    """Returns the shell commands that start vLLM with vllm-ascend, with the settings of a way of serving.

    Args:
        way: the way of serving.
        model: the model's name or path.
        file: the placement file.
    """
    eplb: dict[str, Any] = {}
    if way.placement == "plan":
        eplb["expert_map_path"] = str(file)
    if way.eplb:
        eplb |= {"dynamic_eplb": True, "expert_heat_collection_interval": way.eplb.window}
        eplb["algorithm_execution_interval"] = way.eplb.interval - way.eplb.window
    if way.redundant:
        eplb["num_redundant_experts"] = way.redundant
    config = ({"eplb_config": eplb} if eplb else {}) | ({"enable_fused_mc2": 1} if way.exchange == "fused-mc2" else {})
    words = [f"--additional-config {shlex.quote(json.dumps(config))}"] * bool(config)
    before = ["VLLM_USE_V2_MODEL_RUNNER=0"] * bool(eplb) + ["DYNAMIC_EPLB=true"] * bool(way.eplb)
    return launch_lines(way, lambda place: before + serve_words(way, model, place) + words, 8000, "ASCEND_RT_VISIBLE_DEVICES")


def default_exchange(way: ServingWay) -> str:
    """Returns the name of the exchange that vllm-ascend uses on an Atlas A3 or 950."""
    return "mc2" if way.layout.expert == way.layout.stage_gpus > 1 else "allgather"


VLLM_ASCEND = ServingEngine(
    "vllm-ascend",
    ("0.23", "0.23"),
    {"all-reduce": "", "allgather": CHOSEN, "mc2": CHOSEN, "fused-mc2": "enable_fused_mc2"},
    launch,
    refuses,
    EplbSettings(600, 650),
    default_exchange,
    form="vllm-ascend",
)
