"""Placements in the formats of serving engines: vLLM, SGLang, EPLB, TensorRT-LLM and vllm-ascend.

All of them number the slots of a layer: slot p is on GPU p // (slots per GPU). So every GPU has equally many slots in every
layer, and an export fills a GPU that holds fewer experts with further replicas. Engines divide an expert's tokens evenly over
its replicas, so an export loses an uneven split.

Sources, whose readers the tests repeat: SGLang v0.5 `srt/eplb/expert_location.py` (`--init-expert-location`); EPLB `eplb.py`
(`phy2log`); TensorRT-LLM v1.2 `llmapi/llm_args.py` (`MoeLoadBalancerConfig`) and `fused_moe`; vllm-ascend v0.23
`eplb/core/eplb_utils.py` (`expert_map_path`). vLLM's open pull requests: 41141 (JSON lines, `initial_mapping_path`), 49572 and
53022 (one list, or a list per layer), 34811 (`expert_to_ep_rank`); HYGON-AI/vllm-plugin-das 69 (`model_maps`, by model and
pipeline stage).
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import yaml
from msgspec import Meta

from aurora.algorithms.gpu_slots import filled, redundant_experts
from aurora.algorithms.workload.model_config import Shape
from aurora.algorithms.workload.model_structure import moe_layers
from aurora.errors import BadInput, check_one_of, shown
from aurora.io.clusters import MOST_GPUS
from aurora.io.engine_rows import EVERY_LAYER, Rows, Slots, by_gpu, divided, repeated_slots, without_shared
from aurora.io.files import MOST_TEXT, check_size, json_lines, json_value, load_json, naming, read_text
from aurora.io.routing_dumps import load_sglang, spoken_layers
from aurora.io.schema import FileTable, converted, plain
from aurora.types import Placement
from aurora.types.arrays import MOST_LAYERS, IntArray, layer_numbers
from aurora.types.read_numbers import whole_number


@dataclass(frozen=True)
class PlacementFormat:
    """An engine's file format of placements.

    Attributes:
        read: called with the file; returns for each layer (or EVERY_LAYER) the experts in its slots, one list for all GPUs or a
            list per GPU; and sentences about parts of the file that are left out.
        write: called with the slots by layer and GPU (equally many on every GPU) and the numbers of the decoder layers without
            experts; returns the file's text.
        suffix: suffix of the file's name that the engine expects; empty: any.
        by_decoder: True: layers have the numbers of the model's decoder layers, so that the first MoE layer after one dense
            layer is 1. False: only layers with experts are counted, from 0.
        without_mtp: end of a sentence for users on the engine's behaviour if the file has no rows for layers of multi-token
            prediction (MTP).
        mixes_shared: True: under mix placement the file has the shared experts too, numbered after the routed ones.
    """

    read: Callable[[Path], tuple[Rows, list[str]]]
    write: Callable[[Slots, Sequence[int]], str]
    suffix: str = ""
    by_decoder: bool = False
    without_mtp: str = ""
    mixes_shared: bool = False


@dataclass(frozen=True)
class Import:
    """A placement that was read from an engine's file.

    Attributes:
        placement: the placement.
        remarks: sentences for users about parts of the file that the placement leaves out.
        slots_LP: (L, P) int64, the expert in each slot, if the file does not divide slots over GPUs; else None.
    """

    placement: Placement
    remarks: tuple[str, ...]
    slots_LP: IntArray | None = None


@dataclass(frozen=True)
class Export:
    """The text of an engine's placement file, and the differences of the engine's placement from the given one.

    Attributes:
        text: the file's content.
        redundant: number of slots of a layer minus number of its experts.
        added_LG: (L, G) int64, replicas that were added because the engine needs equally many slots on every GPU.
        off_by: largest difference, from 0 to 1, between a GPU's part of an expert's tokens in the given placement and in the
            engine, which divides tokens evenly over replicas.
        left_out: a sentence for users about rows that the engine may expect and the file does not have.
    """

    text: str
    redundant: int
    added_LG: IntArray
    off_by: float
    left_out: str


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
        dense_layers: numbers of the model's decoder layers without experts, such as (0,).
        load_LE: (L, E), tokens of each expert, by which `filled` chooses the experts to replicate; None: equal loads.
        equal: whether the GPUs are equally fast.
        path: the file that the text is for; its suffix is checked. None: any.

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
    return Export(
        known.write(slots_LG, layer_numbers("`dense_layers`", dense_layers)),
        redundant_experts(placement),
        np.array([[len(slots_LG[l][g]) - len(placement.slots_LG[l][g]) for g in range(placement.gpus)] for l in layers]),
        max(float(abs(placement.split_EG(l) - engine.split_EG(l)).max()) for l in layers),
        f"layers of multi-token prediction (MTP) have no rows in it{known.without_mtp}",
    )


def import_placement(
    path: Path, form: str, gpus: int | None = None, dense_layers: Sequence[int] = (), model: Shape | None = None
) -> Import:
    """Read the placement in an engine's file.

    Args:
        path: the file.
        form: one of PLACEMENT_FORMATS.
        gpus: the number of GPUs, required if the file does not have it.
        dense_layers: numbers of the model's decoder layers without experts, such as (0,).
        model: the model's sizes, which the placement must have; None: any.

    Raises:
        BadInput: if the file is not of that format or of that model, or its slots cannot be divided evenly over the GPUs.
    """
    check_one_of("format", form, PLACEMENT_FORMATS)
    dense_layers = layer_numbers("`dense_layers`", dense_layers)
    known = PLACEMENT_FORMATS[form]
    with naming(path, f"a placement of {form}"):
        rows, remarks = known.read(path)
        if EVERY_LAYER in rows:
            if model is None:
                raise BadInput("expected the model's sizes (`shape`), as one map for all layers does not say their number")
            rows = dict.fromkeys(range(model.layers), rows[EVERY_LAYER])
        if known.mixes_shared and model is not None and model.shared_experts:
            rows, left_out = without_shared(rows, model.experts, model.shared_experts)
            remarks += left_out
        kept, slots_LG = divided(rows, known.by_decoder, dense_layers, model, gpus)
    if model is not None and (beyond := sorted({*rows} - {*kept, *model.dense_layers})):
        remarks.append(f"rows of multi-token prediction are left out: {spoken_layers(beyond)}")
    if twice := repeated_slots(slots_LG, [*kept]):
        said = ", ".join(twice[:3]) + (", ..." if len(twice) > 3 else "")
        remarks.append(
            f"{len(twice)} slots repeat an expert of their own GPU, whose one replica there takes their share too: {said}"
        )
    flat = not any(map(by_gpu, kept.values()))
    return Import(Placement.evenly(slots_LG), tuple(remarks), np.array([*kept.values()], dtype=np.int64) if flat else None)


def _rows(slots_LG: Slots) -> list[list[int]]:
    """By layer, the experts of all slots, GPU by GPU."""
    return [[expert for slots in layer for expert in slots] for layer in slots_LG]


LayerRows = list[list[int]]
Layer = Annotated[int, Meta(ge=0, lt=MOST_LAYERS)]


class NumberedMap(FileTable):
    """A map of vLLM or TensorRT-LLM: the experts of the slots by layer, and the number of slots, if it is given."""

    initial_global_assignments: dict[Layer, list[int]]
    num_slots: int | None = None

    @property
    def rows(self) -> Rows:
        """The rows by ascending layer."""
        rows: Rows = dict(sorted(self.initial_global_assignments.items()))
        if self.num_slots is not None and (found := {len(row) for row in rows.values()} - {self.num_slots}):
            raise BadInput(f"expected num_slots = {self.num_slots} slots in every layer, found {sorted(found)}")
        return rows


class ModelMap(FileTable):
    """A map of a model, or of a pipeline stage of it, in vLLM's `model_maps`."""

    physical_to_logical_map: LayerRows
    num_moe_layers: int | None = None


