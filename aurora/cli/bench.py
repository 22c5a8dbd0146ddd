"""aurora bench: comparisons over a grid of settings."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aurora.advisor.sharing import SIMULATED_STEPS
from aurora.cli.common import check_folder, make_folder, need
from aurora.cli.subcommand import Json, Subcommand, refuse_given, show
from aurora.errors import BadInput

if TYPE_CHECKING:
    from rich.table import Table

    from aurora.advisor.sweep import GridCell
    from aurora.cli.measured_ways import MeasuredCell

CLUSTER = "demo-4"

app = typer.Typer(help="Comparisons over a grid of settings.", no_args_is_help=True)


@app.command("colocate", cls=Subcommand)
def colocate(
    context: typer.Context,
    profile: Annotated[
        list[Path] | None,
        typer.Option(
            help="a model's traffic, one source rank per GPU; up to three. Default: the shipped models', measured here"
        ),
    ] = None,
    cluster: Annotated[Path, typer.Option(help="cluster TOML, or a shipped cluster's name")] = Path(CLUSTER),
    batch: Annotated[
        list[int] | None, typer.Option(help="tokens of each rank in a step; repeat it. Default: 1, 2, 4, ... 512")
    ] = None,
    bandwidth: Annotated[
        list[float] | None, typer.Option(help="factor on the ports' bytes per second; repeat it. Default: 0.25, 1, 4")
    ] = None,
    skew: Annotated[
        list[float] | None,
        typer.Option(help="exponent on the experts' shares, 1: as profiled, 0: all equal; repeat it. Default: 0, 1"),
    ] = None,
    steps: Annotated[int, typer.Option(help="steps of each model that are simulated")] = SIMULATED_STEPS,
    measure: Annotated[
        bool, typer.Option("--measure", help="also run some cells with the shipped models, as processes of this machine")
    ] = False,
    limit_s: Annotated[float, typer.Option("--seconds", help="with --measure: no cell begins after so many seconds")] = 120.0,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="folder for the page and the table")] = None,
    seed: Annotated[int, typer.Option(help="for the draws of traffic")] = 0,
    as_json: Json = False,
) -> None:
    """Who wins where: one model after the other, micro-batches, two models or three at once."""
    if output is not None:
        check_folder(output, "colocate.json", "colocate.md")
    if not measure:
        refuse_given(context, ("limit_s",), "with `measure`")
    if measure and profile:
        raise BadInput("`measure`: runs the shipped models, expected no `profile`")
    if not 2 <= steps <= 1000:
        raise BadInput(f"`steps`: expected from 2 to 1000, found {steps}")
    if not 0 <= seed < 1 << 63:
        raise BadInput(f"`seed`: expected a whole number from zero to 2**63, found {seed}")
    if not 0 < limit_s < float("inf"):
        raise BadInput(f"`limit_s`: expected a number above zero, found {limit_s}")
    from aurora.advisor import sweep as grid
    from aurora.cli.progress import shown
    from aurora.io import load_cluster, load_profile
    from aurora.reports.who_wins import LEGEND, left_out_lines, map_tables, summary_table

    skews = tuple(skew or grid.SKEWS)
    if measure and 1.0 not in skews:
        raise BadInput("`skew`: expected 1 among them with `measure`, as the models that are run route as they do")
    machines, profiles = load_cluster(cluster), [load_profile(path) for path in profile or []]
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

            measured = measure_cells(machines, profiles, cells, Path(folder), steps, limit_s, progress)
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
    from aurora.reports.who_wins import markdown

    make_folder(folder)
    heading = [
        f"{' and '.join(found['models'])} on {found['cluster']}, {found['steps']} steps of each, simulated. Gains are over the "
        "same requests one after the other; three models are compared with three. Of ways within 2 % the simplest is named."
    ]
    write_text(folder / "colocate.json", json.dumps({"schema": 1, **found}, indent=1) + "\n")
    write_text(folder / "colocate.md", markdown(cells, heading))
