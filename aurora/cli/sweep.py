"""aurora sweep: a grid of settings -> maps of where ordering transfers, colocating models, both or neither pays."""

import json
from pathlib import Path
from typing import Annotated

import typer

from aurora.cli.common import check_folder, make_folder
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
    output: Annotated[Path, typer.Option("--output", "-o", help="folder for the table, as page and JSON")],
    shape: Annotated[Path | None, typer.Option(help="a model's config.json or folder; default: a shipped Mixtral")] = None,
    cluster: Annotated[
        Path, typer.Option(help="cluster TOML, or a shipped cluster's name; `bandwidth` replaces its rates")
    ] = Path(CLUSTER),
    seed: Annotated[int, typer.Option(help="for the synthetic traffic")] = 0,
    as_json: Json = False,
) -> None:
    """Map when ordering transfers, colocating models, both or neither pays: one MoE layer of synthetic traffic, simulated."""
    check_folder(output, "sweep.json", "sweep.md")
    from aurora.advisor.sweep import read_axis
    from aurora.advisor.sweep import sweep as swept
    from aurora.cli.progress import shown
    from aurora.io import load_cluster, load_model_config, write_text
    from aurora.reports.maps import map_markdown

    axes = [read_axis(each) for each in grid]
    machines, config = load_cluster(cluster), load_model_config(shape or SHAPE)
    with shown() as progress:
        points = swept(machines, config, axes, seed, progress)
    make_folder(output)
    values, speedups = dict(axes), [point.speedups for point in points]
    table = {"schema": 1, "cluster": machines.name, "seed": seed, "points": [point.as_json() for point in points]}
    write_text(output / "sweep.json", json.dumps(table, indent=1) + "\n")
    write_text(output / "sweep.md", map_markdown(values, speedups, [point.pays for point in points]))
    show(as_json, {"output": output, **table}, f"wrote {output / 'sweep.md'} and sweep.json")
