"""aurora simulate: a plan -> a predicted trace."""

from pathlib import Path
from typing import Annotated

import typer

from aurora.cli.choices import completed
from aurora.cli.common import check_output, profiles_of
from aurora.cli.verb import WORST, Json, Layers, show


def simulate(
    plan: Annotated[Path, typer.Argument(help="plan JSON")],
    profile: Annotated[
        list[Path] | None, typer.Option(help="the traffic, one profile a model; default: what the plan was made from")
    ] = None,
    barriers: Annotated[
        str,
        typer.Option(
            help="who waits, {barriers}: gpu for its own transfers and the counts, none not for counts, global all for all",
            autocompletion=completed("barriers"),
        ),
    ] = "gpu",
    orders: Annotated[
        str,
        typer.Option(
            help="{simulated_order}: the plan's orders, or each batch ordered anew", autocompletion=completed("simulated_order")
        ),
    ] = "plan",
    interleave: Annotated[
        str, typer.Option(help="two models: on, side by side; off, one after the other", autocompletion=completed("interleave"))
    ] = "on",
    trace: Annotated[Path | None, typer.Option(help="the predicted trace to write (npz); default: beside the plan")] = None,
    layers: Layers = False,
    as_json: Json = False,
) -> None:
    """Price a plan event by event: time per layer, utilisation, and how far its exchanges are from the bound."""
    from aurora import api
    from aurora.cli.as_json import summary_json
    from aurora.io import load_plan, save
    from aurora.reports.summary import summarise
    from aurora.reports.tables import summary_table

    target = trace or plan.with_suffix(".predicted.npz")
    check_output(target, inputs=[plan, *(profile or [])])
    loaded = load_plan(plan)
    traffic = profiles_of(loaded, plan, profile)
    predicted = api.simulate(loaded, traffic, barriers=barriers, orders=orders, interleave=interleave)
    save(predicted, target)
    found = summarise(predicted, loaded.cluster)
    show(
        as_json,
        {"output": target, **summary_json(found)},
        summary_table(found, most=None if layers else WORST),
        f"wrote {target}",
    )
