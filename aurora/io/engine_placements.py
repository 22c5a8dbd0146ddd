"""Placements in the formats of serving engines: vLLM, SGLang, EPLB, TensorRT-LLM and vllm-ascend.

All number physical experts: slot p of a layer is on GPU p // (slots per GPU), so all GPUs have equally many slots in all
layers. A GPU that holds fewer experts is filled with further replicas. Engines divide an expert's tokens evenly over its
replicas, so an uneven split is lost in an export.

Sources, whose readers the tests repeat: SGLang v0.5 `srt/eplb/expert_location.py` (`--init-expert-location`); EPLB `eplb.py`
(`phy2log`); TensorRT-LLM v1.2 `llmapi/llm_args.py` (`MoeLoadBalancerConfig`) and `fused_moe`; vllm-ascend v0.23
`eplb/core/eplb_utils.py` (`expert_map_path`); vLLM's pull request 41141 (`initial_mapping_path`).
"""

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from aurora.errors import BadInput, check_one_of
from aurora.io.files import load_json, naming, read_text
from aurora.planner.placement.slot_counts import filled, redundant_experts
from aurora.planner.workload.model_config import moe_layers
from aurora.types import Placement
from aurora.types.arrays import IntArray, layer_numbers

Slots = tuple[tuple[tuple[int, ...], ...], ...]  # by layer and GPU: the experts there
Rows = list[list[int]]  # by layer and slot: the expert there


@dataclass(frozen=True)
class PlacementFormat:
    """An engine's file format of placements.

    Attributes:
        read: called with (file, number of GPUs or None, numbers of the dense layers); returns the placement.
        write: called with (slots, equally many on every GPU; numbers of the dense layers); returns the file's text.
        launch: called with (file's name, number of GPUs, number of redundant experts); returns the engine's launch options.
        suffix: suffix of the file's name that the engine expects; empty: any.
    """

    read: Callable[[Path, int | None, Sequence[int]], Placement]
    write: Callable[[Slots, Sequence[int]], str]
    launch: Callable[[str, int, int], str]
    suffix: str = ""


@dataclass(frozen=True)
class Export:
    """A placement as an engine's file, and what the engine makes of it.

    Attributes:
        text: the file's content.
        redundant: physical experts of a layer beyond one for each expert.
        added_LG: (L, G) int64, physical experts that the plan does not have and the engine's equal slots need.
        off_by: the largest difference between an expert's share on a GPU in the plan and in the engine, from 0 to 1.
        launch: the options that make the engine use the file.
    """

    text: str
    redundant: int
    added_LG: IntArray
    off_by: float
    launch: str


def export_placement(
    placement: Placement,
    form: str,
    dense_layers: Sequence[int] = (),
    load_LE: IntArray | None = None,
    equal: bool = True,
    path: Path | None = None,
) -> Export:
    """Returns a placement as text that an engine reads.

    Args:
        placement: the placement. GPUs with fewer experts than others get further replicas, see `filled`.
        form: one of PLACEMENT_FORMATS.
        dense_layers: the model's numbers of its decoder layers without experts.
        load_LE: (L, E), tokens of each expert; None: all alike.
        equal: whether the GPUs are equally fast.
        path: the file that the text is for, as the launch options name it.

    Raises:
        BadInput: if the format is unknown, or the engine would not read a file of that name.
    """
    check_one_of("format", form, PLACEMENT_FORMATS)
    known = PLACEMENT_FORMATS[form]
    if path is not None and path.suffix != known.suffix and known.suffix:
        raise BadInput(
            f"{path}: expected a name that ends in {known.suffix}, as {form} reads it, found {path.suffix or 'none'}"
        )
    slots_LG = filled(placement, load_LE, equal)
    engine = Placement.evenly(slots_LG)
    layers = range(len(slots_LG))
    redundant = redundant_experts(placement)
    return Export(
        known.write(slots_LG, layer_numbers("`dense_layers`", dense_layers)),
        redundant,
        np.array([[len(slots_LG[l][g]) - len(placement.slots_LG[l][g]) for g in range(placement.gpus)] for l in layers]),
        max(float(abs(placement.split_EG(l) - engine.split_EG(l)).max()) for l in layers),
        known.launch(shlex.quote(str(path or "FILE")), placement.gpus, redundant),
    )


