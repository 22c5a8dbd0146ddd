"""aurora plan: a cluster and a profile for each model -> a plan."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

import aurora
from aurora.cli.choices import completed
from aurora.cli.inputs import check_output, relative
from aurora.cli.options import WORST, Json, Layers, as_options, refuse_given
from aurora.cli.output import explanation_json, migration_json, plan_json, show
from aurora.errors import BadInput
from aurora.types import PlanOptions
from aurora.types.options import STRATEGY


def plan(
    profile: Annotated[list[Path], typer.Option(help="a model's profile; give two or more to share the GPUs between models")],
    cluster: Annotated[Path, typer.Option(help="cluster TOML, or the name of a shipped cluster")],
    options: PlanOptions,
    output: Annotated[Path, typer.Option("--output", "-o", help="the plan to write")] = Path("plan.json"),
    domain: Annotated[
        list[Path] | None,
        typer.Option(help="traffic domain: another profile of the same model that the same plan must serve; repeat it"),
    ] = None,
    previous: Annotated[
        Path | None,
        typer.Option("--from", help="the current plan: relabel GPUs so that few bytes move, and price the migration"),
    ] = None,
    max_move_bytes: Annotated[
        int | None,
        typer.Option(
            help="with --from: byte budget; move only the layers that save most within it", rich_help_panel="Migration"
        ),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            help="the serving engine, which must be able to serve the plan: {engine}",
            autocompletion=completed("engine"),
            rich_help_panel=STRATEGY,
        ),
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="show the terms of each layer's time")] = False,
    layers: Layers = False,
    as_json: Json = False,
) -> None:
    """Decide which GPU holds which experts and in which order tokens travel; every schedule is checked."""
    from aurora.cli.progress import shown
    from aurora.io import load_cluster, load_plan, load_profile, save
    from aurora.planner.check.fit import check_engine
    from aurora.planner.placement.cost_model import AIMS, SUMMED
    from aurora.planner.placement.explain import explain as explained
    from aurora.planner.placement.objective import BUSIEST_RESOURCE, TABLE_2
    from aurora.reports.formatting import seconds
    from aurora.reports.plan_tables import expectation_lines, explain_tables, move_table, plan_table, worst_cut

    domains = domain or []
    if len(profile) == 1:
        colocated_only = ("colocate", *(["objective"] if options.objective in (*TABLE_2, BUSIEST_RESOURCE) else []))
        refuse_given(colocated_only, "with two `profile` or more, of models that share the GPUs")
    check_output(output=output)
    if max_move_bytes is not None and previous is None:
        raise BadInput("--max-move-bytes: expected --from, the plan in force")
    if max_move_bytes is not None and not 0 <= max_move_bytes < 2**62:
        raise BadInput(f"--max-move-bytes: expected from zero to 2**62, found {max_move_bytes}")
    aim = options.aim
    if explain and (domains or (aim in AIMS and aim not in ("mean", *SUMMED))):
        raise BadInput(
            f"--explain: explains the windows of one profile as one, expected no {'--domain' if domains else f'--aim {aim}'}"
        )
    if explain and options.all_to_all == "hierarchical":
        raise BadInput("`explain`: expected a plan with flat all-to-alls, found `all_to_all` hierarchical")
    machines, profiles = load_cluster(cluster), [load_profile(path) for path in profile]
    further, in_force = [load_profile(path) for path in domains], None if previous is None else load_plan(previous)
    if options.all_to_all == "auto" and explain:  # which is not there for all-to-alls over servers
        options = replace(options, all_to_all="flat")
    paths = [relative(path, output) for path in profile]
    began, moved = time.perf_counter(), None
    with shown() as progress:
        made = aurora.plan(machines, profiles, options, domains=further, profile_paths=paths, progress=progress)
    if in_force is not None:
        made, moved = aurora.migrate(made, in_force, profiles, max_move_bytes=max_move_bytes, domains=further)
    if engine is not None:
        check_engine(made, engine)
    took_s = time.perf_counter() - began
    why = explained(made, profiles) if explain else []
    save(made, output)
    found = {"output": output, "seconds": took_s, **plan_json(made), "migration": migration_json(moved)}
    show(
        as_json,
        {**found, "explanation": explanation_json(why)},
        plan_table(made, None if layers else WORST),
        None if moved is None else move_table(moved),
        *explain_tables(made, why),
        worst_cut(made),
        *expectation_lines(made),
        *(as_options(note) for note in made.notes),
        f"planned in {seconds(took_s)}",
        f"wrote {output}",
    )
