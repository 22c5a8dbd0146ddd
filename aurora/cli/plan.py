"""aurora plan: a cluster and one or two profiles -> a plan."""

import time
from pathlib import Path
from typing import Annotated

import typer

from aurora.cli.common import check_output, relative, terminal
from aurora.errors import BadInput
from aurora.types import PlanOptions

DEFAULTS = PlanOptions()


def plan(
    profile: Annotated[list[Path], typer.Option(help="a model's profile; give two to share the GPUs between two models")],
    cluster: Annotated[Path | None, typer.Option(help="cluster TOML")] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="the plan to write")] = Path("plan.json"),
    place: Annotated[
        str,
        typer.Option(
            help="experts: refined (one by one), or in groups: balanced, lina, contiguous, random; with --slots-per-gpu and "
            "replicas: equal-split, free-split, eplb; with --min-replicas: aurora, mro, spread, compact; or auto"
        ),
    ] = DEFAULTS.place,
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
        str,
        typer.Option(
            help="one all-to-all: openshop, birkhoff, lanes, paced, sjf, random, spread-out, all-at-once; auto: the shortest"
        ),
    ] = DEFAULTS.order,
    seed: Annotated[int, typer.Option(help="for the random strategies")] = DEFAULTS.seed,
    objective: Annotated[
        str,
        typer.Option(
            help="time of two models together: causal, paper (as Aurora prints it); simulated: plan by several and simulate"
        ),
    ] = DEFAULTS.objective,
    time_limit: Annotated[
        float, typer.Option(help="seconds in all after which --colocate exact ends with the best found and its bound")
    ] = DEFAULTS.time_limit_s,
    slots_per_gpu: Annotated[
        int | None, typer.Option(help="experts that each GPU holds, replicas included; default: what its memory holds")
    ] = DEFAULTS.slots_per_gpu,
    time_slice: Annotated[
        str, typer.Option(help="two models' turns at a port: exchange, layer; auto: the one that the simulator finds faster")
    ] = DEFAULTS.time_slice,
    min_replicas: Annotated[
        int | None,
        typer.Option(help="replicas of each expert at least, on as many nodes: one node less may fail"),
    ] = DEFAULTS.min_replicas,
    domain: Annotated[list[Path] | None, typer.Option(help="another profile of the one model that the plan must serve")] = None,
    aim: Annotated[
        str, typer.Option(help="over domains, else windows: mean, cvar (the worse half), worst; sum takes them as one")
    ] = DEFAULTS.aim,
    old: Annotated[
        Path | None, typer.Option("--from", help="the plan in force: relabel GPUs so that few bytes move, and price the move")
    ] = None,
    max_move_bytes: Annotated[
        int | None, typer.Option(help="with --from: move the layers that save most within so many bytes")
    ] = None,
    evaluate: Annotated[
        Path | None, typer.Option(help="make no plan: price this one on --profile, beside a plan made for it")
    ] = None,
    coactivation: Annotated[
        bool,
        typer.Option("--co-activation", help="experts chosen together sit together, tokens count once a GPU, if shorter"),
    ] = DEFAULTS.coactivation,
    engine: Annotated[str | None, typer.Option(help="refuse what this engine could not serve by: vllm")] = None,
    explain: Annotated[bool, typer.Option("--explain", help="print what each layer's time consists of")] = False,
) -> None:
    """Decide where experts sit and in which order tokens travel; every schedule is checked before the plan is written."""
    from aurora.advisor.simulated_choice import SIMULATED, simulated_plan, with_time_slice
    from aurora.io import load_cluster, load_plan, load_profile, save
    from aurora.planner.check.engines import check_engine
    from aurora.planner.evaluate import evaluate as evaluated
    from aurora.planner.make_plan import make_plan
    from aurora.planner.migration.migrate import move
    from aurora.planner.placement.explain import explain as explained
    from aurora.reports.explain import explain_tables
    from aurora.reports.tables import cut_line, evaluation_table, move_table, plan_table, seconds

    if evaluate is not None:
        given = {"--cluster": cluster, "--domain": domain, "--from": old, "--max-move-bytes": max_move_bytes}
        for name, value in given.items():
            if value not in (None, []):
                raise BadInput(f"{name}: has no effect with --evaluate, which makes no plan for it")
        served = load_plan(evaluate)
        terminal().print(evaluation_table(served, evaluated(served, [load_profile(path) for path in profile])))
        return
    if cluster is None:
        raise BadInput("plan: expected --cluster, the machines to plan for")
    domains = domain or []
    check_output(output, inputs=[cluster, *profile, *domains, *([old] if old else [])])
    if max_move_bytes is not None and old is None:
        raise BadInput("--max-move-bytes: expected --from, the plan in force")
    if explain and (domains or aim != DEFAULTS.aim):
        raise BadInput("--explain: explains the windows of one profile as one, expected neither --domain nor --aim")
    options = PlanOptions(
        place, assign, colocate, order, seed, objective, time_limit, slots_per_gpu, aim, coactivation, min_replicas, time_slice
    )
    machines, profiles = load_cluster(cluster), [load_profile(path) for path in profile]
    paths = [relative(path, output) for path in profile]
    in_force = load_plan(old) if old is not None else None
    began = time.perf_counter()
    further = [load_profile(path) for path in domains]
    if objective == SIMULATED:
        if domains:
            raise BadInput(f"--objective {SIMULATED}: expected no --domain, whose traffic is not simulated")
        made = simulated_plan(machines, profiles, options, paths)
    else:
        made = make_plan(machines, profiles, options, paths, domains=further)
    moved = None
    if in_force is not None:
        made, moved = move(made, in_force, profiles, max_move_bytes, further)
    if time_slice == DEFAULTS.time_slice and len(profiles) == 2:
        made = with_time_slice(made, profiles)
    if engine is not None:
        check_engine(made, engine)
    took = time.perf_counter() - began
    tables = [plan_table(made), *([move_table(moved)] if moved else [])]
    tables += explain_tables(made, explained(made, profiles)) if explain else []
    save(made, output)
    console = terminal()
    for table in tables:
        console.print(table)
    cuts = [(cut, model.model, layer) for model in made.models for layer, cut in enumerate(model.cut_L)]
    if cuts:
        worst, name, layer = max(cuts, key=lambda each: each[0].bound_s)
        console.print(f"{name}, layer {layer}: {cut_line(worst)}", soft_wrap=True)
    console.print(f"planned in {seconds(took)}")
    console.print(f"wrote {output}", soft_wrap=True)
