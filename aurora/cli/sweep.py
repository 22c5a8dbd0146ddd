"""aurora sweep: a grid of settings -> maps of where ordering transfers, colocating models, both or neither pays."""

import json
from pathlib import Path
from typing import Annotated

import typer

from aurora.cli.common import check_folder, make_folder, need
from aurora.cli.subcommand import Json, show

SHAPE, CLUSTER = "mixtral-topics", "paper-equal-8"


def sweep(
    grid: Annotated[
        list[str],
        typer.Argument(
            metavar="KEY=FIRST:LAST:COUNT...",
            help="one or two of {sweep_key}; COUNT steps, or with :logCOUNT steps of equal ratio",
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="folder for the table and the maps")],
    shape: Annotated[Path | None, typer.Option(help="a model's config.json or folder; default: a shipped Mixtral")] = None,
    cluster: Annotated[
        Path, typer.Option(help="cluster TOML, or a shipped cluster's name; `bandwidth` replaces its rates")
    ] = Path(CLUSTER),
    plots: Annotated[bool, typer.Option(help="draw the maps too (matplotlib)")] = True,
    seed: Annotated[int, typer.Option(help="for the synthetic traffic")] = 0,
    as_json: Json = False,
) -> None:
    """Map when ordering transfers, colocating models, both or neither pays: one MoE layer of synthetic traffic, simulated."""
    check_folder(output, "sweep.json", "sweep.md")
    need(*(("matplotlib",) if plots else ()), extra="report")
    from aurora.cli.progress import shown
    from aurora.io import load_cluster, load_model_config, write_text
    from aurora.reports.maps import draw_map, map_markdown
    from aurora.simulator.sweep import read_axis
    from aurora.simulator.sweep import sweep as swept

    axes = [read_axis(each) for each in grid]
    machines, config = load_cluster(cluster), load_model_config(shape or SHAPE)
    with shown() as progress:
        points = swept(machines, config, axes, seed, progress)
    make_folder(output)
    values, speedups = dict(axes), [point.speedups for point in points]
    pictures = draw_map(values, speedups, output) if plots else []
    table = {"schema": 1, "cluster": machines.name, "seed": seed, "points": [point.as_json() for point in points]}
    write_text(output / "sweep.json", json.dumps(table, indent=1) + "\n")
    names = [picture.name for picture in pictures if picture.suffix == ".svg"]
    write_text(output / "sweep.md", map_markdown(values, speedups, [point.pays for point in points], names))
    wrote = f"wrote {output / 'sweep.md'}, sweep.json" + (f" and {len(pictures)} pictures" if pictures else "")
    show(as_json, {"output": output, **table}, wrote)
