"""TensorRT-LLM: attention by tensor or by data parallelism on all GPUs; it chooses the exchange by the hardware.

Settings that matter for MoE models: flag or subject | default | effect, and what it goes with | source.

tensor_parallel_size | 1 | all GPUs of a copy, whatever else divides them | llmapi/llm_args.py
pipeline_parallel_size | 1 | stages of layers, each with tensor_parallel_size GPUs | llmapi/llm_args.py
enable_attention_dp | false | attention by data parallelism on all of them | llmapi/llm_args.py
moe_expert_parallel_size, moe_tensor_parallel_size | 1 and tensor_parallel_size | their product is tensor_parallel_size;
  experts cut by the second need an allgather | docs/source/features/parallel-strategy.md
TRTLLM_FORCE_COMM_METHOD | the first that works: NVLink one-sided, two-sided, NCCL EP, DeepEP, DeepEP low-latency, allgather |
  only with attention by data parallelism; without it an all-reduce. One-sided takes at most 128 GPUs and memory for the most
  tokens of every rank | _torch/modules/fused_moe/communication/communication_factory.py
moe_config.load_balancer | none: experts in sequence | a file with num_slots and initial_global_assignments;
  layer_updates_per_iter above 0: so many layers move in each step, beside serving, from a copy of all experts in the hosts'
  memory | llmapi/llm_args.py (MoeLoadBalancerConfig); examples/wide_ep/README.md
moe_config.max_num_tokens | none | a rank's rows beyond it are computed in further chunks, of which one's allgather overlaps
  the next one's compute, all-to-alls do not (not priced: it is there to save memory); halves of a batch do not overlap |
  examples/wide_ep/README.md; pull requests 3104 and 3504
max_num_tokens | 8192 | the most tokens of a rank in a step | llmapi/llm_args.py
attention_dp_config | no balance | enable_balance: prompts wait until all ranks have some, for timeout_iters (50) steps at most,
  and then batching_wait_iters (10) more for further ones | llmapi/llm_args.py (AttentionDpConfig)
several servers | one | mpirun (or Slurm) with trtllm-llmapi-launch | examples/wide_ep/README.md
"""

import shlex
from pathlib import Path
from typing import Any

import yaml

from aurora.advisor.engines.engine import (
    DispatchFlag,
    EplbSettings,
    LaunchPlace,
    ServingEngine,
    ServingWay,
    launch_lines,
    launch_places,
)

METHODS = {
    "all-reduce": "",
    "allgather": "ALLGATHER",
    "nvlink-one-sided": "NVLINK_ONE_SIDED",
    "nvlink-two-sided": "NVLINK_TWO_SIDED",
    "deepep-ht": "DEEPEP",
    "deepep-ll": "DEEPEPLOWLATENCY",
    "nccl-ep": "NCCL_EP",
}
OPTIONS = "options.yaml"
DEEPEP_SERVERS = (2, 4, 8, 16)  # of 8 GPUs each, for which DeepEP's kernels are built


def refuses(way: ServingWay) -> dict[str, bool]:
    """Checks whether TensorRT-LLM can serve in a way; returns a dict from each possible reason against it to its truth."""
    layout = way.layout
    return {
        "attention is data-parallel on all GPUs or on none": layout.data > 1 and layout.tensor > 1,
        "its balancer counts slots: `experts` is missing": way.eplb is not None and not way.experts,
        "it moves one layer a step: the balancer's interval is 1": way.eplb is not None and way.eplb.interval != 1,
        f"DeepEP runs on one server or on {DEEPEP_SERVERS} servers of 8 GPUs": way.exchange == "deepep-ht"
        and way.stage_hosts > 1
        and (way.per_server != 8 or way.stage_hosts not in DEEPEP_SERVERS),
    }


