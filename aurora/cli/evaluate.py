"""aurora evaluate: a plan and other traffic -> the plan's time, and its loss against a plan made for that traffic."""

from pathlib import Path
from typing import Annotated

import typer

from aurora.cli.subcommand import WORST, Json, Layers, show


def evaluate(
    plan: Annotated[Path, typer.Argument(help="plan JSON")],
    profile: Annotated[list[Path], typer.Option(help="the traffic, one profile per model")],
    layers: Layers = False,
    as_json: Json = False,
) -> None:
    """Price a plan on traffic that it was not made for, beside a plan made for that traffic."""
    from aurora import api
    from aurora.cli.as_json import evaluation_json
    from aurora.io import load_plan, load_profile
    from aurora.planner.check.fit import without_proof
    from aurora.reports.plan_tables import evaluation_table

    served, traffic = load_plan(plan), [load_profile(path) for path in profile]
    found = api.evaluate(served, traffic)
    table = evaluation_table(served, found, None if layers else WORST)
    show(as_json, evaluation_json(served, found), table, without_proof(served, traffic) or None)
