"""aurora simulate: a plan -> a predicted trace."""

from pathlib import Path
from typing import Annotated

import typer

from aurora.cli.choices import completed
from aurora.cli.common import check_output, profiles_of
from aurora.cli.subcommand import WORST, Json, Layers, show


def simulate(
    plan: Annotated[Path, typer.Argument(help="plan JSON")],
    profile: Annotated[
        list[Path] | None,
        typer.Option(help="the traffic, one profile per model; default: the profiles that the plan was made from"),
    ] = None,
    barriers: Annotated[
        str,
        typer.Option(
            help="what a GPU waits for after an exchange, {barriers}: gpu, its own transfers and all ranks' token counts; "
            "none, its own transfers only; global, all ranks after every phase",
            autocompletion=completed("barriers"),
        ),
    ] = "gpu",
    orders: Annotated[
        str,
        typer.Option(
            help="{simulated_order}: the plan's orders, or orders recomputed per batch",
            autocompletion=completed("simulated_order"),
        ),
    ] = "plan",
    interleave: Annotated[
        str,
        typer.Option(
            help="several models: on, at the same time; off, one after the other", autocompletion=completed("interleave")
        ),
    ] = "on",
    staged: Annotated[
        bool, typer.Option("--staged", help="transfers run in stages, as NCCL's grouped calls do, instead of one by one")
    ] = False,
    trace: Annotated[Path | None, typer.Option(help="the predicted trace to write (npz); default: beside the plan")] = None,
    layers: Layers = False,
    as_json: Json = False,
) -> None:
    """Simulate a plan event by event: time per layer, utilisation, and the gap of its exchanges to the bound."""
    from aurora import api
    from aurora.cli.as_json import summary_json
    from aurora.io import load_plan, save
    from aurora.planner.check.traffic import without_proof
    from aurora.reports.tables import summary_table
    from aurora.reports.trace_times import summarise

    target = trace or plan.with_suffix(".predicted.npz")
    check_output(trace=target)
    loaded = load_plan(plan)
    traffic = profiles_of(loaded, plan, profile)
    predicted = api.simulate(loaded, traffic, barriers=barriers, orders=orders, interleave=interleave, staged=staged)
    save(predicted, target)
    found = summarise(predicted, loaded.cluster)
    show(
        as_json,
        {"output": target, **summary_json(found)},
        summary_table(found, most=None if layers else WORST),
        without_proof(loaded, traffic) or None,
        f"wrote {target}",
    )
