"""Reads and writes plans and placements as JSON: their files, and the output of `aurora place --json`."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from msgspec import Meta, field

from aurora.errors import BadInput, BrokenPlan, shown
from aurora.io.clusters import ClusterTable, cluster_of, cluster_table
from aurora.io.files import check_schema, load_json, naming, schema_of, write_text
from aurora.io.schema import FileTable, converted, plain, shared
from aurora.types import Cut, Hierarchy, ModelPlan, Order, Placement, Plan, PlanOptions
from aurora.types.arrays import FloatArray
from aurora.types.options import know
from aurora.types.read_numbers import finite_number, whole_number

PLACEMENT_FORMAT, PLAN_FORMAT = "aurora placement", "aurora plan"
DIGEST = "digest"  # of all else in the file
Seconds = Annotated[float, Meta(ge=0, le=1e18)]
Bytes = Annotated[int, Meta(ge=0, lt=2**62)]


class PlacedLayer(FileTable):
    """A layer of a placement.

    Attributes:
        slots: by GPU: the experts in its slots.
        split: with replicas: by expert, pairs of a GPU and its part of the expert's tokens.
    """

    slots: tuple[tuple[int, ...], ...]
    split: dict[int, list[tuple[int, float]]] | None = None


class PlacementTable(FileTable, kw_only=True):
    """A placement.

    Attributes:
        schema: 1.
        format: "aurora placement".
        method: name of the method that made it.
        layers: the layers with experts.
    """

    schema: int
    format: str = ""
    method: str = ""
    layers: Annotated[list[PlacedLayer], Meta(min_length=1)]


class OrderTable(FileTable):
    """The order of one all-to-all.

    Attributes:
        method: the order's name.
        sends_open: transfers that a rank may be sending at the same time.
        recvs_open: transfers that a rank may be receiving at the same time.
        pairs: source and destination of each row: `0>1 1>0`.
        shares: by row, the part of its pair's bytes: `0.0:0.5 0.5:1.0`.
        paced: true: rates are limited so that all rows end at the same time.
        tiers: the tier of each row: `0 1`.
    """

    method: str
    sends_open: int
    recvs_open: int
    pairs: Annotated[str, Meta(pattern="^([0-9]{1,9}>[0-9]{1,9}( |$))*$")]
    shares: str | None = None
    paced: bool = False
    tiers: str | None = None


class HierarchyTable(FileTable):
    """Servers of hierarchical all-to-alls.

    Attributes:
        server_G: the server of each rank.
        chunks: number of chunks.
        level_from: rows from which NICs are levelled; none: never.
    """

    server_G: list[int] = field(name="servers")
    chunks: int
    level_from: int | None = None


class PlannedLayer(PlacedLayer, kw_only=True):
    """A layer of a plan.

    Attributes:
        load_LE: tokens of each expert in the traffic that the plan was made for.
        survival: by number of failed nodes, the probability that every expert is still held.
        dispatch_s_L: seconds of the dispatch of the whole profile's traffic at once.
        fluid_bound_s_L: the fluid bound on dispatch_s.
        one_to_one_bound_s_L: the one-to-one bound on dispatch_s.
        cut: the port or NIC that limits the dispatch between servers.
        dispatch: order of the dispatch.
        combine: order of the combine; "reversed": the dispatch backwards.
    """

    load_LE: list[int] = field(name="load")
    survival: dict[int, float] | None = None
    dispatch_s_L: Seconds = field(name="dispatch_s")
    fluid_bound_s_L: Seconds = field(name="fluid_bound_s")
    one_to_one_bound_s_L: Seconds = field(name="one_to_one_bound_s")
    cut: Cut | None = None
    dispatch: OrderTable
    combine: OrderTable | Literal["reversed"]


class ProfileName(FileTable):
    """The profile that a plan was made from.

    Attributes:
        profile_path: the file, relative to the plan's.
        profile_digest: digest of the profile.
        traffic_digest: digest of its traffic alone.
    """

    profile_path: str = field(name="path")
    profile_digest: str = field(name="digest")
    traffic_digest: str = field(name="traffic")


class ModelTable(FileTable, kw_only=True):
    """A model of a plan.

    Attributes:
        model: the model's name.
        fingerprint: hashes of its router weights.
        profile: the profile that it was planned from.
        top_k: experts per token.
        dispatch_bytes: payload of one (token, expert) pair.
        expert_bytes: weights of one expert in one layer.
        other_bytes: all other weights, which every rank holds.
        dense_layers: numbers of the decoder layers without experts.
        hierarchy: of hierarchical all-to-alls; none: they are flat.
        layers: the layers with experts.
    """

    model: str
    fingerprint: str
    profile: ProfileName
    top_k: int
    dispatch_bytes: Bytes
    expert_bytes: int
    other_bytes: int
    dense_layers: tuple[int, ...]
    hierarchy: HierarchyTable | None = None
    layers: Annotated[list[PlannedLayer], Meta(min_length=1)]


class PlanTable(FileTable, kw_only=True):
    """A plan.

    Attributes:
        schema: 5.
        format: "aurora plan".
        scenario: what the plan is for, in words.
        options: `auto` is left only where it has no effect, and for `order` where layers take the faster of two.
        notes: remarks on how the plan was made.
        objective: name of the formula of objective_s.
        objective_s: predicted seconds of all layers.
        bound_s: lower bound on objective_s over all placements.
        assignment_bound_s: lower bound over all assignments of groups of experts.
        unseen_s: expected seconds on future windows of the same traffic.
        slot_gain: part of unseen_s that one more slot on each GPU would save.
        estimated: true: objective_s is estimated from counts.
        gap: objective_s / bound_s - 1.
        cluster: the cluster, GPU by GPU, and its servers.
        models: the models.
        digest: sha256 of all else in the file.
    """

    schema: int
    format: str
    scenario: str = ""
    options: PlanOptions
    notes: tuple[str, ...]
    objective: str = ""
    objective_s: Seconds
    bound_s: Seconds
    assignment_bound_s: Seconds | None
    unseen_s: Seconds | None
    slot_gain: Annotated[float, Meta(ge=-1e18, le=1e18)] | None
    estimated: bool = False
    gap: Annotated[float, Meta(ge=-1, le=1e18)] | None = None
    cluster: ClusterTable
    models: list[ModelTable]
    digest: str = ""


def layers_json(placement: Placement) -> list[dict[str, Any]]:
    """Converts a Placement to dicts, one per layer: "slots": experts by GPU; with replicas "split": [GPU, share] by expert."""
    return [plain(PlacedLayer(**layer)) for layer in _placed(placement)]


def _placed(placement: Placement) -> list[dict[str, Any]]:
    """The fields of PlacedLayer by layer."""
    layers: list[dict[str, Any]] = []
    for layer, held_G in enumerate(placement.slots_LG):
        layers.append({"slots": held_G})
        if placement.split_LG is not None:
            split: dict[int, list[tuple[int, float]]] = {expert: [] for expert in range(placement.experts)}
            for gpu, (experts, parts) in enumerate(zip(held_G, placement.split_LG[layer], strict=True)):
                for expert, part in zip(experts, parts, strict=True):
                    split[expert].append((gpu, part))
            layers[-1]["split"] = split
    return layers


def _placement(layers: Sequence[PlacedLayer]) -> Placement:
    """The Placement of its layers; without "split", replicas take even parts of an expert's load."""
    slots_LG = tuple(layer.slots for layer in layers)
    if all(layer.split is None for layer in layers):
        return Placement.evenly(slots_LG)
    split_LG = []
    for number, layer in enumerate(layers):
        parts = {(expert, gpu): part for expert, pairs in (layer.split or {}).items() for gpu, part in pairs}
        if absent := {(expert, gpu) for gpu, held in enumerate(layer.slots) for expert in held} - {*parts}:
            where = "layers[{}].split: expected a part of expert {} on GPU {}, found none"
            raise BadInput(where.format(number, *min(absent)))
        split_LG.append(tuple(tuple(parts[expert, gpu] for expert in held) for gpu, held in enumerate(layer.slots)))
    return Placement(slots_LG, tuple(split_LG))