def import_placement(path: Path, form: str, gpus: int | None = None, dense_layers: Sequence[int] = ()) -> Placement:
    """Read the placement in an engine's file.

    Args:
        path: the file.
        form: one of PLACEMENT_FORMATS.
        gpus: the number of GPUs, needed if the file does not say it.
        dense_layers: the model's numbers of its decoder layers without experts.

    Raises:
        BadInput: if the file is not of that format, or its slots cannot be divided evenly over the GPUs.
    """
    check_one_of("format", form, PLACEMENT_FORMATS)
    with naming(path, f"a placement of {form}"):
        return PLACEMENT_FORMATS[form].read(path, gpus, layer_numbers("`dense_layers`", dense_layers))


def _placed(rows: Rows, gpus: int | None) -> Placement:
    """The placement of physical experts, numbered by GPU."""
    if gpus is None:
        raise BadInput("the file does not say the number of GPUs; give `gpus`")
    slots = {len(layer) for layer in rows}
    if len(slots) != 1 or gpus < 1 or slots.copy().pop() % gpus:
        raise BadInput(f"expected as many slots in every layer, on {gpus} GPUs evenly, found {sorted(slots)}")
    each = slots.pop() // gpus
    return Placement.evenly(tuple(tuple(tuple(layer[g * each : (g + 1) * each]) for g in range(gpus)) for layer in rows))


def _rows(slots_LG: Slots) -> Rows:
    """By layer, the experts of all slots, GPU by GPU."""
    return [[expert for held in layer for expert in held] for layer in slots_LG]


def _write_vllm(slots_LG: Slots, dense_layers: Sequence[int]) -> str:
    rows = _rows(slots_LG)
    experts = 1 + max(rows[0])
    record = {
        "record_type": "eplb_initial_mapping",
        "version": 1,
        "num_redundant_experts": len(rows[0]) - experts,
        "num_slots": len(rows[0]),
        "initial_global_assignments": {str(layer): row for layer, row in enumerate(rows)},
    }
    return json.dumps(record) + "\n"


def _read_vllm(path: Path, gpus: int | None, dense_layers: Sequence[int]) -> Placement:
    for line in filter(str.strip, read_text(path).splitlines()):
        record = json.loads(line)
        if record["record_type"] == "eplb_initial_mapping":
            rows = record["initial_global_assignments"]
            return _placed([rows[str(layer)] for layer in range(len(rows))], gpus)
    raise BadInput("expected a line of record_type eplb_initial_mapping, found none")


def _launch_vllm(file: str, gpus: int, redundant: int) -> str:
    config = {
        "num_redundant_experts": redundant,
        "initial_mapping_path": shlex.split(file)[0],
        "disable_online_rebalancing": True,
    }
    options = f"--enable-expert-parallel --enable-eplb --eplb-config {shlex.quote(json.dumps(config))}"
    return f"vllm serve MODEL {options}, in a vLLM with its pull request 41141; others take the plan itself, by the plugin"


def _write_sglang(slots_LG: Slots, dense_layers: Sequence[int]) -> str:
    """One row per decoder layer; rows of dense layers are never read and repeat the first MoE layer's."""
    rows = _rows(slots_LG)
    by_layer = dict(zip(moe_layers(len(rows), dense_layers), rows, strict=True))
    every = [by_layer.get(layer, rows[0]) for layer in range(len(rows) + len(dense_layers))]
    return json.dumps({"physical_to_logical_map": every}) + "\n"


def _read_sglang(path: Path, gpus: int | None, dense_layers: Sequence[int]) -> Placement:
    found = load_json(path)
    if "physical_to_logical_map" not in found and "logical_count" in found:
        raise BadInput("holds loads (logical_count), not a placement")
    rows = found["physical_to_logical_map"]
    return _placed([rows[layer] for layer in moe_layers(max(0, len(rows) - len(dense_layers)), dense_layers)], gpus)


def _launch_sglang(file: str, gpus: int, redundant: int) -> str:
    options = f"--tp-size {gpus} --ep-size {gpus} --ep-num-redundant-experts {redundant} --init-expert-location {file}"
    return f"python -m sglang.launch_server --model-path MODEL {options}"


def _write_eplb(slots_LG: Slots, dense_layers: Sequence[int]) -> str:
    phy2log = _rows(slots_LG)
    slots = [[[p for p, e in enumerate(row) if e == expert] for expert in range(1 + max(row))] for row in phy2log]
    logcnt = [[len(of) for of in row] for row in slots]
    most = max(count for row in logcnt for count in row)
    log2phy = [[of + [-1] * (most - len(of)) for of in row] for row in slots]
    return json.dumps({"phy2log": phy2log, "log2phy": log2phy, "logcnt": logcnt}) + "\n"


