"""aurora place: loads of experts -> how many replicas each has, where they are, and how its load divides over them."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from aurora.cli.common import terminal
from aurora.errors import BadInput

if TYPE_CHECKING:
    from aurora.types import Layout

TARGET = 0.95  # of mean / largest load, that --explain looks for slots for


def place(
    loads: Annotated[Path, typer.Argument(help="each expert's load: .csv (no header) or .npy, a row a layer")],
    slots: Annotated[int, typer.Option(help="experts that fit on each GPU")],
    gpus: Annotated[int | None, typer.Option(help="how many; default: one a node")] = None,
    nodes: Annotated[int | None, typer.Option(help="the GPUs are this many equal runs; only eplb with --groups asks")] = None,
    groups: Annotated[int, typer.Option(help="the experts are this many equal runs: eplb places them node by node")] = 1,
    replicas: Annotated[
        str | None, typer.Option(help="how many each expert has, r0,r1,...; default: the method chooses")
    ] = None,
    method: Annotated[
        str, typer.Option(help="equal-split: replicas share evenly; free-split: as is best; eplb: the baseline")
    ] = "equal-split",
    seed: Annotated[int, typer.Option(help="for the search over counts")] = 0,
    explain: Annotated[
        bool, typer.Option("--explain", help=f"how many slots bring mean/max to {TARGET}, layer by layer")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print the placement as JSON")] = False,
) -> None:
    """Place experts with replicas, many a GPU, so that the most loaded GPU has as little as possible, with a bound below it."""
    from aurora.plan.check_replicas import check_layout
    from aurora.plan.replicas import place as make
    from aurora.plan.replicas import slots_needed
    from aurora.report.tables import layout_table
    from aurora.store import load_loads
    from aurora.types import Room

    if explain and as_json:
        raise BadInput("place: --explain prints text; leave out --json")
    if gpus is None and nodes is None:
        raise BadInput("place: expected --gpus, or --nodes of one GPU each")
    load_LE = load_loads(loads)
    one_each = gpus if gpus is not None else nodes
    room = Room.equal(one_each or 0, slots, 1 if nodes is None else nodes, groups)
    made = make(load_LE, room, method, None if replicas is None else _counts(replicas), seed)
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


def _counts(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise BadInput(f"--replicas: expected whole numbers with commas between, found {text!r}") from None


def _as_json(layout: "Layout") -> dict[str, object]:
    layers = []
    for layer, held_G in enumerate(layout.placement.slots_LG):
        split_EG = layout.placement.split_EG(layer)
        split: dict[str, list[list[float]]] = {str(expert): [] for expert in range(len(split_EG))}
        for gpu, held in enumerate(held_G):
            for expert in held:
                split[str(expert)].append([gpu, float(split_EG[expert, gpu])])
        layers.append(
            {
                "slots": [list(held) for held in held_G],
                "split": split,
                "max_load": float(layout.max_load_L[layer]),
                "mean_load": float(layout.mean_load_L[layer]),
                "bound": float(layout.bound_L[layer]),
            }
        )
    return {"schema": 1, "method": layout.method, "layers": layers, "seconds": layout.seconds}