def options(way: ServingWay, file: Path) -> dict[str, Any]:
    """Returns the settings of `options.yaml`, the file that `launch` passes to trtllm-serve.

    Args:
        way: the way of serving.
        file: the placement file, for ways with a planned placement.
    """
    layout = way.layout
    settings: dict[str, Any] = {"tensor_parallel_size": layout.stage_gpus}
    if layout.pipeline > 1:
        settings["pipeline_parallel_size"] = layout.pipeline
    if layout.expert > 1:
        settings["moe_expert_parallel_size"] = layout.expert
        settings["moe_tensor_parallel_size"] = layout.stage_gpus // layout.expert
    if layout.data > 1:
        settings["enable_attention_dp"] = True
    if way.batched_tokens:
        settings["max_num_tokens"] = way.batched_tokens
    if way.hosts > 1:
        settings["gpus_per_node"] = way.per_server
    balancer: str | dict[str, int] | None = str(file) if way.placement == "plan" else None
    if way.eplb:
        balancer = {"num_slots": way.experts + way.redundant, "layer_updates_per_iter": way.eplb.interval}
    if balancer is not None:  # the backend that takes a balancer on Hopper and on Blackwell GPUs
        settings["moe_config"] = {"backend": "CUTLASS", "load_balancer": balancer}
    return settings


def files(way: ServingWay, file: Path) -> dict[str, str]:
    """Returns {"options.yaml": text}, with the settings that `options` returns for the same arguments."""
    return {OPTIONS: str(yaml.safe_dump(options(way, file), sort_keys=False))}


def launch(way: ServingWay, model: str, file: Path) -> str:
    """Returns the shell commands that start TensorRT-LLM with the settings of a way of serving.

    Args:
        way: the way of serving.
        model: the model's name or path.
        file: the placement file; `options.yaml` (see `files`) is in the same folder.
    """
    serve = ["trtllm-serve", shlex.quote(model), f"--extra_llm_api_options {shlex.quote(str(file.with_name(OPTIONS)))}"]
    method = [f"TRTLLM_FORCE_COMM_METHOD={METHODS[way.exchange]}"] * bool(METHODS[way.exchange] and way.layout.data > 1)
    if way.hosts > 1:
        by_copy: dict[str, list[str]] = {}
        for place in launch_places(way):
            by_copy.setdefault(place.head, []).append(f"{place.host}:{way.per_server}")
        run = [["mpirun", f"-n {way.layout.copy_gpus}", f"-H {','.join(hosts)}", *(f"-x {word}" for word in method)]
               for hosts in by_copy.values()]  # fmt: skip
        return "\n".join(" ".join([*words, "trtllm-llmapi-launch", *serve]) for words in run)

    def at(place: LaunchPlace) -> list[str]:
        memory = [f"TRTLLM_EPLB_SHM_NAME=moe_shared_{place.copy}"] * bool(way.eplb and place.devices)
        return [*method, *memory, *serve]

    return launch_lines(way, at, 8000)


def default_exchange(way: ServingWay) -> str:
    """Returns the name of the exchange that TensorRT-LLM chooses: of several, the first that the hardware supports."""
    if way.layout.expert < way.layout.stage_gpus or not way.nvlink:
        return "allgather"
    if way.stage_hosts == 1:
        return "nvlink-one-sided"
    return "deepep-ht" if way.per_server == 8 and way.stage_hosts in DEEPEP_SERVERS else "allgather"


TRTLLM = ServingEngine(
    "trtllm",
    ("1.2", "1.2"),
    METHODS,
    launch,
    refuses,
    EplbSettings(1, 1),
    default_exchange,
    since={"nccl-ep": "1.3"},
    form="trtllm",
    file="placement.yaml",
    files=files,
    dispatch_flags=[
        DispatchFlag(
            f"attention_dp_config: {{enable_balance: true, timeout_iters: {steps}, batching_wait_iters: 0}}",
            f"aligned:{steps}",
            "requests",
        )
        for steps in (2, 8, 32)
    ],
)
