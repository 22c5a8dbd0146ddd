"""aurora simulate: a plan -> a predicted trace, or how a controller would keep the plan near traffic that changes."""

from pathlib import Path
from typing import Annotated

import typer

from aurora.cli.choices import completed
from aurora.cli.common import check_output, profiles_of
from aurora.cli.subcommand import WORST, Json, Layers, chosen, option, refuse_given, show
from aurora.types import ControlOptions

DEFAULTS = ControlOptions()
REPLAYED = ("windows", "lasting", "loss", "bytes_per_s", "period_s", "picture")  # options that go with --adapt
SIMULATED = ("barriers", "orders", "interleave", "staged", "trace", "layers")  # options that go without


def simulate(
    context: typer.Context,
    plan: Annotated[Path, typer.Argument(help="plan JSON")],
    profile: Annotated[
        list[Path] | None,
        typer.Option(help="the traffic, one profile per model; default: the profiles that the plan was made from"),
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
            help="{simulated_order}: the plan's orders, or orders recomputed per batch",
            autocompletion=completed("simulated_order"),
        ),
    ] = "plan",
    interleave: Annotated[
        str,
        typer.Option(
            help="several models: on, at the same time; off, one after the other", autocompletion=completed("interleave")
        ),
    ] = "on",
    staged: Annotated[
        bool, typer.Option("--staged", help="transfers run in stages, as NCCL's grouped calls do, instead of one by one")
    ] = False,
    trace: Annotated[Path | None, typer.Option(help="the predicted trace to write (npz); default: beside the plan")] = None,
    adapt: Annotated[
        str | None,
        typer.Option(
            help="instead: replay traffic that changes between the profiles, {change}, and compare ways to follow it",
            autocompletion=completed("change"),
        ),
    ] = None,
    windows: Annotated[int, typer.Option(help="with --adapt: windows of traffic")] = 120,
    lasting: Annotated[int, typer.Option(help="with --adapt: windows that a profile's traffic, a day or a crowd lasts")] = 10,
    loss: Annotated[float, option(ControlOptions, "loss")] = DEFAULTS.loss,
    bytes_per_s: Annotated[float | None, option(ControlOptions, "bytes_per_s")] = DEFAULTS.bytes_per_s,
    period_s: Annotated[float, option(ControlOptions, "period_s")] = DEFAULTS.period_s,
    picture: Annotated[Path | None, typer.Option(help="with --adapt: write the windows as PICTURE.svg and PICTURE.png")] = None,
    layers: Layers = False,
    as_json: Json = False,
) -> None:
    """Simulate a plan event by event: time per layer, utilisation, and the gap of its exchanges to the bound."""
    refuse_given(context, *((REPLAYED, "with `adapt`") if adapt is None else (SIMULATED, "without `adapt`")))
    if adapt is not None:
        _adapt(context, adapt, as_json)
        return
    from aurora import api
    from aurora.cli.as_json import summary_json
    from aurora.io import load_plan, save
    from aurora.planner.check.traffic import without_proof
    from aurora.planner.plan_seconds import seconds_between
    from aurora.reports.trace_tables import summary_table
    from aurora.reports.trace_times import summarise

    loaded = load_plan(plan)
    target = trace or plan.with_suffix(".predicted.npz")
    check_output(trace=target)
    traffic = profiles_of(loaded, plan, profile)
    given = {"barriers": barriers, "orders": orders, "interleave": interleave}
    predicted = api.simulate(loaded, traffic, **given, staged=staged)
    between_s = seconds_between(loaded, traffic, lambda each: api.simulate(loaded, each, **given, staged=staged).seconds)
    save(predicted, target)
    found = summarise(predicted, loaded.cluster)
    show(
        as_json,
        {"output": target, "between_s": between_s, **summary_json(found)},
        summary_table(found, most=None if layers else WORST, between_s=between_s),
        without_proof(loaded, traffic) or None,
        f"wrote {target}",
    )


def _adapt(context: typer.Context, change: str, as_json: bool) -> None:
    """Shows how ways to follow changing traffic do, and draws them."""
    from aurora import api
    from aurora.cli.as_json import followed_json
    from aurora.io import load_plan, load_profile
    from aurora.reports.following import draw_followed, followed_table

    given = context.params
    picture: Path | None = given["picture"]
    if picture is not None:
        check_output(picture=picture.with_suffix(".svg") if picture.name else picture)
    plan = load_plan(given["plan"])
    profiles = [load_profile(path) for path in given["profile"] or ()] or profiles_of(plan, given["plan"], None)[:1]
    found = api.follow(
        plan, profiles, change, windows=given["windows"], lasting=given["lasting"], options=chosen(ControlOptions, context)
    )
    written = [] if picture is None else draw_followed(found, picture)
    show(as_json, followed_json(found, written), followed_table(found), *(f"wrote {path}" for path in written))
