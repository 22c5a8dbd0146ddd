"""aurora drift: two profiles of a model -> how much they differ, and whether to plan again."""

from pathlib import Path
from typing import Annotated

import typer

from aurora.cli.subcommand import WORST, Json, Layers, chosen, option, show
from aurora.types import DriftOptions

DEFAULTS = DriftOptions()


def drift(
    context: typer.Context,
    before: Annotated[Path, typer.Argument(help="the profile that the plan was made from")],
    after: Annotated[Path, typer.Argument(help="a later profile of the same model")],
    plan: Annotated[Path | None, typer.Option(help="the plan made from BEFORE; default: experts balanced for BEFORE")] = None,
    threshold: Annotated[float, option(DriftOptions, "threshold")] = DEFAULTS.threshold,
    hot: Annotated[int | None, option(DriftOptions, "hot")] = DEFAULTS.hot,
    seed: Annotated[int, option(DriftOptions, "seed")] = DEFAULTS.seed,
    layers: Layers = False,
    as_json: Json = False,
) -> None:
    """Show how far traffic has changed, layer by layer, what the plan loses by it, and whether to plan again."""
    from aurora import api
    from aurora.cli.as_json import drift_json
    from aurora.io import load_plan, load_profile
    from aurora.reports.plan_tables import drift_table

    in_force = None if plan is None else load_plan(plan)
    found = api.drift(load_profile(before), load_profile(after), in_force, chosen(DriftOptions, context))
    show(as_json, drift_json(found), drift_table(found, None if layers else WORST), found.reason)
