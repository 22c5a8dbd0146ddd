"""aurora order and place: an all-to-all -> its schedule; loads of experts -> how many replicas each has, and where."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import aurora
from aurora.cli.inputs import check_output
from aurora.cli.options import names, refuse_given
from aurora.cli.output import json_text, show
from aurora.errors import BadInput
from aurora.io import load_cluster, load_loads, load_matrix, load_profile, write_text
from aurora.types import Cluster, FailureDomains, GpuSlots
from aurora.types.arrays import IntArray, square_bytes
from aurora.types.options import OptionField

TARGET = 0.95  # mean / largest load that --survive adds slots for
MOST_SPARE = 8  # slots per GPU more than the fewest that --survive tries, to balance loads
FIXED = 256  # redundant experts that engines keep for failures, whatever the model; SGLang's elastic EP
LOADS, FAILURES = "By load", "For failures of nodes"
BY_LOAD, BY_FAILURES = ("gpus", "groups"), ("min_replicas", "alive", "racks", "rates")  # options of each
BUT_SURVIVE = ("method", "replicas", "seed", "groups", "for_failures", *BY_FAILURES)


def place(
    loads: Path,
    *,
    slots: int | None = None,
    method: Annotated[str | None, OptionField(choices="replicas survive")] = None,
    replicas: str | None = None,
    nodes: int | None = None,
    seed: int = 0,
    gpus: Annotated[int | None, OptionField(panel=LOADS)] = None,
    groups: Annotated[int, OptionField(panel=LOADS)] = 1,
    survive: Annotated[bool, OptionField(panel=FAILURES)] = False,
    failures: Annotated[int, OptionField(least=0, panel=FAILURES)] = 1,
    for_failures: Annotated[bool, OptionField(panel=FAILURES)] = False,
    min_replicas: Annotated[int | None, OptionField(panel=FAILURES)] = None,
    alive: Annotated[int | None, OptionField(panel=FAILURES)] = None,
    racks: Annotated[str | None, OptionField(panel=FAILURES)] = None,
    rates: Annotated[str | None, OptionField(panel=FAILURES)] = None,
    as_json: bool = False,
) -> None:
    """Place experts with replicas to minimise the largest load of a GPU, and print a lower bound. With --for-failures, instead
    maximise the probability that every expert survives failures of nodes. With --survive, find the fewest slots with which
    every expert survives any failure, or any K with --failures K.

    Args:
        loads: load of each expert: .csv without header or .npy, one row per layer.
        slots: number of experts that fit on each GPU; with --for-failures: on each node; with --survive: the fewest.
        method: {replicas}; with --for-failures: {survive}; default: the first.
        replicas: replicas of each expert, r0,r1,...; default: the method chooses.
        nodes: number of nodes; each has equally many GPUs.
        seed: random seed of methods that draw.
        gpus: number of GPUs; default: one per node.
        groups: number of expert groups of equal size; eplb keeps each group on one node.
        survive: find the fewest slots with which any GPU, or with --nodes any node, may fail, and place experts in them.
        failures: with --survive: how many may fail at the same time.
        for_failures: maximise the probability that every expert survives failures.
        min_replicas: minimum replicas N of each expert; with aurora the experts survive any N-1 failures.
        alive: optimise for this many remaining nodes; default: few failures first.
        racks: rack of each node, 0,0,1,...; a rack fails as a whole.
        rates: relative failure rate of each node, or rack, 1,1,2.5,....
    """
    from aurora.planner.check.replicas import check_layout, check_resilient
    from aurora.planner.replication.failure_resilient import DEFAULT, fewest_slots, place_to_survive
    from aurora.reports.json_objects import placement_json, survival_json
    from aurora.reports.plan_tables import layout_table, survival_table, survive_lines

    chosen: dict[str, Any] = {"replicas": _numbers("--replicas", replicas, int), "seed": seed}
    chosen |= {} if method is None else {"method": method}
    if survive:
        refuse_given(BUT_SURVIVE, "without `survive`")
        if (count := gpus if gpus is not None else nodes) is None:
            raise BadInput("place --survive: expected --gpus, or --nodes of one GPU each")
        load_LE = load_loads(loads)
        least = fewest_slots(load_LE.shape[1], count, failures, nodes)
        made = place_to_survive(load_LE, count, failures, nodes, slots)
        have = GpuSlots.equal(count, least if slots is None else slots)
        check_layout(made, load_LE, have)
        alone = aurora.place(load_LE, GpuSlots.equal(count, fewest_slots(load_LE.shape[1], count, 0)))
        more = (
            place_to_survive(load_LE, count, failures, nodes, least + spare)
            for spare in range(1, MOST_SPARE + 1 if slots is None else 1)
        )
        lines = survive_lines(made, alone, more, TARGET, load_LE.shape[1], failures, least, nodes, FIXED)
        show(as_json, placement_json(made) | {"fewest_slots": least}, layout_table(made), *lines)
        return
    refuse_given(("failures",), "with `survive`, which finds the fewest slots")
    if slots is None:
        raise BadInput("place: expected --slots")
    if for_failures:
        refuse_given(BY_LOAD, "without `for_failures`, which places on `nodes`")
        if nodes is None:
            raise BadInput("place --for-failures: expected --nodes")
        hosts = FailureDomains.equal(nodes, slots, _numbers("--racks", racks, int), _numbers("--rates", rates, float))
        held = aurora.place_for_failures(load_loads(loads), hosts, min_replicas=min_replicas, alive=alive, **chosen)
        check_resilient(held, hosts, guaranteed=held.method == DEFAULT)
        show(as_json, survival_json(held), survival_table(held))
        return
    refuse_given(BY_FAILURES, "with `for_failures`")
    if gpus is None and nodes is None:
        raise BadInput("place: expected --gpus, or --nodes of one GPU each")
    have = GpuSlots.equal((gpus if gpus is not None else nodes) or 0, slots, 1 if nodes is None else nodes, groups)
    load_LE = load_loads(loads)
    made = aurora.place(load_LE, have, **chosen)
    check_layout(made, load_LE, have)
    show(as_json, placement_json(made), layout_table(made))


def _numbers(option: str, text: str | None, kind: Callable[[str], Any]) -> list[Any] | None:
    try:
        return None if text is None else [kind(part) for part in text.split(",")]
    except ValueError:
        what = "whole numbers" if kind is int else "numbers"
        raise BadInput(f"{option}: expected {what} with commas between, found {text!r}") from None


def order(
    traffic: Path,
    *,
    cluster: Path | None = None,
    method: Annotated[str, OptionField(choices="order")] = "openshop",
    startup_s: Annotated[float | None, OptionField(flag="--startup")] = None,
    layer: int | None = None,
    seed: int = 0,
    on_gpus: bool = False,
    output: Path | None = None,
    as_json: bool = False,
) -> None:
    """Order one all-to-all. Show its time, its bounds, and the `gap` to the larger of the fluid and the cut bound.

    Args:
        traffic: bytes from row to column (.csv without header, or .npy); or a profile, with --layer.
        cluster: cluster TOML, or a shipped cluster's name; default: every port has 12.5e9 Bps.
        method: {order}; or all, to compare them.
        startup_s: fixed seconds per message; default: the cluster's.
        layer: for a profile: the MoE layer, whose experts are placed contiguously.
        seed: random seed of random orders and random priorities.
        on_gpus: also estimate how long GPUs take: by pushes into peers' memory, ordered or not, and by NCCL; and from how many
            bytes of a rank an order pays.
        output: write the JSON to a file.
    """
    from aurora.reports.json_objects import deliveries_json, schedule_json
    from aurora.reports.plan_tables import cut_line, delivery_table, order_table

    check_output(output=output)
    machines, bytes_GG = load_cluster(cluster) if cluster else None, _bytes(traffic, layer)
    methods = [name for name in names("order") if name != "auto"] if method == "all" else [method]
    made = [aurora.order(bytes_GG, machines, name, seed, startup_s) for name in methods]
    each = [schedule_json(one, len(bytes_GG)) for one in made]
    found, priced = {"schedules": each} if method == "all" else each[0], None
    if on_gpus:
        priced = _prices(bytes_GG, machines)
        found |= deliveries_json(*priced)
    if output is not None:
        write_text(output, json_text(found) + "\n")
    cut, wrote = made[0].cut, None if output is None else f"wrote {output}"
    deliveries = None if priced is None else delivery_table(*priced)
    show(as_json, found, order_table(made), None if cut is None else cut_line(cut), deliveries, wrote)


def _prices(bytes_GG: IntArray, machines: Cluster | None) -> tuple[dict[str, float], dict[str, float]]:
    from aurora.planner.alltoall.schedule import equal_network
    from aurora.planner.network.delivery import delivery_prices

    matrix = square_bytes("traffic", bytes_GG)
    return delivery_prices(matrix, equal_network(len(matrix)) if machines is None else machines.network)


def _bytes(traffic: Path, layer: int | None) -> IntArray:
    from aurora.planner.workload.traffic import contiguous_bytes

    if traffic.suffix != ".npz":
        if layer is not None:
            raise BadInput(f"{traffic}: --layer is for a profile (.npz)")
        return load_matrix(traffic)
    profile = load_profile(traffic)
    if layer is None or not 0 <= layer < profile.layers:
        raise BadInput(f"{traffic}: expected --layer from 0 to {profile.layers - 1}, found {layer}")
    return contiguous_bytes(profile, layer)
