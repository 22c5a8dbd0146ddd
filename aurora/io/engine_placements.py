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
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from aurora.algorithms.gpu_slots import filled, redundant_experts
from aurora.algorithms.workload.model_config import Shape
from aurora.algorithms.workload.model_structure import moe_layers
from aurora.errors import BadInput, check_one_of, shown
from aurora.io.clusters import MOST_GPUS
from aurora.io.files import json_value, load_json, naming, read_text
from aurora.io.routing_dumps import load_sglang, spoken_layers
from aurora.types import Placement
from aurora.types.arrays import MOST_LAYERS, IntArray, layer_numbers
from aurora.types.read_numbers import whole_number

Slots = tuple[tuple[tuple[int, ...], ...], ...]  # by layer and GPU: the experts there
Rows = dict[int, Any]  # by layer: the experts of its slots, or of each GPU's slots; checked by `_check_experts`
EVERY_LAYER = -1  # key of the one row that all layers share


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
            rows, left_out = _without_shared(rows, model.experts, model.shared_experts)
            remarks += left_out
        _check_experts(rows, model.experts if model else None)
        layers = _layers(rows, known.by_decoder, dense_layers, model)
        kept = {layer: rows[layer] for layer in layers}
        slots_LG = _slots(kept, gpus)
    if model is not None and (beyond := sorted({*rows} - {*layers, *model.dense_layers})):
        remarks.append(f"rows of multi-token prediction are left out: {spoken_layers(beyond)}")
    if twice := _seconds(slots_LG, layers):
        said = ", ".join(twice[:3]) + (", ..." if len(twice) > 3 else "")
        remarks.append(
            f"{len(twice)} slots repeat an expert of their own GPU, whose one replica there takes their share too: {said}"
        )
    flat = all(type(row[0]) is int for row in kept.values())
    return Import(Placement.evenly(slots_LG), tuple(remarks), np.array([*kept.values()], dtype=np.int64) if flat else None)


def _seconds(slots_LG: Slots, layers: Sequence[int]) -> list[str]:
    """Returns a text for each slot whose expert has an earlier slot on the same GPU."""
    return [
        f"expert {expert} of layer {layer} on GPU {gpu}"
        for layer, held_G in zip(layers, slots_LG, strict=True)
        for gpu, held in enumerate(held_G)
        for expert, times in Counter(held).items()
        for _ in range(times - 1)
    ]


def _without_shared(rows: Rows, experts: int, shared: int) -> tuple[Rows, list[str]]:
    """Returns the rows without the shared experts, numbered from `experts` on, and a sentence if there were any."""
    numbers = range(experts, experts + shared)
    kept = {
        layer: [[expert for expert in held if expert not in numbers] for held in row] if _by_gpu(row) else row
        for layer, row in rows.items()
    }
    said = f"shared experts under mix placement are left out: {spoken_layers(numbers)}; every token computes them"
    return kept, [said] * (kept != rows)


def _layers(rows: Rows, by_decoder: bool, dense_layers: Sequence[int], model: Shape | None) -> Sequence[int]:
    """Returns the numbers of the rows that are of layers with experts, or raises BadInput if one is missing or too many."""
    if far := [layer for layer in rows if not 0 <= layer < MOST_LAYERS]:
        raise BadInput(f"expected layers from 0 to {MOST_LAYERS - 1}, found {shown(far[0])}")
    if model is None:
        every = range(max(rows, default=-1) + 1)
        expected: Sequence[int] = [layer for layer in every if layer not in dense_layers] if by_decoder else every
        known = len(every)
        if by_decoder and not dense_layers:
            expected = sorted(rows)
    elif by_decoder:
        decoders = model.decoder_layers
        expected, known = moe_layers(decoders - len(dense_layers), dense_layers), decoders + model.mtp_layers
    else:
        expected, known = range(model.layers), model.layers
    wrong = [f"layer {layer} is missing" for layer in expected if layer not in rows][:1]
    beyond = [layer for layer in rows if not 0 <= layer < known]
    if not expected:
        raise BadInput(f"expected rows of layers with experts, found {spoken_layers(sorted(rows))}")
    if wrong or beyond:
        mtp = model is not None and 0 < len(beyond) <= model.mtp_layers
        hint = ": rows of multi-token prediction are not read, leave them out" if mtp else "".join(f": {row}" for row in wrong)
        raise BadInput(f"expected layers {spoken_layers(expected)}, found {spoken_layers(sorted(rows))}{hint}")
    return expected


