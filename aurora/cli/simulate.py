"""aurora simulate: a plan -> a predicted trace; or many settings -> maps of what pays."""

import json
from pathlib import Path
from typing import Annotated

import typer

from aurora.cli.common import check_output, make_folder, need, profiles_of, terminal
from aurora.errors import BadInput

SWEPT_SHAPE, SWEPT_CLUSTER = "models/mixtral-topics/config.json", "clusters/paper-equal-8.toml"


def simulate(
    plan: Annotated[Path | None, typer.Argument(help="plan JSON; none with --sweep")] = None,
    profile: Annotated[
        list[Path] | None, typer.Option(help="traffic to price, one a model; default: what the plan was made from")
    ] = None,
    barriers: Annotated[
        str,
        typer.Option(help="who waits: gpu for its own transfers and the counts, none not for those, global all for all"),
    ] = "gpu",
    orders: Annotated[str, typer.Option(help="plan keeps the plan's, batch orders each batch's own bytes")] = "plan",
    trace: Annotated[Path | None, typer.Option(help="write the predicted trace (npz); default: beside the plan")] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(help="KEY=FIRST:LAST:COUNT or :logCOUNT of bandwidth, skew, tokens, speed; once or twice", metavar="GRID"),
    ] = None,
    shape: Annotated[
        Path | None, typer.Option(help="with --sweep: a transformers config.json; default: a shipped Mixtral's")
    ] = None,
    cluster: Annotated[
        Path | None, typer.Option(help="with --sweep: cluster TOML, whose rates are replaced; default: 8 equal GPUs")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="with --sweep: folder for table and maps")] = None,
    plots: Annotated[bool, typer.Option(help="with --sweep: draw the maps too (matplotlib)")] = True,
    seed: Annotated[int, typer.Option(help="with --sweep: random seed")] = 0,
    failures: Annotated[
        Path | None,
        typer.Option(help="train through this trace of nodes (.csv: time_ms,event,node; add or remove) under several systems"),
    ] = None,
    nodes: Annotated[int, typer.Option(help="with --failures: nodes at most")] = 10,
    minutes: Annotated[float, typer.Option(help="with --failures: how long, from the first event on")] = 80.0,
) -> None:
    """Price a plan event by event: time per layer, utilisation, and how far its exchanges are from the bound; or, with
    --sweep, map when ordering pays, when colocating, and when neither; or, with --failures, train while nodes come and go."""
    if failures is not None:
        if plan is not None or profile or sweep:
            raise BadInput("simulate --failures: expected neither a plan nor --sweep")
        _failures(failures, nodes, minutes)
        return None
    if sweep:
        if plan is not None or profile or trace is not None or orders != "plan" or barriers != "gpu":
            raise BadInput("simulate --sweep: expected no plan, nor what prices one")
        from aurora.io import shipped

        if output is None:
            raise BadInput("simulate --sweep: expected -o FOLDER")
        return _sweep(sweep, shape or shipped(SWEPT_SHAPE), cluster or shipped(SWEPT_CLUSTER), output, plots, seed)
    if shape is not None or cluster is not None or output is not None:
        raise BadInput("simulate: --shape, --cluster and -o go with --sweep")
    if plan is None:
        raise BadInput("simulate: expected a plan, or --sweep")
    return _price(plan, profile, barriers, orders, trace)


def _failures(trace: Path, nodes: int, minutes: float) -> None:
    from aurora.io import load_failures
    from aurora.reports.tables import replay_table
    from aurora.reproduce.lazarus.jobs import JOBS
    from aurora.simulator.membership_traces import changes, limited, shifted
    from aurora.simulator.training_failures import SYSTEMS, replay

    if nodes < 1 or not 0 < minutes < float("inf"):
        raise BadInput(f"simulate --failures: expected one node and some minutes at least, found {nodes} and {minutes:g}")
    events = limited(shifted(changes(load_failures(trace))), nodes)
    console = terminal()
    for name, job in JOBS.items():
        runs = {system: replay(job, how, events, minutes * 60) for system, how in SYSTEMS.items()}
        console.print(replay_table(name, {system: (run.samples, run.restarts, run.seconds) for system, run in runs.items()}))


def _price(plan: Path, profile: list[Path] | None, barriers: str, orders: str, trace: Path | None) -> None:
    from aurora.io import load_plan, save
    from aurora.planner.alltoall.schedule import batch_order
    from aurora.reports.summary import summarise
    from aurora.reports.tables import summary_table
    from aurora.simulator.interpreter import simulate_plan

    if orders not in ("plan", "batch"):
        raise BadInput(f"--orders: expected plan or batch, found {orders!r}")
    loaded = load_plan(plan)
    target = trace or plan.with_suffix(".predicted.npz")
    check_output(target, inputs=[plan, *(profile or [])])
    ordered = batch_order(loaded.cluster.network, loaded.options.order, loaded.options.seed) if orders == "batch" else None
    predicted = simulate_plan(loaded, profiles_of(loaded, plan, profile), barriers, ordered)
    save(predicted, target)
    console = terminal()
    console.print(summary_table(summarise(predicted, loaded.cluster)))
    console.print(f"wrote {target}", soft_wrap=True)


def _sweep(grids: list[str], shape: Path, cluster: Path, folder: Path, plots: bool, seed: int) -> None:
    if plots:
        need("matplotlib", extra="report")
    from aurora.cli.progress import shown
    from aurora.io import load_cluster, load_json, write_text
    from aurora.reports.maps import draw_map, map_markdown
    from aurora.simulator.sweep import read_axis, sweep

    axes = [read_axis(grid) for grid in grids]
    machines, config = load_cluster(cluster), load_json(shape)
    make_folder(folder)
    with shown() as progress:
        points = sweep(machines, config, axes, seed, progress)
    grid = {axis.key: axis.values for axis in axes}
    speedups = [point.speedups for point in points]
    pictures = draw_map(grid, speedups, folder) if plots else []
    table = {"schema": 1, "cluster": machines.name, "seed": seed, "points": [point.as_json() for point in points]}
    write_text(folder / "sweep.json", json.dumps(table, indent=1) + "\n")
    names = [picture.name for picture in pictures if picture.suffix == ".svg"]
    write_text(folder / "sweep.md", map_markdown(grid, speedups, [point.pays for point in points], names))
    terminal().print(f"wrote {folder / 'sweep.md'}, sweep.json" + (f" and {len(pictures)} pictures" if pictures else ""))
