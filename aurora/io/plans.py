"""Reads and writes plans and placements as JSON: their files, and the output of `aurora place --json`."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np

from aurora.errors import BadInput, BrokenPlan
from aurora.io.clusters import cluster_from_table, cluster_table
from aurora.io.files import check_keys, check_schema, load_json, naming, schema_of, write_text
from aurora.types import Cut, Hierarchy, ModelPlan, Order, Placement, Plan, PlanOptions
from aurora.types.arrays import FloatArray, IntArray, counts
from aurora.types.read_numbers import finite_number, whole_number

PLACEMENT_FORMAT = "aurora placement"


def layers_json(placement: Placement) -> list[dict[str, Any]]:
    """Converts a Placement to dicts, one per layer: "slots": experts by GPU; with replicas "split": [GPU, share] by expert."""
    layers: list[dict[str, Any]] = []
    for layer, held_G in enumerate(placement.slots_LG):
        layers.append({"slots": [list(experts) for experts in held_G]})
        if placement.split_LG is not None:
            split: dict[str, list[list[float]]] = {str(expert): [] for expert in range(placement.experts)}
            for gpu, (experts, parts) in enumerate(zip(held_G, placement.split_LG[layer], strict=True)):
                for expert, part in zip(experts, parts, strict=True):
                    split[str(expert)].append([gpu, part])
            layers[-1]["split"] = split
    return layers


def placement_from_json(layers: Sequence[Mapping[str, Any]]) -> Placement:
    """Returns the Placement of dicts that `layers_json` made.

    Args:
        layers: for each layer "slots" and perhaps "split"; without "split", replicas take even parts of an expert's load.
    """
    slots = tuple(tuple(tuple(experts) for experts in layer["slots"]) for layer in layers)
    if not any("split" in layer for layer in layers):
        return Placement.evenly(slots)
    shares = [
        {(whole_number(e), whole_number(g)): finite_number(part) for e, pairs in layer["split"].items() for g, part in pairs}
        for layer in layers
    ]
    split = tuple(
        tuple(tuple(share[expert, gpu] for expert in experts) for gpu, experts in enumerate(layer))
        for layer, share in zip(slots, shares, strict=True)
    )
    return Placement(slots, split)


def load_placement(path: str | Path) -> Placement:
    """Read a placement.

    Args:
        path: a file of `save_placement`, or the output of `aurora place --json`.

    Raises:
        BadInput: if the file holds no placement.
    """
    path = Path(path)
    table = load_json(path)
    check_schema(path, table, str(table.get("format", PLACEMENT_FORMAT)))
    with naming(path, "a placement"):
        return placement_from_json(table["layers"])


def save_placement(placement: Placement, method: str, path: Path) -> None:
    """Write a placement as JSON.

    Args:
        placement: the placement.
        method: name of the method that made the placement, for people who read the file.
        path: exact path of the file.
    """
    layers = layers_json(placement)
    about = {"schema": schema_of(PLACEMENT_FORMAT), "format": PLACEMENT_FORMAT, "method": method}
    write_text(path, json.dumps({**about, "layers": layers}) + "\n")


PLAN_FORMAT = "aurora plan"
DIGEST = "digest"  # of all else in the file
REVERSED = "reversed"  # in place of a combine that is the dispatch backwards
FORMER = ("coactivation", "time_limit_s")  # options that plans may hold; they decided nothing unless they are true
_PAIRS = re.compile(r"([0-9]{1,9}>[0-9]{1,9}( |$))*")
_SIZES = ("top_k", "dispatch_bytes", "expert_bytes", "other_bytes")  # of a model
_OBJECTIVE = ("objective", "objective_s", "bound_s", "assignment_bound_s", "unseen_s", "slot_gain")  # of a plan
_TIMES = ("dispatch_s", "fluid_bound_s", "one_to_one_bound_s")  # of a layer


def load_plan(path: str | Path) -> Plan:
    """Read a plan and check it from first principles (`check_plan`).

    Args:
        path: the JSON file. Plans of older schemas are refused; they must be made again from their profiles.

    Raises:
        BadInput: if the file is missing, damaged, or of another format or schema.
        BrokenPlan: if the plan does not do what it claims, or was changed after it was made.
    """
    from aurora.algorithms.check.plans import check_plan  # compiled: a command loads this module before it can say what misses

    path = Path(path)
    table = load_json(path)
    if table.get("format") != PLAN_FORMAT:
        raise BadInput(f"{path}: expected an aurora plan, found format {table.get('format')!r}")
    check_schema(path, table, PLAN_FORMAT)
    with naming(path, "a whole aurora plan"):
        plan = _plan_from_json(table)
    with naming(path):
        if table.get(DIGEST) != _digest(table):
            raise BrokenPlan("was changed after it was made, so that its seconds and bounds are not its own; make it anew")
        check_plan(plan)
    return plan


def save_plan(plan: Plan, path: Path) -> None:
    """Write a plan as readable JSON, checked as `load_plan` checks it. Raises BrokenPlan."""
    from aurora.algorithms.check.plans import check_plan

    check_plan(plan)
    table = _plan_to_json(plan)
    write_text(path, _readable(table | {DIGEST: _digest(table)}) + "\n")


def _digest(table: Mapping[str, Any]) -> str:
    """The sha256 of a plan's JSON object without its digest, however it is laid out."""
    return hashlib.sha256(json.dumps({name: table[name] for name in table if name != DIGEST}).encode()).hexdigest()


