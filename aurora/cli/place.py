"""aurora place: loads of experts -> how many replicas each has, which GPUs hold them, and how the load splits."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

import aurora
from aurora.cli.choices import completed
from aurora.cli.options import Json, is_given
from aurora.cli.output import placement_json, show, survival_json
from aurora.errors import BadInput
from aurora.types import FailureDomains, GpuSlots
from aurora.types.arrays import FloatArray

TARGET = 0.95  # of mean / largest load, that --explain looks for slots for
LOADS, FAILURES = "By load", "For failures of nodes"
BY_LOAD, BY_FAILURES = ("gpus", "explain", "groups"), ("min_replicas", "alive", "racks", "rates")  # options of each


def place(
    loads: Annotated[Path, typer.Argument(help="each expert's load: .csv (no header) or .npy, one row per layer")],
    slots: Annotated[int, typer.Option(help="experts that fit on each GPU; with --for-failures: on each node")],
    method: Annotated[
        str | None,
        typer.Option(
            help="{replicas}; with --for-failures: {survive}; default: the first",
            autocompletion=completed("replicas", "survive"),
        ),
    ] = None,
    replicas: Annotated[
        str | None, typer.Option(help="replicas of each expert, r0,r1,...; default: the method chooses")
    ] = None,
    nodes: Annotated[int | None, typer.Option(help="number of nodes, over which GPUs divide evenly")] = None,
    seed: Annotated[int, typer.Option(help="for methods that draw at random")] = 0,
    gpus: Annotated[int | None, typer.Option(help="number of GPUs; default: one per node", rich_help_panel=LOADS)] = None,
    groups: Annotated[
        int, typer.Option(help="number of expert groups of equal size; eplb keeps a group on one node", rich_help_panel=LOADS)
    ] = 1,
    explain: Annotated[
        bool,
        typer.Option(
            "--explain", help=f"show how many slots bring mean/max load to {TARGET}, layer by layer", rich_help_panel=LOADS
        ),
    ] = False,
    survive: Annotated[
        bool,
        typer.Option(
            "--for-failures",
            help="maximise the probability that every expert is still held after failures",
            rich_help_panel=FAILURES,
        ),
    ] = False,
    min_replicas: Annotated[
        int | None,
        typer.Option(
            help="replicas that each expert has at least, N; with aurora any N-1 failures are survived",
            rich_help_panel=FAILURES,
        ),
    ] = None,
    alive: Annotated[
        int | None,
        typer.Option(help="optimise for this many nodes left; default: few failures first", rich_help_panel=FAILURES),
    ] = None,
    racks: Annotated[
        str | None, typer.Option(help="each node's rack, 0,0,1,...; a rack fails as a whole", rich_help_panel=FAILURES)
    ] = None,
    rates: Annotated[
        str | None,
        typer.Option(help="relative failure rate of each node, or rack, 1,1,2.5,...", rich_help_panel=FAILURES),
    ] = None,
    as_json: Json = False,
) -> None:
    """Place experts with replicas so that the largest load of a GPU is as small as possible, with a lower bound; or, with
    --for-failures, so that every expert is likely to be held after nodes fail."""
    from aurora.io import load_loads
    from aurora.planner.replication.failure_resilient import DEFAULT

    counts = None if replicas is None else _numbers("--replicas", replicas, int)
    why = "has no effect with `survive`, which places on `nodes`" if survive else "expected `survive`, to place for failures"
    for name in filter(is_given, BY_LOAD if survive else BY_FAILURES):
        raise BadInput(f"`{name}`: {why}")
    if survive:
        if nodes is None:
            raise BadInput("place --for-failures: expected --nodes")
        hosts = _hosts(nodes, slots, racks, rates)
        _place_for_failures(
            load_loads(loads), hosts, DEFAULT if method is None else method, min_replicas, counts, alive, seed, as_json
        )
        return
    if gpus is None and nodes is None:
        raise BadInput("place: expected --gpus, or --nodes of one GPU each")
    have = GpuSlots.equal((gpus if gpus is not None else nodes) or 0, slots, 1 if nodes is None else nodes, groups)
    _place_by_load(load_loads(loads), have, "equal-split" if method is None else method, counts, seed, explain, as_json)


def _place_by_load(
    load_LE: FloatArray, have: GpuSlots, method: str, replicas: list[int] | None, seed: int, explain: bool, as_json: bool
) -> None:
    from aurora.planner.check.replicas import check_layout
    from aurora.planner.replication.registry import slots_needed
    from aurora.reports.plan_tables import layout_table

    made = aurora.place(load_LE, have, method, replicas=replicas, seed=seed)
    check_layout(made, load_LE, have)
    needed = [slots_needed(load_E, have, TARGET, seed) for load_E in load_LE] if explain else []
    found = placement_json(made)
    said = []
    for layer, (fewest, enough) in enumerate(needed):
        found["layers"][layer] |= {"slots_at_least": fewest, "slots_enough": enough}
        now, most = (
            made.mean_load_L[layer] / value if value else 1.0 for value in (made.max_load_L[layer], made.bound_L[layer])
        )
        said.append(
            f"layer {layer}: mean/max {now:.3f} with {have.slots_G.sum()} slots, {most:.3f} at most; {TARGET} takes at least "
            f"{fewest} slots however load divides, and free-split reaches it with {enough} ({enough // have.gpus} a GPU)"
        )
    show(as_json, found, layout_table(made), *said)


def _place_for_failures(
    load_LE: FloatArray,
    hosts: FailureDomains,
    method: str,
    min_replicas: int | None,
    replicas: list[int] | None,
    alive: int | None,
    seed: int,
    as_json: bool,
) -> None:
    from aurora.planner.check.replicas import check_resilient
    from aurora.planner.replication.failure_resilient import DEFAULT
    from aurora.reports.plan_tables import survival_table

    made = aurora.place_for_failures(
        load_LE, hosts, method, min_replicas=min_replicas, replicas=replicas, alive=alive, seed=seed
    )
    check_resilient(made, hosts, guaranteed=made.method == DEFAULT)
    show(as_json, survival_json(made), survival_table(made))


def _hosts(nodes: int, slots: int, racks: str | None, rates: str | None) -> FailureDomains:
    equal = FailureDomains.equal(nodes, slots)
    domain_N = equal.domain_N if racks is None else np.array(_numbers("--racks", racks, int))
    odds = np.ones(len(set(domain_N.tolist()))) if rates is None else np.array(_numbers("--rates", rates, float))
    return FailureDomains(equal.slots_N, domain_N, odds)


def _numbers(option: str, text: str, kind: Callable[[str], Any]) -> list[Any]:
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        what = "whole numbers" if kind is int else "numbers"
        raise BadInput(f"{option}: expected {what} with commas between, found {text!r}") from None