class EplbMap(FileTable):
    """The maps of EPLB, of which one has all."""

    phy2log: LayerRows


class AscendDevice(FileTable, kw_only=True):
    """A device of vllm-ascend's map."""

    device_id: int | None = None
    device_expert: list[int]


class AscendLayer(FileTable, kw_only=True):
    """A layer of vllm-ascend's map."""

    layer_id: int | None = None
    device_count: int | None = None
    device_list: list[AscendDevice]


class AscendMap(FileTable):
    """A map of vllm-ascend."""

    layer_list: list[AscendLayer]
    moe_layer_count: int | None = None


def _write_vllm(slots_LG: Slots, dense_layers: Sequence[int]) -> str:
    rows = _rows(slots_LG)
    record = {
        "record_type": "eplb_initial_mapping",
        "version": 1,
        "num_redundant_experts": len(rows[0]) - 1 - max(rows[0]),
        "num_slots": len(rows[0]),
        "initial_global_assignments": {str(layer): row for layer, row in enumerate(rows)},
    }
    return json.dumps(record) + "\n"


def _write_vllm_list(slots_LG: Slots, dense_layers: Sequence[int]) -> str:
    return json.dumps(_rows(slots_LG)) + "\n"


def _read_vllm(path: Path) -> tuple[Rows, list[str]]:
    """Any of vLLM's forms, told apart by their keys; layers without experts have no rows in them."""
    try:
        tables = [json_value(read_text(path))]
    except BadInput:
        tables = [table for _, table in json_lines(path)]
    for table in tables:
        if isinstance(table, dict) and table.get("record_type") == "eplb_initial_mapping":
            return converted(table, NumberedMap).rows, []
    match tables:
        case [[[*_], *_] as rows] | [{"physical_to_logical_map": rows}]:
            return dict(enumerate(converted(rows, LayerRows))), []
        case [[*row]]:
            return {EVERY_LAYER: converted(row, list[int])}, []
        case [{"expert_to_ep_rank": rank_E}]:
            return {EVERY_LAYER: _experts_of_ranks(converted(rank_E, list[int], "expert_to_ep_rank"))}, []
        case [{"model_maps": maps}]:
            return _of_one_model(converted(maps, dict[str, ModelMap], "model_maps"))
        case [{"0": _} as rows]:
            return converted({"initial_global_assignments": rows}, NumberedMap).rows, []
    raise BadInput("expected a line of record_type eplb_initial_mapping, found none")