def load_placement(path: str | Path) -> Placement:
    """Reads a placement.

    Args:
        path: a file of `save_placement`, or the output of `aurora place --json`.

    Raises:
        BadInput: if the file holds no placement.
    """
    path = Path(path)
    table = load_json(path)
    check_schema(path, table, str(table.get("format", PLACEMENT_FORMAT)))
    with naming(path, "a placement"):
        return _placement(converted(table, PlacementTable).layers)


def save_placement(placement: Placement, method: str, path: Path) -> None:
    """Writes a placement as JSON.

    Args:
        placement: the placement.
        method: name of the method that made the placement, for people who read the file.
        path: exact path of the file.
    """
    layers = [PlacedLayer(**layer) for layer in _placed(placement)]
    table = PlacementTable(schema=schema_of(PLACEMENT_FORMAT), format=PLACEMENT_FORMAT, method=method, layers=layers)
    write_text(path, json.dumps(plain(table)) + "\n")


def load_plan(path: str | Path) -> Plan:
    """Reads a plan and checks it from first principles (`check_plan`).

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
        raise BadInput(f"{path}: expected an aurora plan, found format {shown(table.get('format'))}")
    check_schema(path, table, PLAN_FORMAT)
    with naming(path, "a whole aurora plan"):
        if isinstance(options := table.get("options"), dict):
            know(options)  # strategies that another process registered
        plan = _plan(converted(table, PlanTable), path)
    with naming(path):
        if table.get(DIGEST) != _digest(table):
            raise BrokenPlan("was changed after it was made, so that its seconds and bounds are not its own; make it anew")
        check_plan(plan)
    return plan


def save_plan(plan: Plan, path: Path) -> None:
    """Writes a plan as readable JSON, checked as `load_plan` checks it. Raises BrokenPlan."""
    from aurora.algorithms.check.plans import check_plan

    check_plan(plan)
    table = plain(_plan_table(plan))
    write_text(path, _readable(table | {DIGEST: _digest(table)}) + "\n")


def _digest(table: Mapping[str, Any]) -> str:
    """The sha256 of a plan's JSON object without its digest, however it is laid out."""
    return hashlib.sha256(json.dumps({name: table[name] for name in table if name != DIGEST}).encode()).hexdigest()


