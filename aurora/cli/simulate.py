"""aurora simulate: a plan -> a predicted trace, or how requests are served."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import aurora
from aurora.algorithms.check.fit import check_traffic, without_proof
from aurora.cli.inputs import check_output, profiles_of
from aurora.cli.options import refuse_given, verb
from aurora.cli.output import WORST, progress_bars, show, working
from aurora.errors import BadInput
from aurora.io import load_plan, load_requests, save
from aurora.types import BARRIERS, RequestOptions
from aurora.types.options import MOST_GROUPS, SIMULATED_ORDERS, Limits
from aurora.types.run_options import INTERLEAVE

USUAL = {"interleave": "on", "barriers": "gpu", "orders": "plan", "staged": False, "overlap": 1}  # not in a trace's name
TRACED = ("interleave", "output", "overlap")  # that go without requests


@verb(seed=None)
def simulate(
    plan: Path,
    /,
    *,
    profile: list[Path] | None = None,
    output: Path | None = None,
    interleave: Annotated[str, Limits(one_of=INTERLEAVE[:2])] = "on",
    barriers: Annotated[str, Limits(one_of=BARRIERS)] = "gpu",
    orders: Annotated[str, Limits(one_of=SIMULATED_ORDERS)] = "plan",
    staged: bool = False,
    overlap: Annotated[int, Limits(above=0, most=MOST_GROUPS)] = 1,
    requests: Path | None = None,
    request: RequestOptions | None = None,
    as_json: bool = False,
) -> None:
    """Simulate a plan event by event. Show the time per layer, the utilisation, and the gap of its exchanges to the bound.

    Args:
        plan: plan JSON.
        profile: the traffic, one profile per model; default: the profiles that the plan was made from.
        output: the predicted trace to write (npz); default: beside the plan, by its name and options, as plan.predicted.npz and
            plan.interleave-off.predicted.npz.
        barriers: events that a GPU awaits after an exchange: gpu, its own transfers and the token counts of all ranks; none,
            only its own transfers; global, all ranks after every phase.
        orders: plan, the plan's orders; batch, orders recomputed per batch; or allgather, an allgather of all tokens and a
            reduce-scatter instead of all-to-alls, as in vLLM without aurora.
        interleave: run several models at the same time (on) or one after the other (off).
        staged: run transfers in stages, as NCCL's grouped calls do, instead of one by one.
        overlap: groups of each rank's experts; the experts of a group compute while rows of other groups travel. 1: not so.
        requests: serve the requests of a trace instead, and compare with the engine's default and with even ranks (.csv or JSON
            lines with arrival_s,input_tokens,output_tokens, or another format).
    """
    how: dict[str, Any] = {"barriers": barriers, "orders": orders, "staged": staged}
    if requests is not None or request is not None:
        refuse_given(TRACED, "without `requests` and `rate`")
        _serve(plan, profile, requests, request or RequestOptions(), how, as_json)
        return
    from aurora.advisor.sharing import apart_seconds
    from aurora.planner.options import with_preemption
    from aurora.planner.scenarios.scenario import rows_estimated
    from aurora.reports.advice import sharing_line
    from aurora.reports.json_objects import json_of
    from aurora.reports.trace_tables import models_table, summary_table
    from aurora.reports.trace_times import summarise

    loaded, ways = load_plan(plan), {"interleave": interleave, **how, "overlap": overlap}
    chosen = [name if value is True else f"{name}-{value}" for name, value in ways.items() if value != USUAL[name]]
    target = output or plan.with_suffix("".join(f".{part}" for part in [*chosen, "predicted.npz"]))
    check_output(output=target)
    traffic = profiles_of(loaded, plan, profile)
    loaded = with_preemption(loaded, traffic)
    with working("simulating"):
        predicted = aurora.simulate(loaded, traffic, interleave=interleave, overlap=overlap, **how)
    estimated = rows_estimated([model.hierarchy for model in loaded.models], traffic)
    save(predicted, target)
    summary, apart = summarise(predicted, loaded.cluster), None
    if loaded.colocated and interleave == "on":
        with progress_bars() as progress:
            apart = apart_seconds(loaded, traffic, **how, progress=progress)
    show(
        as_json,
        {
            "output": target,
            "estimated": estimated,
            "one_after_the_other_s": apart and min(apart),
            "micro_batches": len(predicted.names_M) // len(loaded.models),
        }
        | json_of(summary)
        | {"models": json_of(summary.models)},
        summary_table(summary, most=WORST, from_counts=estimated),
        models_table(summary),
        None if apart is None else sharing_line(summary, apart),
        without_proof(loaded, traffic) or None,
        f"wrote {target}",
    )


def _serve(
    path: Path,
    profile: list[Path] | None,
    trace: Path | None,
    options: RequestOptions,
    how: dict[str, Any],
    as_json: bool,
) -> None:
    """Shows how requests are served under the plan, and under the engine's default."""
    from aurora.advisor.recommend import engine_default
    from aurora.errors import InfeasiblePlan
    from aurora.reports.json_objects import served_requests_json
    from aurora.reports.trace_tables import request_lines, requests_table

    drawn = {name: getattr(options, name) for name in ("rate", "isl", "osl")}
    if trace is None:
        if missing := [f"`{name}`" for name, value in drawn.items() if value is None]:
            raise BadInput(f"simulate: expected {' and '.join(missing)} too, to draw requests, or `requests`, a trace of them")
    elif given := [f"`{name}`" for name, value in drawn.items() if value is not None]:
        raise BadInput(f"{given[0]}: expected without `requests`")
    plan = load_plan(path)
    profiles = profiles_of(plan, path, profile)
    check_traffic(plan, profiles)
    requests = None if trace is None else load_requests(trace)
    plans, failed = {"plan": plan}, None
    if len(plan.models) == 1:
        try:
            plans["default"] = engine_default(plan.cluster, profiles[0])
        except InfeasiblePlan as error:
            failed = f"default: {error}"
    simulated = {}
    for name, candidate in plans.items():
        with progress_bars() as progress:
            chosen = options if name == "plan" else replace(options, dispatch=RequestOptions.dispatch, ttft_s=None)
            simulated[name] = aurora.simulate_requests(candidate, profiles[0], requests, chosen, progress=progress, **how)
    show(
        as_json,
        served_requests_json(simulated, ("plan", "default")),
        requests_table(simulated),
        failed,
        *request_lines(simulated),
        without_proof(plan, profiles) or None,
    )
