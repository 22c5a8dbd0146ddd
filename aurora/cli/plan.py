"""aurora plan: a cluster and one or two profiles -> a plan."""

import time
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
    place: Annotated[str, typer.Option(help="experts into groups: balanced, lina, contiguous, random")] = DEFAULTS.place,
    assign: Annotated[
        str, typer.Option(help="groups onto GPUs: exact, by-load, matching, contiguous, random; auto follows the scenario")
    ] = DEFAULTS.assign,
    colocate: Annotated[
        str,
        typer.Option(
            help="the second model's groups: matching, sorted, contiguous, random; both models': local-search, exact, "
            "decoupled; or auto"
        ),
    ] = DEFAULTS.colocate,
    order: Annotated[
        str, typer.Option(help="one all-to-all: openshop, sjf, random, spread-out, all-at-once; auto: the shortest")
    ] = DEFAULTS.order,
    seed: Annotated[int, typer.Option(help="for the random strategies")] = DEFAULTS.seed,
    objective: Annotated[
        str, typer.Option(help="time of two models together: causal, or paper (as Aurora prints it)")
    ] = DEFAULTS.objective,
    time_limit: Annotated[
        float, typer.Option(help="seconds in all after which --colocate exact ends with the best found and its bound")
    ] = DEFAULTS.time_limit_s,
    explain: Annotated[bool, typer.Option("--explain", help="print what each layer's time consists of")] = False,
) -> None:
    """Decide where experts sit and in which order tokens travel; every schedule is checked before the plan is written."""
    from aurora.plan.explain import explain as explained
    from aurora.plan.planner import make_plan
    from aurora.report.explain import explain_tables
    from aurora.report.tables import cut_line, plan_table, seconds
    from aurora.store import load_cluster, load_profile, save

    check_output(output, inputs=[cluster, *profile])
    options = PlanOptions(place, assign, colocate, order, seed, objective, time_limit)
    machines, profiles = load_cluster(cluster), [load_profile(path) for path in profile]
    began = time.perf_counter()
    made = make_plan(machines, profiles, options, [relative(path, output) for path in profile])
    took = time.perf_counter() - began
    save(made, output)
    console = terminal()
    for table in [plan_table(made), *(explain_tables(made, explained(made, profiles)) if explain else [])]:
        console.print(table)
    cuts = [(cut, model.model, layer) for model in made.models for layer, cut in enumerate(model.cut_L)]
    if cuts:
        worst, name, layer = max(cuts, key=lambda each: each[0].bound_s)
        console.print(f"{name}, layer {layer}: {cut_line(worst)}", soft_wrap=True)
    console.print(f"planned in {seconds(took)}")
    console.print(f"wrote {output}", soft_wrap=True)
