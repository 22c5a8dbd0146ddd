"""aurora simulate: a plan -> a predicted trace, how requests are served, or how a controller follows traffic that changes."""

from pathlib import Path
from typing import Annotated

import typer

from aurora.cli.choices import completed
from aurora.cli.common import INSTEAD, check_output, micro_batch_count, profiles_of
from aurora.cli.subcommand import WORST, Json, Layers, Priorities, chosen, option, refuse_given, show
from aurora.types import ControlOptions, PlanOptions, RequestOptions

DEFAULTS = ControlOptions()
ENGINE = RequestOptions()
DRAWN_WINDOWS = ("windows", "lasting")  # of --adapt, unless the profiles' own windows are replayed
REPLAYED = (*DRAWN_WINDOWS, "loss", "bytes_per_s", "period_s")  # options that go with --adapt
DRAWN = ("rate", "isl", "osl")  # requests that are drawn instead of read
REQUESTED = ("requests", *DRAWN, "duration_s", "max_num_batched_tokens", "max_num_seqs", "seed")  # that go with requests
TRACED = (
    "interleave",
    "priorities",
    "micro_batches",
    "trace",
    "layers",
)  # options that go without --adapt and without requests
SIMULATED = ("barriers", "orders", "staged", *TRACED)  # that go without --adapt
CHANGING, SERVED = "Traffic that changes", "Requests"  # panels of the help


