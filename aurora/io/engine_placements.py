"""Placements in the formats of serving engines: SGLang, EPLB, vllm-ascend and TensorRT-LLM.

Most formats number physical experts: slot p of a layer is on GPU p // (slots per GPU), so all GPUs have equally many slots.
Engines divide an expert's tokens evenly over its slots, so an uneven split is lost in an export.

Sources: the engines' documentation of `--init-expert-location` (SGLang), `phy2log` (deepseek-ai/EPLB), `expert_map_path`
(vllm-ascend) and `MoeLoadBalancerConfig` (TensorRT-LLM).
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from aurora.errors import AuroraError, BadInput
from aurora.io.files import load_json, read_text
from aurora.io.placements import evenly_split
from aurora.types import Placement

Physical = list[list[int]]  # by layer and slot: the logical expert there


@dataclass(frozen=True)
class PlacementFormat:
    """How an engine keeps a placement in a file.

    Attributes:
        read: called with (file, number of GPUs or None, number of dense layers before the MoE layers); returns a Placement.
        write: called with (placement, number of dense layers); returns text. None for a format that is only imported.
    """

    read: Callable[[Path, int | None, int], Placement]
    write: Callable[[Placement, int], str] | None = None


def export_placement(placement: Placement, form: str, dense_layers: int = 0) -> str:
    """Returns a placement as text that an engine reads.

    Args:
        placement: the placement; engines divide an expert's tokens evenly over its replicas, see `off_by`.
        form: one of PLACEMENT_FORMATS.
        dense_layers: layers without experts that the engine counts before the MoE layers.

    Returns:
        The file's text.

    Raises:
        BadInput: if the format is unknown or only imported, or a GPU holds no expert although others do.
    """
    known = _known(form)
    _check_dense(dense_layers)
    if known.write is None:
        raise BadInput(f"`format`: {form} can only be imported")
    return known.write(placement, dense_layers)


def import_placement(path: Path, form: str, gpus: int | None = None, dense_layers: int = 0) -> Placement:
    """Read the placement in an engine's file.

    Args:
        path: the file.
        form: one of PLACEMENT_FORMATS.
        gpus: the number of GPUs, needed if the file does not say it.
        dense_layers: layers without experts that the file counts before the MoE layers.

    Raises:
        BadInput: if the file is not of that format, or its slots cannot be divided evenly over the GPUs.
    """
    known = _known(form)
    _check_dense(dense_layers)
    try:
        return known.read(path, gpus, dense_layers)
    except AuroraError as error:
        raise type(error)(f"{path}: {error}".replace(f"{path}: {path}", str(path))) from None
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise BadInput(f"{path}: not a placement of {form}: {type(error).__name__}: {error}") from None


def _known(form: str) -> PlacementFormat:
    """The format of this name, or BadInput."""
    if form not in PLACEMENT_FORMATS:
        raise BadInput(f"`format`: expected one of {', '.join(PLACEMENT_FORMATS)}, found {form!r}")
    return PLACEMENT_FORMATS[form]


def _check_dense(dense_layers: int) -> None:
    """Raise BadInput for a negative number of layers."""
    if dense_layers < 0:
        raise BadInput(f"`dense_layers`: expected zero or more, found {dense_layers}")


def _physical(placement: Placement) -> Physical:
    """By layer, the experts in the slots of one GPU after the other, with equally many slots on each.

    A GPU with fewer experts repeats some of them, if possible experts that no other GPU holds: an engine divides an expert's
    tokens evenly over its slots, so these change no GPU's load.
    """
    each = max(len(held) for layer in placement.slots_LG for held in layer)
    physical = []
    for number, layer in enumerate(placement.slots_LG):
        holders = Counter(expert for held in layer for expert in held)
        row: list[int] = []
        for gpu, held in enumerate(layer):
            again = [expert for expert in held if holders[expert] == 1] or held
            if len(held) < each and not again:
                raise BadInput(f"layer {number}: expected an expert on every GPU, found none on GPU {gpu}")
            row += sorted([*held, *(again[at % len(again)] for at in range(each - len(held)))])
        physical.append(row)
    return physical


def off_by(placement: Placement, form: str) -> float:
    """Returns how far an export differs from the placement, because engines divide tokens evenly over replicas.

    Args:
        placement: the placement.
        form: one of PLACEMENT_FORMATS.

    Returns:
        The largest difference between an expert's share on a GPU in the placement and in the engine, from 0 to 1.
    """
    even = evenly_split(placement.slots_LG) if form == "vllm-ascend" else _placed(_physical(placement), placement.gpus)
    return max(float(abs(placement.split_EG(l) - even.split_EG(l)).max()) for l in range(len(placement.slots_LG)))


def _placed(physical: Physical, gpus: int | None) -> Placement:
    """The placement of physical experts, numbered by GPU."""
    if gpus is None:
        raise BadInput("the file does not say the number of GPUs; give `gpus`")
    slots = {len(layer) for layer in physical}
    if len(slots) != 1 or gpus < 1 or slots.copy().pop() % gpus:
        raise BadInput(f"expected as many slots in every layer, on {gpus} GPUs evenly, found {sorted(slots)}")
    each = slots.pop() // gpus
    return evenly_split(tuple(tuple(tuple(layer[g * each : (g + 1) * each]) for g in range(gpus)) for layer in physical))


def _write_sglang(placement: Placement, dense_layers: int) -> str:
    """One row per decoder layer; rows of dense layers are never read and repeat the first MoE layer's."""
    physical = _physical(placement)
    return json.dumps({"physical_to_logical_map": physical[:1] * dense_layers + physical}) + "\n"


