"""aurora sweep: a grid of settings -> where ordering transfers and colocating models pay, or which way of sharing GPUs wins."""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

from aurora.cli.inputs import check_folder, traffic_of
from aurora.cli.options import refuse_given
from aurora.cli.output import json_text, progress_bars, show
from aurora.errors import BadInput, need
from aurora.io import load_cluster, load_model_config
from aurora.io.files import make_folder, write_text
from aurora.reports.formatting import as_text
from aurora.types.options import MOST_SEED, SIMULATED_STEPS, OptionField

if TYPE_CHECKING:
    from rich.console import RenderableType


SHAPE, CLUSTER, WAYS_CLUSTER = "mixtral-topics", Path("paper-equal-8"), Path("demo-4")
COMPARED = "With --ways"
FILE_WIDTH = 160  # characters
OF_WAYS = ("profile", "batch", "bandwidth", "skew", "steps")  # options that go with --ways

Swept = tuple[dict[str, Any], list["RenderableType"], list["RenderableType"]]  # in JSON, as tables, and those of the file


def sweep(
    grid: Annotated[list[str] | None, OptionField(metavar="KEY=FIRST:LAST:COUNT...")] = None,
    *,
    output: Path | None = None,
    shape: Path | None = None,
    cluster: Path | None = None,
    seed: Annotated[int, OptionField(least=0, most=MOST_SEED)] = 0,
    ways: bool = False,
    profile: list[Path] | None = None,
    batch: Annotated[list[int] | None, OptionField(flag="--step-tokens", panel=COMPARED)] = None,
    bandwidth: Annotated[list[float] | None, OptionField(panel=COMPARED)] = None,
    skew: Annotated[list[float] | None, OptionField(panel=COMPARED)] = None,
    steps: Annotated[int, OptionField(least=2, most=1000, panel=COMPARED)] = SIMULATED_STEPS,
    as_json: bool = False,
) -> None:
    """Map where ordering transfers, colocating models, both or neither pays, by simulating a MoE layer of synthetic traffic.
    With --ways, map which way of sharing GPUs between models is fastest.

    Args:
        grid: one or two of {sweep_key}; COUNT steps, or with :logCOUNT steps of equal ratio; none with --ways.
        output: folder for the tables, as text and as JSON; default: they are only shown.
        shape: a model's config.json or folder; default: a shipped Mixtral.
        cluster: cluster TOML, or a shipped cluster's name; `bandwidth` replaces its rates; default: paper-equal-8, with --ways
            demo-4.
        seed: random seed of the traffic.
        ways: compare ways of sharing GPUs instead: one model after the other, micro-batches, two models or three at once.
        profile: with --ways: a model's traffic, one source rank per GPU; up to three. Default: profiles of the shipped models.
        batch: tokens of each rank in a step; repeat it. Default: 1, 2, 4, ... 512.
        bandwidth: factor on the ports' bytes per second; repeat it. Default: 0.25, 1, 4.
        skew: exponent on the experts' shares, 1: as profiled, 0: all equal; repeat it. Default: 0, 1.
        steps: number of simulated steps of each model.
    """
    if ways:
        if grid:
            raise BadInput("`grid`: expected none with `ways`, which has settings of its own")
        refuse_given(("shape",), "without `ways`")
    else:
        refuse_given(OF_WAYS, "with `ways`")
        if not grid:
            raise BadInput("`grid`: expected one or two axes, or `ways`, found neither")
    name = "colocate" if ways else "sweep"
    if output is not None:
        check_folder(output, f"{name}.json", f"{name}.txt")
    if ways:
        summary, shown, more = _compare_ways(cluster or WAYS_CLUSTER, profile or [], (batch, bandwidth, skew), steps, seed)
    else:
        summary, shown, more = _sweep(cluster or CLUSTER, shape or SHAPE, grid or [], seed)
    if output is not None:
        make_folder(output)
        write_text(output / f"{name}.json", json_text(summary, indent=1) + "\n")
        write_text(output / f"{name}.txt", as_text([*shown, *more], FILE_WIDTH))
        shown.append(f"wrote {output / name}.txt and {name}.json")
    show(as_json, {"output": output, **summary}, *shown)


def _sweep(cluster: Path, shape: str | Path, grid: list[str], seed: int) -> Swept:
    """Sweeps one or two settings of a layer."""
    from aurora.advisor.sweep import read_axis
    from aurora.advisor.sweep import sweep as swept
    from aurora.reports.comparisons import speedups_table

    axes = [read_axis(text) for text in grid]
    machines, config = load_cluster(cluster), load_model_config(shape)
    with progress_bars() as progress:
        points = swept(machines, config, axes, seed, progress)
    summary = {"cluster": machines.name, "seed": seed, "points": [point.as_json() for point in points]}
    return summary, [speedups_table(points, [key for key, _ in axes])], []


def _compare_ways(
    cluster: Path,
    paths: list[Path],
    settings: tuple[Sequence[int] | None, Sequence[float] | None, Sequence[float] | None],
    steps: int,
    seed: int,
) -> Swept:
    """Compares who wins where: one model after the other, micro-batches, two models or three at once.

    Args:
        cluster: file or shipped name.
        paths: the models' profiles; empty: the shipped models are profiled.
        settings: batches, bandwidths and skews; None: those of `compare_over_grid`.
        steps: steps of each model.
        seed: for the draws.
    """
    from aurora.advisor.sweep import BANDWIDTHS, BATCHES, SKEWS, compare_over_grid
    from aurora.reports.comparisons import LEGEND, left_out_lines, map_tables, ways_table
    from aurora.reports.json_objects import cell_json

    machines = load_cluster(cluster)
    profiles = traffic_of(paths, len(machines))
    if not profiles:
        need("torch", "transformers")
    batches, bandwidths, skews = settings[0] or BATCHES, settings[1] or BANDWIDTHS, settings[2] or SKEWS
    with progress_bars() as progress, TemporaryDirectory() as folder:
        if not profiles:
            from aurora.cli.demo import shipped_profiles

            profiles = shipped_profiles(Path(folder), len(machines), progress)
        cells = compare_over_grid(machines, profiles, batches, bandwidths, skews, steps, seed, progress=progress)
    names = [profile.model for profile in profiles]
    head = {"models": names, "cluster": machines.name, "steps": steps, "seed": seed}
    summary: dict[str, Any] = {**head, "cells": [cell_json(cell) for cell in cells]}
    title = (
        f"{' and '.join(names)} on {machines.name}, {steps} steps of each, simulated: in each cell what wins, and its gain "
        "over the same requests one after the other; three models are compared with three. Of ways within 2 % the simplest "
        "is named."
    )
    return summary, [title, *map_tables(cells), LEGEND, *left_out_lines(cells)], [ways_table(cells)]