def _plan_to_json(plan: Plan) -> dict[str, Any]:
    return {
        "schema": schema_of(PLAN_FORMAT),
        "format": PLAN_FORMAT,
        "scenario": plan.scenario,
        "options": {name: value for name, value in asdict(plan.options).items() if (name, value) != ("kv_tokens", None)},
        "notes": list(plan.notes),
        **{name: getattr(plan, name) for name in _OBJECTIVE},
        **({"estimated": True} if plan.estimated else {}),
        "gap": plan.gap if plan.gap < float("inf") else None,
        "cluster": cluster_table(plan.cluster),
        "models": [
            {
                "model": m.model,
                "fingerprint": m.fingerprint,
                "profile": {"path": m.profile_path, "digest": m.profile_digest, "traffic": m.traffic_digest},
                **{name: getattr(m, name) for name in _SIZES},
                "dense_layers": list(m.dense_layers),
                **({} if m.hierarchy is None else {"hierarchy": _hierarchy_to_json(m.hierarchy)}),
                "layers": [
                    {
                        **placed,
                        "load": m.load_LE[layer].tolist(),
                        **({} if plan.survival_LK is None else {"survival": by_failures(plan.survival_LK[layer])}),
                        **{name: float(getattr(m, f"{name}_L")[layer]) for name in _TIMES},
                        **({"cut": vars(m.cut_L[layer])} if m.cut_L else {}),
                        "dispatch": _order_to_json(m.dispatch_L[layer]),
                        "combine": _combine_to_json(m.dispatch_L[layer], m.combine_L[layer]),
                    }
                    for layer, placed in enumerate(layers_json(m.placement))
                ],
            }
            for m in plan.models
        ],
    }


def _plan_from_json(table: Mapping[str, Any]) -> Plan:
    cluster, models = cluster_from_table("cluster", table["cluster"], "cluster"), []
    for m in table["models"]:
        layers = m["layers"]
        dispatches = tuple(_order_from_json(layer["dispatch"]) for layer in layers)
        figures: dict[str, Any] = {name: whole_number(m[name]) for name in _SIZES}
        figures |= {f"{name}_L": np.array([finite_number(layer[name]) for layer in layers]) for name in _TIMES}
        models.append(
            ModelPlan(
                model=str(m["model"]),
                fingerprint=str(m["fingerprint"]),
                profile_path=str(m["profile"]["path"]),
                profile_digest=str(m["profile"]["digest"]),
                traffic_digest=str(m["profile"]["traffic"]),
                placement=placement_from_json(layers),
                dispatch_L=dispatches,
                combine_L=tuple(map(_combine_from_json, dispatches, layers)),
                load_LE=counts("load", [layer["load"] for layer in layers], 2),
                dense_layers=tuple(m["dense_layers"]),
                cut_L=tuple(_cut_from_json(layer["cut"]) for layer in layers if cluster.servers is not None and "cut" in layer),
                hierarchy=_hierarchy_from_json(m["hierarchy"]) if "hierarchy" in m else None,
                **figures,
            )
        )
    options = _options_from_json(table["options"])
    return Plan(
        cluster,
        tuple(models),
        options,
        finite_number(table["objective_s"]),
        finite_number(table["bound_s"]),
        _number_or_none(table, "assignment_bound_s"),
        None if options.min_replicas is None else _survival(table["models"][0]["layers"]),
        _number_or_none(table, "unseen_s"),
        _number_or_none(table, "slot_gain"),
        tuple(str(note) for note in table["notes"]),
        table.get("estimated") is True or "between_s" in table,  # of earlier versions, which bounded the estimate
    )