def _check_experts(rows: Rows, experts: int | None) -> None:
    """Raises BadInput unless each layer holds all experts, numbered from 0, and nothing else; None: as many as any has."""
    limit = f"to {experts - 1}" if experts else "on"
    flat = {layer: [*_flat(row)] for layer, row in rows.items()}
    for layer, row in flat.items():
        for slot, expert in enumerate(row):
            if type(expert) is not int or not 0 <= expert < (experts or 1 << 62):
                empty = ", as in an empty slot" if expert == -1 else ""
                raise BadInput(f"layer {layer}, slot {slot}: expected an expert from 0 {limit}, found {shown(expert)}{empty}")
    experts = experts or 1 + max(map(max, filter(None, flat.values())), default=0)
    for layer, row in flat.items():
        if len(seen := set(row)) < experts:
            sizes = {len(each) * (1 + max(each, default=0) == len(each)) for each in map(set, flat.values())}
            if 0 not in sizes and {experts} < sizes:
                raise BadInput(f"layers have unequal experts: {experts} at most, and {len(seen)} in layer {layer}")
            absent = next(expert for expert in range(experts) if expert not in seen)
            raise BadInput(f"layer {layer}: expected experts 0 to {experts - 1}, {experts - len(seen)} missing, first {absent}")


def _flat(row: Any) -> Iterable[Any]:
    """The experts of a layer's slots, GPU by GPU."""
    return chain.from_iterable(row) if _by_gpu(row) else row


def _by_gpu(row: Any) -> bool:
    """Returns whether a layer's row is a list for each GPU."""
    return bool(row) and all(isinstance(slots, list) for slots in row)


def _slots(rows: Rows, gpus: int | None) -> Slots:
    """Returns the experts of each layer's slots by GPU; a row of all GPUs is divided evenly."""
    if any(row and isinstance(row[0], list) for row in rows.values()):
        if len(lengths := {len(row) for row in rows.values()}) > 1 or gpus not in (None, *lengths):
            raise BadInput(f"expected {gpus or 'equally many'} GPUs in every layer, found {sorted(lengths)}")
        return tuple(tuple(map(tuple, row)) for row in rows.values())
    if gpus is None:
        raise BadInput("the file does not say the number of GPUs; give `gpus`")
    slots = {len(row) for row in rows.values()}
    if len(slots) != 1 or gpus < 1 or max(slots) % gpus:
        raise BadInput(f"expected as many slots in every layer, on {gpus} GPUs evenly, found {sorted(slots)}")
    per_gpu = max(slots) // gpus
    return tuple(tuple(tuple(row[g * per_gpu : (g + 1) * per_gpu]) for g in range(gpus)) for row in rows.values())


def _rows(slots_LG: Slots) -> list[list[int]]:
    """By layer, the experts of all slots, GPU by GPU."""
    return [[expert for slots in layer for expert in slots] for layer in slots_LG]


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


def _write_vllm_list(slots_LG: Slots, dense_layers: Sequence[int]) -> str:
    return json.dumps(_rows(slots_LG)) + "\n"


def _read_vllm(path: Path) -> tuple[Rows, list[str]]:
    """Any of vLLM's forms, told apart by their keys; layers without experts have no rows in them."""
    text = read_text(path)
    try:
        tables = [json_value(text)]
    except ValueError:
        tables = [json_value(line) for line in text.splitlines() if line.strip()]
    records = [table for table in tables if isinstance(table, dict) and "record_type" in table]
    if records or len(tables) != 1:
        for record in records:
            if record["record_type"] == "eplb_initial_mapping":
                return _numbered(record["initial_global_assignments"], record.get("num_slots")), []
        raise BadInput("expected a line of record_type eplb_initial_mapping, found none")
    match tables[0]:
        case [*rows]:
            return _by_layer(rows), []
        case {"expert_to_ep_rank": rank_E}:
            by_layer = _by_layer(rank_E)
            return {layer: _experts_of_ranks(row) for layer, row in by_layer.items()}, []
        case {"0": _} as rows:
            return _numbered(rows, None), []
        case {"model_maps": dict() as maps}:
            return _of_one_model(maps)
    return _by_layer(_entry(tables[0], "physical_to_logical_map")), []


