"""aurora plan: a cluster and one or two profiles -> a plan."""

from pathlib import Path
from typing import Annotated

import typer

from aurora.cli.common import check_output, relative, terminal
from aurora.types import PlanOptions

DEFAULTS = PlanOptions()


def plan(
    cluster: Annotated[Path, typer.Option(help="cluster TOML")],
    profile: Annotated[list[Path], typer.Option(help="a model's profile; give two to share the GPUs between two models")],
    output: Annotated[Path, typer.Option("--output", "-o", help="the plan to write")] = Path("plan.json"),
    place: Annotated[str, typer.Option(help="experts into groups: balanced, contiguous, random")] = DEFAULTS.place,
    assign: Annotated[
        str, typer.Option(help="groups onto GPUs: by-load, matching, contiguous, random; auto follows the scenario")
    ] = DEFAULTS.assign,
    colocate: Annotated[
        str, typer.Option(help="the second model's groups: matching, sorted, decoupled, contiguous, random; or auto")
    ] = DEFAULTS.colocate,
    order: Annotated[
        str,
        typer.Option(
            help="one all-to-all: openshop, birkhoff, lanes, paced, sjf, random, spread-out, all-at-once; auto: the shortest"
        ),
    ] = DEFAULTS.order,
    seed: Annotated[int, typer.Option(help="for the random strategies")] = DEFAULTS.seed,
) -> None:
    """Decide where experts sit and in which order tokens travel; every schedule is checked before the plan is written."""
    from aurora.plan.planner import make_plan
    from aurora.report.tables import plan_table
    from aurora.store import load_cluster, load_profile, save

    check_output(output, inputs=[cluster, *profile])
    made = make_plan(
        load_cluster(cluster),
        [load_profile(path) for path in profile],
        PlanOptions(place, assign, colocate, order, seed),
        [relative(path, output) for path in profile],
    )
    save(made, output)
    console = terminal()
    console.print(plan_table(made))
    console.print(f"wrote {output}", soft_wrap=True)