def _experts_of_ranks(rank_E: Sequence[int]) -> list[list[int]]:
    """Returns the experts of each rank by the rank of each expert: [0, 0, 1, 2] gives [[0, 1], [2], [3]]."""
    if wrong := [rank for rank in rank_E if not 0 <= rank < MOST_GPUS]:
        raise BadInput(f"expert_to_ep_rank: expected ranks below {MOST_GPUS}, found {shown(wrong[0])}")
    return [[expert for expert, of in enumerate(rank_E) if of == rank] for rank in range(1 + max(rank_E, default=-1))]


def _of_one_model(maps: Mapping[str, ModelMap]) -> tuple[Rows, list[str]]:
    """The rows of all pipeline stages of the one model that is not of multi-token prediction; by MODEL or MODEL#pp_rank=N."""
    stages: dict[str, dict[int, LayerRows]] = {}
    for key, entry in maps.items():
        model, _, stage = key.partition("#pp_rank=")
        rows = entry.physical_to_logical_map
        if entry.num_moe_layers not in (None, len(rows)):
            raise BadInput(f"{key}: expected the {entry.num_moe_layers} layers of num_moe_layers, found {len(rows)}")
        stages.setdefault(model, {})[whole_number(stage or "0")] = rows
    mtp = [model for model in stages if re.search("mtp|nextn", model, re.IGNORECASE)]
    if len(served := sorted({*stages} - {*mtp})) != 1:
        raise BadInput(f"expected the map of one model, beside multi-token prediction, found {', '.join(served) or 'none'}")
    rows_of = stages[served[0]]
    if sorted(rows_of) != [*range(len(rows_of))]:
        raise BadInput(f"{served[0]}: expected pipeline stages 0 to {max(rows_of)}, found {sorted(rows_of)}")
    every = chain.from_iterable(rows_of[stage] for stage in sorted(rows_of))
    return dict(enumerate(every)), [f"maps of multi-token prediction are left out: {', '.join(mtp)}"] * bool(mtp)


def _write_sglang(slots_LG: Slots, dense_layers: Sequence[int]) -> str:
    """One row per decoder layer; rows of dense layers are never read and repeat the first MoE layer's."""
    rows = _rows(slots_LG)
    by_layer = dict(zip(moe_layers(len(rows), dense_layers), rows, strict=True))
    every = [by_layer.get(layer, rows[0]) for layer in range(len(rows) + len(dense_layers))]
    return json.dumps({"physical_to_logical_map": every}) + "\n"


def _read_sglang(path: Path) -> tuple[Rows, list[str]]:
    match load_sglang(path):
        case {"physical_to_logical_map": rows}:
            return dict(enumerate(converted(plain(rows), LayerRows, "physical_to_logical_map"))), []
        case {"logical_count": _}:
            raise BadInput("holds loads (logical_count), not a placement")
    raise BadInput("'physical_to_logical_map' is missing")


