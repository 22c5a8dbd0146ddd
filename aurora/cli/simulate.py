"""aurora simulate: a plan -> a predicted trace."""

from pathlib import Path
from typing import Annotated

import typer

from aurora.cli.common import check_output, profiles_of, terminal


def simulate(
    plan: Annotated[Path, typer.Argument(help="plan JSON")],
    profile: Annotated[
        list[Path] | None, typer.Option(help="traffic to price, one a model; default: what the plan was made from")
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="write the predicted trace (npz); default: beside the plan")] = None,
) -> None:
    """Price a plan event by event: time per layer, utilisation, and how far its exchanges are from the bound."""
    from aurora.report.summary import summarise
    from aurora.report.tables import summary_table
    from aurora.simulate.interpreter import simulate_plan
    from aurora.store import load_plan, save

    loaded = load_plan(plan)
    target = trace or plan.with_suffix(".predicted.npz")
    check_output(target, inputs=[plan, *(profile or [])])
    predicted = simulate_plan(loaded, profiles_of(loaded, plan, profile))
    save(predicted, target)
    console = terminal()
    console.print(summary_table(summarise(predicted, loaded.cluster)))
    console.print(f"wrote {target}", soft_wrap=True)
