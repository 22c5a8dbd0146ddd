"""aurora plan: a cluster and a profile for each model -> a plan."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from aurora.cli.choices import completed
from aurora.cli.common import check_output, micro_batch_count, relative
from aurora.cli.subcommand import WORST, Json, Layers, as_options, chosen, option, refuse_given, show
from aurora.errors import BadInput
from aurora.types import PlanOptions

DEFAULTS = PlanOptions()
TRAFFIC, STRATEGY, REPLICAS, MOVE = "Traffic", "Strategies by name", "Replicas and failures", "Migration"


def plan(
    context: typer.Context,
    profile: Annotated[
        list[Path],
        typer.Option(help="a model's profile; give two or more to share the GPUs between models", rich_help_panel=TRAFFIC),
    ],
    cluster: Annotated[Path, typer.Option(help="cluster TOML, or the name of a shipped cluster", rich_help_panel=TRAFFIC)],
    output: Annotated[Path, typer.Option("--output", "-o", help="the plan to write")] = Path("plan.json"),
    domain: Annotated[
        list[Path] | None,
        typer.Option(
            help="traffic domain: another profile of the same model that the same plan must serve; repeat it",
            rich_help_panel=TRAFFIC,
        ),
    ] = None,
    aim: Annotated[
        str,
        option(
            PlanOptions,
            "aim",
            more=": {aim}, auto (mean; for several models or with --co-activation: own)",
            panel=TRAFFIC,
            choices=["aim"],
        ),
    ] = DEFAULTS.aim,
    place: Annotated[
        str,
        option(
            PlanOptions,
            "place",
            more=": {place}; for several models {colocated_place}; with --min-replicas {survive}; or auto",
            panel=STRATEGY,
            choices=["place", "survive"],
        ),
    ] = DEFAULTS.place,
    assign: Annotated[
        str, option(PlanOptions, "assign", more=": {assign}, auto", panel=STRATEGY, choices=["assign"])
    ] = DEFAULTS.assign,
    colocate: Annotated[
        str, option(PlanOptions, "colocate", more=": {colocate}, auto", panel=STRATEGY, choices=["colocate"])
    ] = DEFAULTS.colocate,
    order: Annotated[
        str, option(PlanOptions, "order", more=": {order}, auto", panel=STRATEGY, choices=["order"])
    ] = DEFAULTS.order,
    objective: Annotated[
        str, option(PlanOptions, "objective", more=": {objective}, auto", panel=STRATEGY, choices=["objective"])
    ] = DEFAULTS.objective,
    all_to_all: Annotated[
        str,
        option(PlanOptions, "all_to_all", more=": {all_to_all}, auto", panel=STRATEGY, choices=["all_to_all"]),
    ] = DEFAULTS.all_to_all,
    time_slice: Annotated[
        str, option(PlanOptions, "time_slice", more=": {time_slice}", panel=STRATEGY, choices=["time_slice"])
    ] = DEFAULTS.time_slice,
    priorities: Annotated[
        list[str] | None, option(PlanOptions, "priorities", "--priority", panel=STRATEGY, choices=["priority"])
    ] = None,
    micro_batches: Annotated[
        str, option(PlanOptions, "micro_batches", more=": {micro_batches}", panel=STRATEGY, choices=["micro_batches"])
    ] = str(DEFAULTS.micro_batches),
    coactivation: Annotated[
        bool, option(PlanOptions, "coactivation", "--co-activation", panel=STRATEGY)
    ] = DEFAULTS.coactivation,
    time_limit_s: Annotated[float, option(PlanOptions, "time_limit_s", "--time-limit", panel=STRATEGY)] = DEFAULTS.time_limit_s,
    seed: Annotated[int, option(PlanOptions, "seed", panel=STRATEGY)] = DEFAULTS.seed,
    slots_per_gpu: Annotated[int | None, option(PlanOptions, "slots_per_gpu", panel=REPLICAS)] = DEFAULTS.slots_per_gpu,
    min_replicas: Annotated[int | None, option(PlanOptions, "min_replicas", panel=REPLICAS)] = DEFAULTS.min_replicas,
    previous: Annotated[
        Path | None,
        typer.Option(
            "--from",
            help="the current plan: relabel GPUs so that few bytes move, and price the migration",
            rich_help_panel=MOVE,
        ),
    ] = None,
    max_move_bytes: Annotated[
        int | None,
        typer.Option(help="with --from: byte budget; move only the layers that save most within it", rich_help_panel=MOVE),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(help="refuse a plan that this engine cannot serve: {engine}", autocompletion=completed("engine")),
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="show the terms of each layer's time")] = False,
    layers: Layers = False,
    as_json: Json = False,
) -> None:
    """Decide which GPU holds which experts and in which order tokens travel; every schedule is checked."""
    from aurora import api
    from aurora.cli.as_json import explanation_json, migration_json, plan_json
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
        colocated_only = ("colocate", *(["objective"] if objective in (*TABLE_2, BUSIEST_RESOURCE) else []))
        refuse_given(context, colocated_only, "with two `profile` or more, of models that share the GPUs")
    check_output(output=output)
    if max_move_bytes is not None and previous is None:
        raise BadInput("--max-move-bytes: expected --from, the plan in force")
    if max_move_bytes is not None and not 0 <= max_move_bytes < 2**62:
        raise BadInput(f"--max-move-bytes: expected from zero to 2**62, found {max_move_bytes}")
    if explain and (domains or (aim in AIMS and aim not in ("mean", *SUMMED))):
        raise BadInput(
            f"--explain: explains the windows of one profile as one, expected no {'--domain' if domains else f'--aim {aim}'}"
        )
    options = chosen(PlanOptions, context, micro_batches=micro_batch_count(micro_batches))
    if explain and options.all_to_all == "hierarchical":
        raise BadInput("`explain`: expected a plan with flat all-to-alls, found `all_to_all` hierarchical")
    machines, profiles = load_cluster(cluster), [load_profile(path) for path in profile]
    further, in_force = [load_profile(path) for path in domains], None if previous is None else load_plan(previous)
    if options.all_to_all == "auto" and explain:  # which is not there for all-to-alls over servers
        options = replace(options, all_to_all="flat")
    paths = [relative(path, output) for path in profile]
    began, moved = time.perf_counter(), None
    with shown() as progress:
        made = api.plan(machines, profiles, options, domains=further, profile_paths=paths, progress=progress)
    if in_force is not None:
        made, moved = api.migrate(made, in_force, profiles, max_move_bytes=max_move_bytes, domains=further)
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
        *(as_options(note, context.command.params) for note in made.notes),
        f"planned in {seconds(took_s)}",
        f"wrote {output}",
    )