def _by_layer(rows: Any) -> Rows:
    """A list per layer by layer, or one list of numbers for EVERY_LAYER."""
    return dict(enumerate(rows)) if all(isinstance(row, list) for row in rows) else {EVERY_LAYER: rows}


def _numbered(rows: Any, slots: Any) -> Rows:
    """The rows of a mapping from layers' numbers, ascending; each has `slots` slots, None: any number."""
    if not isinstance(rows, Mapping):
        raise BadInput(f"initial_global_assignments: expected layers' numbers with lists, found {shown(rows)}")
    if wrong := [layer for layer in rows if not re.fullmatch("0|[1-9][0-9]{0,5}", str(layer))]:
        raise BadInput(f"expected layers' numbers, found {shown(wrong[0])}")
    if slots is not None and any(len(row) != slots for row in rows.values()):
        raise BadInput(f"expected num_slots = {shown(slots)} slots in every layer, found {sorted({*map(len, rows.values())})}")
    return dict(sorted((int(layer), row) for layer, row in rows.items()))


def _experts_of_ranks(rank_E: Any) -> list[list[int]]:
    """Returns the experts of each rank by the rank of each expert: [0, 0, 1, 2] gives [[0, 1], [2], [3]]."""
    held_G: list[list[int]] = []
    for expert, rank in enumerate(rank_E):
        if type(rank) is not int or not 0 <= rank < MOST_GPUS:
            raise BadInput(f"expert_to_ep_rank, expert {expert}: expected a rank below {MOST_GPUS}, found {shown(rank)}")
        held_G += [[] for _ in range(len(held_G), rank + 1)]
        held_G[rank].append(expert)
    return held_G


def _of_one_model(maps: Mapping[str, Any]) -> tuple[Rows, list[str]]:
    """The rows of all pipeline stages of the one model that is not of multi-token prediction; by MODEL or MODEL#pp_rank=N."""
    stages: dict[str, dict[int, list[Any]]] = {}
    for key, entry in maps.items():
        model, _, stage = key.partition("#pp_rank=")
        rows = _entry(entry, "physical_to_logical_map")
        if len(rows) != entry.get("num_moe_layers", len(rows)):
            raise BadInput(f"{key}: expected the {shown(entry['num_moe_layers'])} layers of num_moe_layers, found {len(rows)}")
        stages.setdefault(model, {})[whole_number(stage or "0")] = rows
    mtp = [model for model in stages if re.search("mtp|nextn", model, re.IGNORECASE)]
    if len(served := sorted({*stages} - {*mtp})) != 1:
        raise BadInput(f"expected the map of one model, beside multi-token prediction, found {', '.join(served) or 'none'}")
    rows_of = stages[served[0]]
    if sorted(rows_of) != [*range(len(rows_of))]:
        raise BadInput(f"{served[0]}: expected pipeline stages 0 to {max(rows_of)}, found {sorted(rows_of)}")
    every = chain.from_iterable(rows_of[stage] for stage in sorted(rows_of))
    return dict(enumerate(every)), [f"maps of multi-token prediction are left out: {', '.join(mtp)}"] * bool(mtp)


def _entry(table: Any, key: str) -> Any:
    """Returns a map's entry, or raises BadInput that names the engine whose map it is, by the keys that it has."""
    if isinstance(table, Mapping) and key not in table:
        engine = next((engine for known, engine in _ENGINE_OF_KEY.items() if known in table), None)
        raise BadInput(f"'{key}' is missing" + (f": a map of {engine}?" if engine else ""))
    return table[key]


_ENGINE_OF_KEY = {"physical_to_logical_map": "sglang", "phy2log": "eplb", "layer_list": "vllm-ascend"}
_ENGINE_OF_KEY |= {"initial_global_assignments": "trtllm", "model_maps": "vllm-map", "expert_to_ep_rank": "vllm-map"}


