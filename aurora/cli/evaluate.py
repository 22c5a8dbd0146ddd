"""aurora evaluate: a plan and other traffic -> the plan's time, its loss, or how far traffic has drifted."""

from pathlib import Path
from typing import Annotated

import typer

import aurora
from aurora.cli.options import WORST, Json, Layers, refuse_given
from aurora.cli.output import drift_json, evaluation_json, show
from aurora.errors import BadInput
from aurora.types import DriftOptions


def evaluate(
    profile: Annotated[list[Path], typer.Option(help="the traffic, one profile per model")],
    options: DriftOptions,
    plan: Annotated[
        Path | None, typer.Argument(help="plan JSON; with --before it may be left out: experts balanced for that traffic")
    ] = None,
    before: Annotated[
        Path | None,
        typer.Option(help="instead: how far traffic has drifted since this profile, which the plan was made from"),
    ] = None,
    layers: Layers = False,
    as_json: Json = False,
) -> None:
    """Price a plan on traffic that it was not made for, beside a plan made for that traffic; or show, with --before, how far
    traffic has changed, layer by layer, what the plan loses by it, and whether to plan again."""
    from aurora.io import load_plan, load_profile
    from aurora.planner.check.fit import without_proof
    from aurora.reports.plan_tables import drift_table, evaluation_table

    most = None if layers else WORST
    served = None if plan is None else load_plan(plan)
    if before is not None:
        if len(profile) != 1:
            raise BadInput(f"`profile`: expected one with `before`, of the same model, found {len(profile)}")
        drifted = aurora.drift(load_profile(before), load_profile(profile[0]), served, options)
        show(as_json, drift_json(drifted), drift_table(drifted, most), drifted.reason)
        return
    refuse_given(("threshold", "hot", "seed"), "with `before`")
    if served is None:
        raise BadInput("`plan`: expected a file, or `before`, found neither")
    traffic = [load_profile(path) for path in profile]
    found = aurora.evaluate(served, traffic)
    show(as_json, evaluation_json(served, found), evaluation_table(served, found, most), without_proof(served, traffic) or None)