COLUMNS = ("load_LE", "dispatch_s_L", "fluid_bound_s_L", "one_to_one_bound_s_L")  # of a ModelPlan, which its layers have


def _plan_table(plan: Plan) -> PlanTable:
    models = []
    for model in plan.models:
        layers = [
            PlannedLayer(
                **placed,
                **{name: getattr(model, name)[layer] for name in COLUMNS},
                survival=None if plan.survival_LK is None else by_failures(plan.survival_LK[layer]),
                cut=model.cut_L[layer] if model.cut_L else None,
                dispatch=_order_table(dispatch),
                combine="reversed" if combine == dispatch.reversed else _order_table(combine),
            )
            for layer, (placed, dispatch, combine) in enumerate(
                zip(_placed(model.placement), model.dispatch_L, model.combine_L, strict=True)
            )
        ]
        profile = ProfileName(**shared(model, ProfileName))
        levels = None if model.hierarchy is None else HierarchyTable(**shared(model.hierarchy, HierarchyTable))
        models.append(ModelTable(profile=profile, layers=layers, hierarchy=levels, **shared(model, ModelTable, "hierarchy")))
    about = shared(plan, PlanTable, "models", "cluster", "gap")
    about |= {"schema": schema_of(PLAN_FORMAT), "format": PLAN_FORMAT, "gap": plan.gap if plan.gap < float("inf") else None}
    return PlanTable(models=models, cluster=cluster_table(plan.cluster), **about)


def _plan(table: PlanTable, path: Path) -> Plan:
    cluster, models = cluster_of(table.cluster, path), []
    for model in table.models:
        dispatch_L = tuple(_order(layer.dispatch) for layer in model.layers)
        combine_L = (
            dispatch.reversed if layer.combine == "reversed" else _order(layer.combine)
            for dispatch, layer in zip(dispatch_L, model.layers, strict=True)
        )
        columns: dict[str, Any] = {name: [getattr(layer, name) for layer in model.layers] for name in COLUMNS}
        models.append(
            ModelPlan(
                placement=_placement(model.layers),
                dispatch_L=dispatch_L,
                combine_L=tuple(combine_L),
                cut_L=tuple(layer.cut for layer in model.layers if cluster.servers is not None and layer.cut is not None),
                hierarchy=None if model.hierarchy is None else Hierarchy(**shared(model.hierarchy, Hierarchy)),
                **columns,
                **shared(model.profile, ModelPlan),
                **shared(model, ModelPlan, "hierarchy"),
            )
        )
    survival_LK = None if table.options.min_replicas is None else _survival(table.models[0].layers)
    return Plan(cluster, tuple(models), survival_LK=survival_LK, **shared(table, Plan, "cluster", "models"))


def by_failures(p_K: FloatArray) -> dict[int, float]:
    """Returns the survival probabilities after 1, 2, ... failures, p_K (K,), by number of failures."""
    return dict(enumerate(p_K.tolist(), 1))


def _survival(layers: Sequence[PlannedLayer]) -> FloatArray:
    return np.array([[found[failed] for failed in range(1, 1 + len(found))] for layer in layers if (found := layer.survival)])


def _order_table(order: Order) -> OrderTable:
    return OrderTable(
        pairs=" ".join(["%d>%d"] * len(order.pairs_X2)) % tuple(order.pairs_X2.ravel().tolist()),
        shares=None if order.share_X2 is None else " ".join(f"{a!r}:{b!r}" for a, b in order.share_X2.tolist()),
        tiers=None if order.tier_X is None else " ".join(map(str, order.tier_X.tolist())),
        **shared(order, OrderTable, "tiers"),
    )


def _order(table: OrderTable) -> Order:
    shares = [] if table.shares is None else [[*map(finite_number, part.split(":"))] for part in table.shares.split()]
    return Order(
        pairs_X2=np.fromstring(table.pairs.replace(">", " "), dtype=np.int64, sep=" ").reshape(-1, 2),
        share_X2=None if table.shares is None else np.array(shares).reshape(-1, 2),
        tier_X=None if table.tiers is None else np.array([whole_number(tier) for tier in table.tiers.split()], dtype=np.int64),
        **shared(table, Order),
    )


def _readable(value: Any, line: str = "\n") -> str:
    """JSON text with every entry of an object on a line of its own, and lists on one line unless they hold objects."""
    deeper = line + " "
    if isinstance(value, dict) and value:
        entries = [f"{json.dumps(key)}: {_readable(member, deeper)}" for key, member in value.items()]
        return "{" + deeper + f",{deeper}".join(entries) + line + "}"
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[" + deeper + f",{deeper}".join(_readable(member, deeper) for member in value) + line + "]"
    return json.dumps(value, allow_nan=False)
