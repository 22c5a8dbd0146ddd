"""aurora sweep: a grid of settings -> where ordering transfers and colocating models pay, or which way of sharing GPUs wins."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aurora.cli.inputs import check_folder, make_folder, need
from aurora.cli.options import Json, refuse_given
from aurora.cli.output import SCHEMA, show
from aurora.errors import BadInput
from aurora.types.option_checks import MOST_SEED
from aurora.types.options import SIMULATED_STEPS

if TYPE_CHECKING:
    from rich.table import Table

    from aurora.advisor.sweep import GridCell
    from aurora.cli.measured_ways import MeasuredCell
    from aurora.types import Profile

SHAPE, CLUSTER, WAYS_CLUSTER = "mixtral-topics", Path("paper-equal-8"), Path("demo-4")
COMPARED = "With --ways"


def sweep(
    grid: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=FIRST:LAST:COUNT...",
            help="one or two of {sweep_key}; COUNT steps, or with :logCOUNT steps of equal ratio; none with --ways",
        ),
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="folder for the table, as page and JSON")] = None,
    shape: Annotated[Path | None, typer.Option(help="a model's config.json or folder; default: a shipped Mixtral")] = None,
    cluster: Annotated[
        Path | None,
        typer.Option(
            help="cluster TOML, or a shipped cluster's name; `bandwidth` replaces its rates; default: "
            f"{CLUSTER}, with --ways {WAYS_CLUSTER}"
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="for the draws of traffic")] = 0,
    ways: Annotated[
        bool,
        typer.Option(
            "--ways",
            help="instead: compare ways of sharing GPUs, one model after the other, micro-batches, two models or three at once",
        ),
    ] = False,
    profile: Annotated[
        list[Path] | None,
        typer.Option(
            help="with --ways: a model's traffic, one source rank per GPU; up to three. Default: the shipped models', measured"
        ),
    ] = None,
    batch: Annotated[
        list[int] | None,
        typer.Option(
            "--step-tokens",
            help="tokens of each rank in a step; repeat it. Default: 1, 2, 4, ... 512",
            rich_help_panel=COMPARED,
        ),
    ] = None,
    bandwidth: Annotated[
        list[float] | None,
        typer.Option(help="factor on the ports' bytes per second; repeat it. Default: 0.25, 1, 4", rich_help_panel=COMPARED),
    ] = None,
    skew: Annotated[
        list[float] | None,
        typer.Option(
            help="exponent on the experts' shares, 1: as profiled, 0: all equal; repeat it. Default: 0, 1",
            rich_help_panel=COMPARED,
        ),
    ] = None,
    steps: Annotated[
        int, typer.Option(help="steps of each model that are simulated", rich_help_panel=COMPARED)
    ] = SIMULATED_STEPS,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure",
            help="also run some cells with the shipped models, as processes of this machine",
            rich_help_panel=COMPARED,
        ),
    ] = False,
    time_limit_s: Annotated[
        float,
        typer.Option("--time-limit", help="with --measure: no cell begins after so many seconds", rich_help_panel=COMPARED),
    ] = 120.0,
    as_json: Json = False,
) -> None:
    """Map when ordering transfers, colocating models, both or neither pays: one MoE layer of synthetic traffic, simulated; or,
    with --ways, which way of sharing GPUs between models wins where."""
    if not 0 <= seed <= MOST_SEED:
        raise BadInput(f"`seed`: expected a whole number from zero to 2**63, found {seed}")
    if ways:
        if grid:
            raise BadInput("`grid`: expected none with `ways`, which has settings of its own")
        refuse_given(("shape",), "without `ways`")
        _compare_ways(
            output, cluster or WAYS_CLUSTER, profile or [], batch, bandwidth, skew, steps, measure, time_limit_s, seed, as_json
        )
        return
    refuse_given(("profile", "batch", "bandwidth", "skew", "steps", "measure", "time_limit_s"), "with `ways`")
    if not grid:
        raise BadInput("`grid`: expected one or two axes, or `ways`, found neither")
    if output is None:
        raise BadInput("`output`: expected a folder for the maps, found none")
    check_folder(output, "sweep.json", "sweep.md")
    from aurora.advisor.sweep import read_axis
    from aurora.advisor.sweep import sweep as swept
    from aurora.cli.progress import shown
    from aurora.io import load_cluster, load_model_config, write_text
    from aurora.reports.comparisons import map_markdown

    axes = [read_axis(each) for each in grid]
    machines, config = load_cluster(cluster or CLUSTER), load_model_config(shape or SHAPE)
    with shown() as progress:
        points = swept(machines, config, axes, seed, progress)
    make_folder(output)
    values, speedups = dict(axes), [point.speedups for point in points]
    table = {"schema": SCHEMA, "cluster": machines.name, "seed": seed, "points": [point.as_json() for point in points]}
    write_text(output / "sweep.json", json.dumps(table, indent=1) + "\n")
    write_text(output / "sweep.md", map_markdown(values, speedups, [point.pays for point in points]))
    show(as_json, {"output": output, **table}, f"wrote {output / 'sweep.md'} and sweep.json")


def _compare_ways(
    output: Path | None,
    cluster: Path,
    paths: list[Path],
    batch: list[int] | None,
    bandwidth: list[float] | None,
    skew: list[float] | None,
    steps: int,
    measure: bool,
    time_limit_s: float,
    seed: int,
    as_json: bool,
) -> None:
    """Shows who wins where: one model after the other, micro-batches, two models or three at once."""
    if output is not None:
        check_folder(output, "colocate.json", "colocate.md")
    if not measure:
        refuse_given(("time_limit_s",), "with `measure`")
    if measure and paths:
        raise BadInput("`measure`: runs the shipped models, expected no `profile`")
    if not 2 <= steps <= 1000:
        raise BadInput(f"`steps`: expected from 2 to 1000, found {steps}")
    if not 0 < time_limit_s < float("inf"):
        raise BadInput(f"`time_limit_s`: expected a number above zero, found {time_limit_s}")
    from aurora.advisor import sweep as grid
    from aurora.cli.progress import shown
    from aurora.io import load_cluster, load_profile
    from aurora.reports.comparisons import LEGEND, left_out_lines, map_tables, summary_table

    skews = tuple(skew or grid.SKEWS)
    if measure and 1.0 not in skews:
        raise BadInput("`skew`: expected 1 among them with `measure`, as the models that are run route as they do")
    machines = load_cluster(cluster)
    profiles: list[Profile] = [load_profile(path) for path in paths]
    if measure and machines.fabric is not None:
        raise BadInput(f"{cluster}: `measure` holds ports to their rates, but not the links of a fabric")
    if not profiles:
        need("torch", "transformers")
    measured: list[MeasuredCell] = []
    with shown() as progress, TemporaryDirectory() as folder:
        if not profiles:
            from aurora.cli.demo import shipped_profiles

            profiles = shipped_profiles(Path(folder), len(machines), progress)
        values = (batch or grid.BATCHES, bandwidth or grid.BANDWIDTHS, skews)
        cells = grid.compare_over_grid(machines, profiles, *values, steps, seed, progress=progress)
        if measure:
            from aurora.cli.measured_ways import measure_cells

            measured = measure_cells(machines, profiles, cells, Path(folder), steps, time_limit_s, progress)
    found: dict[str, Any] = {
        "models": [each.model for each in profiles],
        "cluster": machines.name,
        "steps": steps,
        "seed": seed,
        "cells": [_cell(cell) for cell in cells],
        "measured": [asdict(cell) for cell in measured],
    }
    if output is not None:
        _write(output, found, cells)
    names = " and ".join(found["models"])
    title = f"{names} on {machines.name}, simulated: in each cell what wins, and its gain over one after the other"
    said = [f"wrote {output / 'colocate.md'} and colocate.json"] if output is not None else []
    table = [] if not measure else [_measured_table(measured)]
    show(
        as_json,
        {"output": output, **found},
        title,
        *map_tables(cells),
        LEGEND,
        summary_table(cells),
        *left_out_lines(cells),
        *table,
        *said,
    )


def _measured_table(measured: "Sequence[MeasuredCell]") -> "Table":
    """Gains as measured beside those that were simulated."""
    from rich.table import Table

    from aurora.reports.formatting import DASH, percent, right

    ways = list(dict.fromkeys(way for cell in measured for way in cell.gains))[1:]
    table = Table(
        "stage", *right("bandwidth", "batch"), *right(*ways), "fastest", "named", *right("loss"), title="measured (simulated)"
    )
    for cell in measured:
        gains = (f"{cell.gains[way]:.2f} ({cell.predicted[way]:.2f})" if way in cell.gains else DASH for way in ways)
        right_or = "right" if cell.right else "wrong"
        table.add_row(cell.stage, f"x {cell.bandwidth:g}", str(cell.batch), *gains, cell.winner, right_or, percent(cell.loss))
    return table


def _cell(cell: "GridCell") -> dict[str, Any]:
    """A cell of the grid in JSON's types."""
    compared = cell.compared
    return {
        "skew": cell.skew,
        "bandwidth": cell.bandwidth,
        "batch": cell.batch,
        "winner": compared.winner.way,
        "ways": [asdict(outcome) for outcome in compared.outcomes],
        "left_out": dict(compared.left_out),
    }


def _write(folder: Path, found: dict[str, Any], cells: "Sequence[GridCell]") -> None:
    """Writes the page and the table."""
    from aurora.io import write_text
    from aurora.reports.comparisons import markdown

    make_folder(folder)
    heading = [
        f"{' and '.join(found['models'])} on {found['cluster']}, {found['steps']} steps of each, simulated. Gains are over the "
        "same requests one after the other; three models are compared with three. Of ways within 2 % the simplest is named."
    ]
    write_text(folder / "colocate.json", json.dumps({"schema": SCHEMA, **found}, indent=1) + "\n")
    write_text(folder / "colocate.md", markdown(cells, heading))