def simulate(
    context: typer.Context,
    plan: Annotated[Path, typer.Argument(help="plan JSON")],
    profile: Annotated[
        list[Path] | None,
        typer.Option(
            help="the traffic, one profile per model; default: the profiles that the plan was made from; "
            "with --adapt: the kinds of traffic of one model, two or more"
        ),
    ] = None,
    barriers: Annotated[
        str,
        typer.Option(
            help="what a GPU waits for after an exchange, {barriers}: gpu, its own transfers and all ranks' token counts; "
            "none, its own transfers only; global, all ranks after every phase",
            autocompletion=completed("barriers"),
        ),
    ] = "gpu",
    orders: Annotated[
        str,
        typer.Option(
            help="{simulated_order}: the plan's orders; orders recomputed per batch; or an allgather of all tokens and a "
            "reduce-scatter instead of all-to-alls, as in vLLM without aurora",
            autocompletion=completed("simulated_order"),
        ),
    ] = "plan",
    interleave: Annotated[
        str,
        typer.Option(
            help="several models: on, at the same time; off, one after the other", autocompletion=completed("interleave")
        ),
    ] = "on",
    priorities: Priorities = None,
    micro_batches: Annotated[str | None, option(PlanOptions, "micro_batches", more=INSTEAD, choices=["micro_batches"])] = None,
    staged: Annotated[
        bool, typer.Option("--staged", help="transfers run in stages, as NCCL's grouped calls do, instead of one by one")
    ] = False,
    trace: Annotated[Path | None, typer.Option(help="the predicted trace to write (npz); default: beside the plan")] = None,
    adapt: Annotated[
        str | None,
        typer.Option(
            help="instead: replay traffic that changes between the profiles, {change}, and compare ways to follow it",
            autocompletion=completed("change"),
            rich_help_panel=CHANGING,
        ),
    ] = None,
    windows: Annotated[int, typer.Option(help="with --adapt: windows of traffic", rich_help_panel=CHANGING)] = 120,
    lasting: Annotated[
        int,
        typer.Option(help="with --adapt: windows that a profile's traffic, a day or a crowd lasts", rich_help_panel=CHANGING),
    ] = 10,
    loss: Annotated[float, option(ControlOptions, "loss", panel=CHANGING)] = DEFAULTS.loss,
    bytes_per_s: Annotated[float | None, option(ControlOptions, "bytes_per_s", panel=CHANGING)] = DEFAULTS.bytes_per_s,
    period_s: Annotated[float, option(ControlOptions, "period_s", panel=CHANGING)] = DEFAULTS.period_s,
    requests: Annotated[
        Path | None,
        typer.Option(
            help="instead: serve the requests of a trace (.csv or JSON lines of arrival_s,input_tokens,output_tokens, or as "
            "Azure's or Mooncake's), beside the engine's default",
            rich_help_panel=SERVED,
        ),
    ] = None,
    rate: Annotated[float | None, option(RequestOptions, "rate", panel=SERVED)] = ENGINE.rate,
    isl: Annotated[int | None, option(RequestOptions, "isl", panel=SERVED)] = ENGINE.isl,
    osl: Annotated[int | None, option(RequestOptions, "osl", panel=SERVED)] = ENGINE.osl,
    duration_s: Annotated[float | None, option(RequestOptions, "duration_s", "--duration", panel=SERVED)] = ENGINE.duration_s,
    max_num_batched_tokens: Annotated[
        int, option(RequestOptions, "max_num_batched_tokens", panel=SERVED)
    ] = ENGINE.max_num_batched_tokens,
    max_num_seqs: Annotated[int, option(RequestOptions, "max_num_seqs", panel=SERVED)] = ENGINE.max_num_seqs,
    seed: Annotated[int, option(RequestOptions, "seed", panel=SERVED)] = ENGINE.seed,
    layers: Layers = False,
    as_json: Json = False,
) -> None:
    """Simulate a plan event by event: time per layer, utilisation, and the gap of its exchanges to the bound."""
    refuse_given(context, *((REPLAYED, "with `adapt`") if adapt is None else (SIMULATED, "without `adapt`")))
    served = requests is not None or rate is not None
    if not served or adapt is not None:
        refuse_given(context, REQUESTED, "with `requests` or `rate`" if adapt is None else "without `adapt`")
    if adapt is not None:
        _adapt(context, adapt, as_json)
        return
    if served:
        refuse_given(context, TRACED, "without `requests` and `rate`")
        _serve(context, as_json)
        return
    from aurora import api
    from aurora.cli.as_json import models_json, summary_json
    from aurora.io import load_plan, save
    from aurora.planner.check.fit import check_traffic, without_proof
    from aurora.planner.resolve_options import with_priorities
    from aurora.planner.scenarios.scenario import seconds_between
    from aurora.planner.simulated_choice import with_micro_batches, with_preemption
    from aurora.reports.trace_tables import models_table, summary_table
    from aurora.reports.trace_times import summarise

    loaded = with_priorities(load_plan(plan), priorities or ())
    target = trace or plan.with_suffix(".predicted.npz")
    check_output(trace=target)
    traffic = profiles_of(loaded, plan, profile)
    if micro_batches is not None:
        check_traffic(loaded, traffic)
        loaded = with_micro_batches(loaded, traffic, micro_batch_count(micro_batches))
    given = {"barriers": barriers, "orders": orders, "interleave": interleave}
    loaded = with_preemption(loaded, traffic)
    predicted = api.simulate(loaded, traffic, **given, staged=staged)
    between_s = seconds_between(loaded, traffic, lambda each: api.simulate(loaded, each, **given, staged=staged).seconds)
    save(predicted, target)
    found = summarise(predicted, loaded.cluster)
    show(
        as_json,
        {"output": target, "between_s": between_s, "micro_batches": len(predicted.names_M) // len(loaded.models)}
        | summary_json(found)
        | {"models": models_json(found)},
        summary_table(found, most=None if layers else WORST, between_s=between_s),
        models_table(found),
        without_proof(loaded, traffic) or None,
        f"wrote {target}",
    )


def _adapt(context: typer.Context, change: str, as_json: bool) -> None:
    """Shows how ways to follow changing traffic do."""
    from aurora import api
    from aurora.cli.as_json import followed_json
    from aurora.io import load_plan, load_profile
    from aurora.reports.following import followed_table
    from aurora.simulator.changing_traffic import RECORDED

    given = context.params
    if change == RECORDED:
        refuse_given(context, DRAWN_WINDOWS, f"without `adapt` {RECORDED}, which replays the profiles' own windows")
    plan = load_plan(given["plan"])
    profiles = [load_profile(path) for path in given["profile"] or ()] or profiles_of(plan, given["plan"], None)[:1]
    found = api.follow(
        plan, profiles, change, windows=given["windows"], lasting=given["lasting"], options=chosen(ControlOptions, context)
    )
    show(as_json, followed_json(found), followed_table(found))


def _serve(context: typer.Context, as_json: bool) -> None:
    """Shows how requests are served under the plan, and under the engine's default."""
    from aurora import api
    from aurora.advisor.recommend import engine_default
    from aurora.cli.as_json import requests_json
    from aurora.cli.progress import shown
    from aurora.errors import InfeasiblePlan
    from aurora.io import load_plan, load_requests
    from aurora.planner.check.fit import check_traffic, without_proof
    from aurora.reports.trace_tables import request_lines, requests_table

    given, options = context.params, chosen(RequestOptions, context)
    if given["requests"] is not None:
        refuse_given(context, DRAWN, "without `requests`")
    plan = load_plan(given["plan"])
    profiles = profiles_of(plan, given["plan"], given["profile"])
    check_traffic(plan, profiles)
    requests = None if given["requests"] is None else load_requests(given["requests"])
    plans, missing = {"plan": plan}, None
    if len(plan.models) == 1:
        try:
            plans["default"] = engine_default(plan.cluster, profiles[0])
        except InfeasiblePlan as error:
            missing = f"default: {error}"
    how = {name: given[name] for name in ("barriers", "orders", "staged")}
    found = {}
    for name, each in plans.items():
        with shown() as progress:
            found[name] = api.simulate_requests(each, profiles[0], requests, options, **how, progress=progress)
    served = found["plan"].served.requests
    head = {
        "requests": len(served),
        "input_tokens": served.input_tokens_Q.sum(),
        "output_tokens": served.output_tokens_Q.sum(),
        "arrivals_s": served.arrival_s_Q[-1],
    }
    results = {name: requests_json(found[name]) if name in found else None for name in ("plan", "default")}
    show(
        as_json,
        {**head, **results, "assumptions": list(found["plan"].assumptions)},
        requests_table(found),
        missing,
        *request_lines(found),
        without_proof(plan, profiles) or None,
    )