def _number_or_none(table: Mapping[str, Any], name: str) -> float | None:
    return None if table[name] is None else finite_number(table[name])


def _options_from_json(table: Mapping[str, Any]) -> PlanOptions:
    table = {name: value for name, value in table.items() if name not in FORMER or value is True}
    check_keys("options", "of the plan", table, {field.name for field in fields(PlanOptions)})
    return PlanOptions(**table)


def by_failures(p_K: FloatArray) -> dict[str, float]:
    """Returns the survival probabilities after 1, 2, ... failures, p_K (K,), as a dict with keys "1", "2", ..."""
    return {str(failures): p for failures, p in enumerate(p_K.tolist(), 1)}


def _survival(layers: Sequence[Mapping[str, Any]]) -> FloatArray:
    return np.array([[finite_number(layer["survival"][str(k + 1)]) for k in range(len(layer["survival"]))] for layer in layers])


def _order_to_json(order: Order) -> dict[str, Any]:
    return {
        "method": order.method,
        "sends_open": order.sends_open,
        "recvs_open": order.recvs_open,
        "pairs": " ".join(["%d>%d"] * len(order.pairs_X2)) % tuple(order.pairs_X2.ravel().tolist()),
        **({} if order.share_X2 is None else {"shares": " ".join(f"{a!r}:{b!r}" for a, b in order.share_X2.tolist())}),
        **({"paced": True} if order.paced else {}),
        **({} if order.tier_X is None else {"tiers": " ".join(map(str, order.tier_X.tolist()))}),
    }


def _order_from_json(table: Mapping[str, Any]) -> Order:
    pairs = _pairs_from_text(table["pairs"])
    shares = table.get("shares")
    if shares is not None:
        shares = np.array([[finite_number(edge) for edge in part.split(":")] for part in shares.split()]).reshape(-1, 2)
    windows = whole_number(table["sends_open"]), whole_number(table["recvs_open"])
    tier_X = np.array([whole_number(tier) for tier in table["tiers"].split()], dtype=np.int64) if "tiers" in table else None
    return Order(str(table["method"]), pairs, *windows, shares, table.get("paced") is True, tier_X)


def _pairs_from_text(text: str) -> IntArray:
    """(X, 2) int64, the pairs of text such as "0>1 1>0"."""
    if not _PAIRS.fullmatch(text):
        raise BadInput(f"pairs: expected text such as '0>1 1>0', found {text[:40]!r}")
    return np.fromstring(text.replace(">", " "), dtype=np.int64, sep=" ").reshape(-1, 2)


def _combine_to_json(dispatch: Order, combine: Order) -> dict[str, Any] | str:
    """A layer's combine; REVERSED if it is the dispatch backwards."""
    return REVERSED if combine == dispatch.reversed else _order_to_json(combine)


def _combine_from_json(dispatch: Order, layer: Mapping[str, Any]) -> Order:
    """The combine of a layer with this dispatch."""
    return dispatch.reversed if layer["combine"] == REVERSED else _order_from_json(layer["combine"])


def _hierarchy_to_json(hierarchy: Hierarchy) -> dict[str, Any]:
    levelled = {} if hierarchy.level_from is None else {"level_from": hierarchy.level_from}
    return {"servers": hierarchy.server_G.tolist(), "chunks": hierarchy.chunks, **levelled}


def _hierarchy_from_json(table: Mapping[str, Any]) -> Hierarchy:
    level_from = whole_number(table["level_from"]) if "level_from" in table else None
    return Hierarchy(table["servers"], whole_number(table["chunks"]), level_from)


def _cut_from_json(table: Mapping[str, Any]) -> Cut:
    return Cut(finite_number(table["bound_s"]), whole_number(table["load_bytes"]), tuple(str(link) for link in table["links"]))


def _readable(value: Any, line: str = "\n") -> str:
    """JSON text with every entry of an object on a line of its own, and lists on one line unless they hold objects."""
    deeper = line + " "
    if isinstance(value, dict) and value:
        entries = [f"{json.dumps(key)}: {_readable(member, deeper)}" for key, member in value.items()]
        return "{" + deeper + f",{deeper}".join(entries) + line + "}"
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[" + deeper + f",{deeper}".join(_readable(member, deeper) for member in value) + line + "]"
    return json.dumps(value, allow_nan=False)
