"""aurora drift: two profiles of a model -> how far apart they are, and whether to plan again."""

import json
from pathlib import Path
from typing import Annotated

import typer

from aurora.cli.common import terminal
from aurora.types import DriftOptions

DEFAULTS = DriftOptions()


def drift(
    before: Annotated[Path, typer.Argument(help="the profile that was planned for")],
    after: Annotated[Path, typer.Argument(help="a later profile of the same model")],
    plan: Annotated[
        Path | None, typer.Option(help="the plan in force, made from the first; without it, balanced groups stand for one")
    ] = None,
    threshold: Annotated[
        float, typer.Option(help="plan again when the plan takes longer than one of its own by more than this part")
    ] = DEFAULTS.threshold,
    hot: Annotated[
        int | None, typer.Option(help="how many of the most loaded experts count as hot; default: an eighth of all")
    ] = DEFAULTS.hot,
    seed: Annotated[int, typer.Option(help="for what differs by chance")] = DEFAULTS.seed,
    as_json: Annotated[bool, typer.Option("--json", help="print the numbers as JSON")] = False,
) -> None:
    """Say how far traffic has moved, layer by layer, what the plan loses by it, and whether to plan again."""
    from aurora.io import load_plan, load_profile
    from aurora.planner.workload.drift import drift as drifted
    from aurora.reports.tables import drift_table

    options = DriftOptions(threshold, hot, seed)
    found = drifted(load_profile(before), load_profile(after), load_plan(plan) if plan else None, options)
    if as_json:
        layers = zip(found.variation_L.tolist(), found.noise_L.tolist(), found.overlap_L.tolist(), strict=True)
        rows = [{"variation": a, "by_chance": b, "hot_overlap": c} for a, b, c in layers]
        head = {"schema": 1, "replan": found.replan, "reason": found.reason, "loss": found.loss, "threshold": found.threshold}
        print(json.dumps({**head, "moved": found.moved, "hot": found.hot, "layers": rows}))
        return
    console = terminal()
    console.print(drift_table(found))
    console.print(found.reason, soft_wrap=True)