def _read_sglang(path: Path, gpus: int | None, dense_layers: int) -> Placement:
    found = load_json(path)
    if "physical_to_logical_map" not in found and "logical_count" in found:
        raise BadInput("holds loads (logical_count), not a placement")
    return _placed(found["physical_to_logical_map"][dense_layers:], gpus)


def _write_eplb(placement: Placement, dense_layers: int) -> str:
    phy2log = _physical(placement)
    slots = [[[p for p, e in enumerate(row) if e == expert] for expert in range(placement.experts)] for row in phy2log]
    logcnt = [[len(of) for of in row] for row in slots]
    most = max(count for row in logcnt for count in row)
    log2phy = [[of + [-1] * (most - len(of)) for of in row] for row in slots]
    return json.dumps({"phy2log": phy2log, "log2phy": log2phy, "logcnt": logcnt}) + "\n"


def _read_eplb(path: Path, gpus: int | None, dense_layers: int) -> Placement:
    return _placed(load_json(path)["phy2log"], gpus)


def _write_ascend(placement: Placement, dense_layers: int) -> str:
    layers = [
        {
            "layer_id": layer,
            "device_count": placement.gpus,
            "device_list": [{"device_id": gpu, "device_expert": list(held)} for gpu, held in enumerate(held_G)],
        }
        for layer, held_G in enumerate(placement.slots_LG)
    ]
    return json.dumps({"moe_layer_count": len(layers), "layer_list": layers}) + "\n"


def _read_ascend(path: Path, gpus: int | None, dense_layers: int) -> Placement:
    layers = sorted(load_json(path)["layer_list"], key=lambda layer: layer["layer_id"])
    devices = [sorted(layer["device_list"], key=lambda device: device["device_id"]) for layer in layers]
    for what, rows in [("layer_id", layers), *(("device_id", each) for each in devices)]:
        if (ids := [row[what] for row in rows]) != list(range(len(ids))):
            raise BadInput(f"expected {what} from 0 to {len(ids) - 1}, each once, found {ids}")
    placement = evenly_split(tuple(tuple(tuple(device["device_expert"]) for device in layer) for layer in devices))
    if gpus not in (None, placement.gpus):
        raise BadInput(f"expected {gpus} GPUs, found {placement.gpus}")
    return placement


def _write_trtllm(placement: Placement, dense_layers: int) -> str:
    physical = _physical(placement)
    balancer = {
        "num_slots": len(physical[0]),
        "initial_global_assignments": {dense_layers + layer: row for layer, row in enumerate(physical)},
        "layer_updates_per_iter": 0,
    }
    return str(yaml.safe_dump(balancer, default_flow_style=None, sort_keys=False, width=10**6))


def _read_trtllm(path: Path, gpus: int | None, dense_layers: int) -> Placement:
    try:
        found: Mapping[str, Any] = yaml.safe_load(read_text(path))
    except (yaml.YAMLError, RecursionError) as error:
        raise BadInput(f"not YAML: {' '.join(str(error).split())}") from None
    rows = found["initial_global_assignments"]
    if (slots := found.get("num_slots")) is not None and any(len(row) != slots for row in rows.values()):
        raise BadInput(f"expected num_slots = {slots} slots in every layer, found {sorted({len(r) for r in rows.values()})}")
    return _placed([rows[layer] for layer in sorted(rows)], gpus)


PLACEMENT_FORMATS: dict[str, PlacementFormat] = {
    "sglang": PlacementFormat(_read_sglang, _write_sglang),
    "eplb": PlacementFormat(_read_eplb, _write_eplb),
    "vllm-ascend": PlacementFormat(_read_ascend, _write_ascend),
    "trtllm": PlacementFormat(_read_trtllm, _write_trtllm),
}