def _write_eplb(slots_LG: Slots, dense_layers: Sequence[int]) -> str:
    phy2log = _rows(slots_LG)
    slots = [[[p for p, e in enumerate(row) if e == expert] for expert in range(1 + max(row))] for row in phy2log]
    logcnt = [[len(of) for of in row] for row in slots]
    most = max(count for row in logcnt for count in row)
    log2phy = [[of + [-1] * (most - len(of)) for of in row] for row in slots]
    return json.dumps({"phy2log": phy2log, "log2phy": log2phy, "logcnt": logcnt}) + "\n"


def _read_eplb(path: Path) -> tuple[Rows, list[str]]:
    return dict(enumerate(converted(load_json(path), EplbMap).phy2log)), []


def _write_ascend(slots_LG: Slots, dense_layers: Sequence[int]) -> str:
    layers = [
        AscendLayer(
            layer_id=layer,
            device_count=len(held_G),
            device_list=[AscendDevice(device_id=gpu, device_expert=[*held]) for gpu, held in enumerate(held_G)],
        )
        for layer, held_G in enumerate(slots_LG)
    ]
    return json.dumps(plain(AscendMap(layers, len(layers)))) + "\n"


def _read_ascend(path: Path) -> tuple[Rows, list[str]]:
    """Layers and devices in the sequence of their lists; their numbers, where given, must agree with it."""
    table = converted(load_json(path), AscendMap)
    layers = table.layer_list
    devices_L = [layer.device_list for layer in layers]
    sizes = [("layers of moe_layer_count", table.moe_layer_count, len(layers))]
    sizes += [("devices of device_count", layer.device_count, len(layer.device_list)) for layer in layers]
    for what, count, found in sizes:
        if count not in (None, found):
            raise BadInput(f"expected the {count} {what}, found {found}")
    numbers = [("layer_id", [layer.layer_id for layer in layers])]
    for key, every in numbers + [("device_id", [device.device_id for device in devices]) for devices in devices_L]:
        ids = [number for number in every if number is not None]
        if len(ids) not in (0, len(every)) or any(after <= before for before, after in pairwise(ids)):
            raise BadInput(f"expected {key} ascending, as the engine goes by the list's sequence, found {ids}")
    rows: Rows = {layer: [device.device_expert for device in devices] for layer, devices in enumerate(devices_L)}
    if len(slots := {len(device.device_expert) for devices in devices_L for device in devices}) > 1:
        raise BadInput(f"expected as many experts on every device, found {' and '.join(map(str, sorted(slots)))}")
    return rows, []


def _write_trtllm(slots_LG: Slots, dense_layers: Sequence[int]) -> str:
    rows = _rows(slots_LG)
    balancer = {
        "num_slots": len(rows[0]),
        "initial_global_assignments": dict(zip(moe_layers(len(rows), dense_layers), rows, strict=True)),
        "layer_updates_per_iter": 0,
    }
    return str(yaml.safe_dump(balancer, default_flow_style=None, sort_keys=False, width=10**6))


class _OnceLoader(yaml.SafeLoader):
    """PyYAML's safe loader, which refuses a key that a mapping has twice, instead of taking the last, and knows no merge keys.

    A mapping that merges another twice, and so on, would grow without limit.
    """

    def flatten_mapping(self, node: Any) -> None:
        pass

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        mapping = super().construct_mapping(node, deep)
        if len(mapping) < len(node.value):
            raise BadInput(f"line {node.start_mark.line + 1}: expected each key once, found {len(node.value)} keys, some twice")
        return mapping


def _read_trtllm(path: Path) -> tuple[Rows, list[str]]:
    try:
        table: Any = yaml.load(read_text(path), _OnceLoader)
    except (yaml.YAMLError, RecursionError) as error:
        raise BadInput(f"not YAML: {' '.join(str(error).split())}") from None
    match table:
        case {"initial_global_assignments": dict() as rows}:  # whose rows may all be aliases of a long one
            check_size("the map", 8 * sum(len(row) for row in rows.values() if isinstance(row, list)), MOST_TEXT)
    return converted(table, NumberedMap).rows, []


PLACEMENT_FORMATS: dict[str, PlacementFormat] = {
    "vllm-map": PlacementFormat(_read_vllm, _write_vllm),
    "vllm-list": PlacementFormat(_read_vllm, _write_vllm_list),
    "sglang": PlacementFormat(_read_sglang, _write_sglang, ".json", by_decoder=True),
    "eplb": PlacementFormat(_read_eplb, _write_eplb),
    "vllm-ascend": PlacementFormat(_read_ascend, _write_ascend, ".json", mixes_shared=True),
    "trtllm": PlacementFormat(
        _read_trtllm, _write_trtllm, "", True, ": with MTP on, TensorRT-LLM asks for them, and stops without"
    ),
}
