"""aurora place: loads of experts -> how many replicas each has, where they are, and how its load divides over them."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from aurora.cli.common import terminal
from aurora.errors import BadInput

if TYPE_CHECKING:
    from aurora.types import FailureDomains, ReplicaPlacement, ResilientPlacement

TARGET = 0.95  # of mean / largest load, that --explain looks for slots for


def place(
    loads: Annotated[Path, typer.Argument(help="each expert's load: .csv (no header) or .npy, a row a layer")],
    slots: Annotated[int, typer.Option(help="experts that fit on each GPU; with --survive: on each node")],
    gpus: Annotated[int | None, typer.Option(help="how many; default: one a node")] = None,
    nodes: Annotated[int | None, typer.Option(help="the GPUs are this many equal runs; only eplb with --groups asks")] = None,
    groups: Annotated[int, typer.Option(help="the experts are this many equal runs: eplb places them node by node")] = 1,
    replicas: Annotated[
        str | None, typer.Option(help="how many each expert has, r0,r1,...; default: the method chooses")
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            help="equal-split: replicas share evenly, the default; free-split: as is best; eplb: the baseline. With --survive: "
            "aurora, the default, mro, spread, compact"
        ),
    ] = None,
    survive: Annotated[
        bool, typer.Option("--survive", help="place for failures of nodes instead: how likely every expert is still held")
    ] = False,
    min_replicas: Annotated[
        int | None,
        typer.Option(help="with --survive: replicas of each expert at least; one failure less is survived for certain"),
    ] = None,
    alive: Annotated[
        int | None, typer.Option(help="with --survive: optimise for so many nodes left; default: few failures first")
    ] = None,
    racks: Annotated[str | None, typer.Option(help="with --survive: each node's rack, 0,0,1,...: racks fail whole")] = None,
    rates: Annotated[
        str | None, typer.Option(help="with --survive: how often each node, or rack, fails against the others, 1,1,2.5,...")
    ] = None,
    seed: Annotated[int, typer.Option(help="for the search over counts")] = 0,
    explain: Annotated[
        bool, typer.Option("--explain", help=f"how many slots bring mean/max to {TARGET}, layer by layer")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print the placement as JSON")] = False,
) -> None:
    """Place experts with replicas so that the most loaded GPU has as little as possible, with a bound below it; or so that all
    of them survive when nodes fail."""
    if survive:
        for name, value in {"--gpus": gpus, "--explain": explain or None, "--groups": None if groups == 1 else groups}.items():
            if value is not None:
                raise BadInput(f"{name}: has no effect with --survive, which places on --nodes")
        _survive(loads, _hosts(nodes, slots, racks, rates), method, min_replicas, replicas, alive, seed, as_json)
        return
    for name, given in {"--min-replicas": min_replicas, "--alive": alive, "--racks": racks, "--rates": rates}.items():
        if given is not None:
            raise BadInput(f"{name}: expected --survive, to place for failures")
    from aurora.io import load_loads
    from aurora.planner.check.replicas import check_layout
    from aurora.planner.replication.registry import place as make
    from aurora.planner.replication.registry import slots_needed
    from aurora.reports.tables import layout_table
    from aurora.types import GpuSlots

    if explain and as_json:
        raise BadInput("place: --explain prints text; leave out --json")
    if gpus is None and nodes is None:
        raise BadInput("place: expected --gpus, or --nodes of one GPU each")
    load_LE = load_loads(loads)
    one_each = gpus if gpus is not None else nodes
    room = GpuSlots.equal(one_each or 0, slots, 1 if nodes is None else nodes, groups)
    made = make(load_LE, room, method or "equal-split", None if replicas is None else _counts("--replicas", replicas), seed)
    check_layout(made, load_LE, room)
    if as_json:
        print(json.dumps(_as_json(made)))
        return
    console = terminal()
    console.print(layout_table(made))
    if explain:
        have = int(room.slots_G.sum())
        for layer, load_E in enumerate(load_LE):
            fewest, enough = slots_needed(load_E, room, TARGET, seed)
            now = made.mean_load_L[layer] / made.max_load_L[layer] if made.max_load_L[layer] else 1.0
            most = made.mean_load_L[layer] / made.bound_L[layer] if made.bound_L[layer] else 1.0
            console.print(
                f"layer {layer}: mean/max {now:.3f} with {have} slots, {most:.3f} at most; "
                f"{TARGET} takes at least {fewest} slots however load divides, and free-split reaches it with {enough} "
                f"({enough // room.gpus} a GPU)",
                soft_wrap=True,
            )


def _survive(
    loads: Path,
    hosts: "FailureDomains",
    method: str | None,
    min_replicas: int | None,
    replicas: str | None,
    alive: int | None,
    seed: int,
    as_json: bool,
) -> None:
    from aurora.io import load_loads
    from aurora.planner.check.replicas import check_resilient
    from aurora.planner.replication.failure_resilient import DEFAULT, survive
    from aurora.reports.tables import survival_table

    counts = None if replicas is None else _counts("--replicas", replicas)
    made = survive(load_loads(loads), hosts, method or DEFAULT, min_replicas, counts, alive, seed)
    check_resilient(made, hosts, guaranteed=made.method == DEFAULT)
    if as_json:
        print(json.dumps(_survival_json(made)))
    else:
        terminal().print(survival_table(made))


def _hosts(nodes: int | None, slots: int, racks: str | None, rates: str | None) -> "FailureDomains":
    import numpy as np

    from aurora.types import FailureDomains

    if nodes is None:
        raise BadInput("place --survive: expected --nodes")
    equal = FailureDomains.equal(nodes, slots)
    domain_N = equal.domain_N if racks is None else np.array(_counts("--racks", racks))
    try:
        odds = [1.0] * len(set(domain_N.tolist())) if rates is None else [float(rate) for rate in rates.split(",")]
    except ValueError:
        raise BadInput(f"--rates: expected numbers with commas between, found {rates!r}") from None
    return FailureDomains(equal.slots_N, domain_N, np.array(odds))


def _counts(option: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise BadInput(f"{option}: expected whole numbers with commas between, found {text!r}") from None


def _survival_json(made: "ResilientPlacement") -> dict[str, object]:
    from aurora.io.plans import by_failures

    layers = [
        {
            "slots": [list(held) for held in slots_N],
            "survival": by_failures(survival.p_K),
        }
        for slots_N, survival in zip(made.slots_LN, made.survival_L, strict=True)
    ]
    return {"schema": 1, "method": made.method, "layers": layers}


def _as_json(layout: "ReplicaPlacement") -> dict[str, object]:
    from aurora.io.placements import layers_json

    loads = zip(layout.max_load_L.tolist(), layout.mean_load_L.tolist(), layout.bound_L.tolist(), strict=True)
    layers = [
        {**placed, "max_load": most, "mean_load": mean, "bound": bound}
        for placed, (most, mean, bound) in zip(layers_json(layout.placement), loads, strict=True)
    ]
    return {"schema": 1, "method": layout.method, "layers": layers, "seconds": layout.seconds}