def _write_sglang(slots_LG: Slots, dense_layers: Sequence[int]) -> str:
    """One row per decoder layer; rows of dense layers are never read and repeat the first MoE layer's."""
    rows = _rows(slots_LG)
    by_layer = dict(zip(moe_layers(len(rows), dense_layers), rows, strict=True))
    every = [by_layer.get(layer, rows[0]) for layer in range(len(rows) + len(dense_layers))]
    return json.dumps({"physical_to_logical_map": every}) + "\n"


def _read_sglang(path: Path) -> tuple[Rows, list[str]]:
    recording = load_sglang(path)
    if "physical_to_logical_map" not in recording and "logical_count" in recording:
        raise BadInput("holds loads (logical_count), not a placement")
    rows = _entry(recording, "physical_to_logical_map")
    return dict(enumerate(rows.tolist() if hasattr(rows, "tolist") else rows)), []


def _write_eplb(slots_LG: Slots, dense_layers: Sequence[int]) -> str:
    phy2log = _rows(slots_LG)
    slots = [[[p for p, e in enumerate(row) if e == expert] for expert in range(1 + max(row))] for row in phy2log]
    logcnt = [[len(of) for of in row] for row in slots]
    most = max(count for row in logcnt for count in row)
    log2phy = [[of + [-1] * (most - len(of)) for of in row] for row in slots]
    return json.dumps({"phy2log": phy2log, "log2phy": log2phy, "logcnt": logcnt}) + "\n"


def _read_eplb(path: Path) -> tuple[Rows, list[str]]:
    return dict(enumerate(_entry(load_json(path), "phy2log"))), []


def _write_ascend(slots_LG: Slots, dense_layers: Sequence[int]) -> str:
    layers = [
        {
            "layer_id": layer,
            "device_count": len(held_G),
            "device_list": [{"device_id": gpu, "device_expert": list(experts)} for gpu, experts in enumerate(held_G)],
        }
        for layer, held_G in enumerate(slots_LG)
    ]
    return json.dumps({"moe_layer_count": len(layers), "layer_list": layers}) + "\n"


def _read_ascend(path: Path) -> tuple[Rows, list[str]]:
    """Layers and devices in the sequence of their lists, as the engine reads them; it does not look at their numbers."""
    table = load_json(path)
    layers = _entry(table, "layer_list")
    counted = [("moe_layer_count", table, layers), *(("device_count", layer, layer["device_list"]) for layer in layers)]
    for key, of, listed in counted:
        if len(listed) != of.get(key, len(listed)):
            raise BadInput(f"expected the {shown(of[key])} {key.split('_')[-2]}s of {key}, found {len(listed)}")
    for key, rows in [("layer_id", layers), *(("device_id", layer["device_list"]) for layer in layers)]:
        ids = [row[key] for row in rows if key in row]
        if len(ids) not in (0, len(rows)) or any(after <= before for before, after in pairwise(ids)):
            raise BadInput(f"expected {key} ascending, as the engine goes by the list's sequence, found {ids}")
    found = {number: [device["device_expert"] for device in layer["device_list"]] for number, layer in enumerate(layers)}
    if len(slots := {len(held) for row in found.values() for held in row}) > 1:
        raise BadInput(f"expected as many experts on every device, found {' and '.join(map(str, sorted(slots)))}")
    return found, []


def _write_trtllm(slots_LG: Slots, dense_layers: Sequence[int]) -> str:
    rows = _rows(slots_LG)
    balancer = {
        "num_slots": len(rows[0]),
        "initial_global_assignments": dict(zip(moe_layers(len(rows), dense_layers), rows, strict=True)),
        "layer_updates_per_iter": 0,
    }
    return str(yaml.safe_dump(balancer, default_flow_style=None, sort_keys=False, width=10**6))


class _OnceLoader(yaml.SafeLoader):
    """PyYAML's safe loader, which refuses a key that a mapping has twice instead of taking the last."""

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
    return _numbered(_entry(table, "initial_global_assignments"), table.get("num_slots")), []


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