def _read_eplb(path: Path, gpus: int | None, dense_layers: Sequence[int]) -> Placement:
    return _placed(load_json(path)["phy2log"], gpus)


def _launch_eplb(file: str, gpus: int, redundant: int) -> str:
    return f"the arrays of {file} are what rebalance_experts returns with num_gpus={gpus} and {redundant} redundant experts"


def _write_ascend(slots_LG: Slots, dense_layers: Sequence[int]) -> str:
    layers = [
        {
            "layer_id": layer,
            "device_count": len(held_G),
            "device_list": [{"device_id": gpu, "device_expert": list(held)} for gpu, held in enumerate(held_G)],
        }
        for layer, held_G in enumerate(slots_LG)
    ]
    return json.dumps({"moe_layer_count": len(layers), "layer_list": layers}) + "\n"


def _read_ascend(path: Path, gpus: int | None, dense_layers: Sequence[int]) -> Placement:
    layers = sorted(load_json(path)["layer_list"], key=lambda layer: layer["layer_id"])
    devices = [sorted(layer["device_list"], key=lambda device: device["device_id"]) for layer in layers]
    for what, rows in [("layer_id", layers), *(("device_id", each) for each in devices)]:
        if (ids := [row[what] for row in rows]) != list(range(len(ids))):
            raise BadInput(f"expected {what} from 0 to {len(ids) - 1}, each once, found {ids}")
    placement = Placement.evenly(tuple(tuple(tuple(device["device_expert"]) for device in layer) for layer in devices))
    if gpus not in (None, placement.gpus):
        raise BadInput(f"expected {gpus} GPUs, found {placement.gpus}")
    return placement


def _launch_ascend(file: str, gpus: int, redundant: int) -> str:
    config = {"eplb_config": {"expert_map_path": shlex.split(file)[0], "num_redundant_experts": redundant}}
    options = f"--enable-expert-parallel --additional-config {shlex.quote(json.dumps(config))}"
    return f"VLLM_USE_V2_MODEL_RUNNER=0 vllm serve MODEL {options}"


def _write_trtllm(slots_LG: Slots, dense_layers: Sequence[int]) -> str:
    rows = _rows(slots_LG)
    balancer = {
        "num_slots": len(rows[0]),
        "initial_global_assignments": dict(zip(moe_layers(len(rows), dense_layers), rows, strict=True)),
        "layer_updates_per_iter": 0,
    }
    return str(yaml.safe_dump(balancer, default_flow_style=None, sort_keys=False, width=10**6))


def _read_trtllm(path: Path, gpus: int | None, dense_layers: Sequence[int]) -> Placement:
    try:
        found: Mapping[str, Any] = yaml.safe_load(read_text(path))
    except (yaml.YAMLError, RecursionError) as error:
        raise BadInput(f"not YAML: {' '.join(str(error).split())}") from None
    rows = found["initial_global_assignments"]
    if (slots := found.get("num_slots")) is not None and any(len(row) != slots for row in rows.values()):
        raise BadInput(f"expected num_slots = {slots} slots in every layer, found {sorted({len(r) for r in rows.values()})}")
    return _placed([rows[layer] for layer in sorted(rows)], gpus)


def _launch_trtllm(file: str, gpus: int, redundant: int) -> str:
    options = f"--tp_size {gpus} --ep_size {gpus} --extra_llm_api_options OPTIONS.yaml"
    return f"trtllm-serve MODEL {options}, where OPTIONS.yaml has moe_config: {{load_balancer: {file}}}"


PLACEMENT_FORMATS: dict[str, PlacementFormat] = {
    "vllm-map": PlacementFormat(_read_vllm, _write_vllm, _launch_vllm),
    "sglang": PlacementFormat(_read_sglang, _write_sglang, _launch_sglang, ".json"),
    "eplb": PlacementFormat(_read_eplb, _write_eplb, _launch_eplb),
    "vllm-ascend": PlacementFormat(_read_ascend, _write_ascend, _launch_ascend, ".json"),
    "trtllm": PlacementFormat(_read_trtllm, _write_trtllm, _launch_trtllm),
}
