"""aurora simulate: a plan -> a predicted trace."""

from pathlib import Path
from typing import Annotated

import typer

from aurora.cli.common import check_output, profiles_of, terminal
from aurora.errors import BadInput


def simulate(
    plan: Annotated[Path, typer.Argument(help="plan JSON")],
    profile: Annotated[
        list[Path] | None, typer.Option(help="traffic to price, one a model; default: what the plan was made from")
    ] = None,
    barriers: Annotated[
        str,
        typer.Option(help="who waits: gpu for its own transfers and the counts, none not even for those, global all for all"),
    ] = "gpu",
    orders: Annotated[str, typer.Option(help="plan keeps the plan's, batch orders each batch's own bytes")] = "plan",
    trace: Annotated[Path | None, typer.Option(help="write the predicted trace (npz); default: beside the plan")] = None,
) -> None:
    """Price a plan event by event: time per layer, utilisation, and how far its exchanges are from the bound."""
    from aurora.plan.ordering import batch_order
    from aurora.report.summary import summarise
    from aurora.report.tables import summary_table
    from aurora.simulate.interpreter import simulate_plan
    from aurora.store import load_plan, save

    if orders not in ("plan", "batch"):
        raise BadInput(f"--orders: expected plan or batch, found {orders!r}")
    loaded = load_plan(plan)
    ordered = batch_order(loaded.cluster, loaded.methods["order"], loaded.seed) if orders == "batch" else None
    target = trace or plan.with_suffix(".predicted.npz")
    check_output(target, inputs=[plan, *(profile or [])])
    predicted = simulate_plan(loaded, profiles_of(loaded, plan, profile), barriers, ordered)
    save(predicted, target)
    console = terminal()
    console.print(summary_table(summarise(predicted, loaded.cluster)))
    console.print(f"wrote {target}", soft_wrap=True)
