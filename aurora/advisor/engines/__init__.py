"""Serving engines, one file each: the engine's defaults, and the effect of each flag that matters for MoE models."""

import json
import shlex
from dataclasses import replace
from pathlib import Path

from aurora.advisor.engines.engine import ServingEngine
from aurora.advisor.engines.sglang import SGLANG
from aurora.advisor.engines.trtllm import TRTLLM
from aurora.advisor.engines.vllm import VLLM
from aurora.advisor.engines.vllm_ascend import VLLM_ASCEND
from aurora.errors import BadInput, check_one_of

SERVING_ENGINES: dict[str, ServingEngine] = {"vllm": VLLM, "sglang": SGLANG, "trtllm": TRTLLM, "vllm-ascend": VLLM_ASCEND}


def described(text: str) -> tuple[ServingEngine, str]:
    """Returns the engine that a text such as "vllm" or "vllm==0.33" names, with that version's exchanges, and the version.

    Raises:
        BadInput: if the engine is unknown, or the version is no version.
    """
    name, _, version = text.partition("==")
    check_one_of("engine", name, SERVING_ENGINES)
    if "==" in text and not version:
        raise BadInput(f"`engine`: expected a version after ==, found {text!r}")
    return SERVING_ENGINES[name].at(version), version


def command_with(form: str, file: Path, gpus: int, experts: int, redundant: int) -> str:
    """Returns the command that starts an engine on one server, in its default layout, with an exported placement file.

    Args:
        form: the file's format, one of `aurora.io.engine_placements.PLACEMENT_FORMATS`.
        file: the file.
        gpus: number of GPUs.
        experts: number of routed experts of a layer.
        redundant: number of slots of a layer, over all GPUs, minus `experts`.
    """
    for engine in SERVING_ENGINES.values():
        if engine.form == form:
            way = replace(engine.default(gpus, gpus, experts), placement="plan", redundant=redundant)
            files = (f"# write this to {file.with_name(name)}:\n{text}" for name, text in engine.files(way, file).items())
            return "\n".join([engine.command(way, "MODEL", file), *files])
    if form == "eplb":
        return f"the arrays of {file} are what rebalance_experts returns with num_gpus={gpus} and {redundant} redundant experts"
    pull, key = (49572, "initial_expert_map_path") if form == "vllm-list" else (41141, "initial_mapping_path")
    stays = {"disable_online_rebalancing": True} if pull == 41141 else {}
    config = {"num_redundant_experts": redundant, key: str(file), **stays}
    default = VLLM.command(VLLM.default(gpus, gpus, experts), "MODEL", file)
    return (
        f"{default} --enable-eplb --eplb-config {shlex.quote(json.dumps(config))}, in a vLLM with its pull request {pull}; "
        "others take the plan itself, by the plugin"
    )
