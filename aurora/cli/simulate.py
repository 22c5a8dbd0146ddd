"""aurora simulate: a plan -> a predicted trace, or how requests are served."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import aurora
from aurora.algorithms.check.fit import check_traffic, without_proof
from aurora.cli.inputs import check_output, profiles_of
from aurora.cli.options import RUNNING, WORST, Only, is_given, refuse_given
from aurora.cli.output import progress_bars, show
from aurora.io import load_plan, load_requests, save
from aurora.types import BARRIERS, PlanOptions, RequestOptions
from aurora.types.options import SIMULATED_ORDERS, OptionField
from aurora.types.requests import SERVED
from aurora.types.run_options import INTERLEAVE

DRAWN = ("rate", "isl", "osl")  # requests that are drawn instead of read
REQUESTED = (
    "requests",
    "trace_format",
    *DRAWN,
    "duration_s",
    "max_num_batched_tokens",
    "max_num_seqs",
    "dispatch",
    "ttft_s",
    "seed",
)  # that go with requests
TRACED = ("interleave", "priorities", "micro_batches", "layers", "output")  # that go without requests


def simulate(
    plan: Path,
    *,
    instead: Annotated[PlanOptions, Only(("priorities", "micro_batches"), "Orders and time slices", "the plan's")],
    request: Callable[..., RequestOptions],
    profile: list[Path] | None = None,
    output: Path | None = None,
    barriers: Annotated[str, OptionField(one_of=BARRIERS)] = "gpu",
    orders: Annotated[str, OptionField(one_of=SIMULATED_ORDERS)] = "plan",
    interleave: Annotated[str, OptionField(one_of=INTERLEAVE[:2])] = "on",
    staged: bool = False,
    requests: Path | None = None,
    trace_format: Annotated[str | None, OptionField(choices="trace_format", panel=SERVED)] = None,
    layers: bool = False,
    as_json: bool = False,
) -> None:
    """Simulate a plan event by event. Show the time per layer, the utilisation, and the gap of its exchanges to the bound.

    Args:
        plan: plan JSON.
        profile: the traffic, one profile per model; default: the profiles that the plan was made from.
        output: the predicted trace to write (npz); default: beside the plan, by its name and that of options that are given, as
            plan.predicted.npz and plan.interleave-off.predicted.npz.
        barriers: events that a GPU awaits after an exchange: gpu, its own transfers and the token counts of all ranks; none,
            only its own transfers; global, all ranks after every phase.
        orders: plan, the plan's orders; batch, orders recomputed per batch; or allgather, an allgather of all tokens and a
            reduce-scatter instead of all-to-alls, as in vLLM without aurora.
        interleave: run several models at the same time (on) or one after the other (off).
        staged: run transfers in stages, as NCCL's grouped calls do, instead of one by one.
        requests: serve the requests of a trace instead, and compare with the engine's default and with even ranks (.csv or JSON
            lines with arrival_s,input_tokens,output_tokens, or another of the trace formats).
        trace_format: format of the trace; default: the one that has its columns.
    """
    served = requests is not None or RUNNING.get().params["rate"] is not None
    if not served:
        refuse_given(REQUESTED, "with `requests` or `rate`")
    how: dict[str, Any] = {"barriers": barriers, "orders": orders, "staged": staged}
    if served:
        refuse_given(TRACED, "without `requests` and `rate`")
        _serve(plan, profile, requests, trace_format, request(), how, as_json)
        return
    from aurora.advisor.sharing import apart_seconds
    from aurora.planner.choice import with_micro_batches
    from aurora.planner.options import with_preemption, with_priorities
    from aurora.planner.scenarios.scenario import rows_estimated
    from aurora.reports.advice import sharing_line
    from aurora.reports.json_objects import models_json, summary_json
    from aurora.reports.trace_tables import models_table, summary_table
    from aurora.reports.trace_times import summarise

    loaded = with_priorities(load_plan(plan), instead.priorities)
    others = {"interleave": interleave, "orders": orders, "barriers": barriers, "staged": "on"}
    chosen = [f"{name}-{value}" for name, value in others.items() if is_given(name)]
    chosen += [f"micro-batches-{instead.micro_batches}"] if is_given("micro_batches") else []
    chosen += ["-".join(("priority", *instead.priorities))] if instead.priorities else []
    target = output or plan.with_suffix("".join(f".{part}" for part in [*chosen, "predicted.npz"]))
    check_output(output=target)
    traffic = profiles_of(loaded, plan, profile)
    if is_given("micro_batches"):
        check_traffic(loaded, traffic)
        loaded = with_micro_batches(loaded, traffic, instead.micro_batches)
    loaded = with_preemption(loaded, traffic)
    predicted = aurora.simulate(loaded, traffic, interleave=interleave, **how)
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
        | summary_json(summary)
        | {"models": models_json(summary)},
        summary_table(summary, most=None if layers else WORST, from_counts=estimated),
        models_table(summary),
        None if apart is None else sharing_line(summary, apart),
        without_proof(loaded, traffic) or None,
        f"wrote {target}",
    )


def _serve(
    path: Path,
    profile: list[Path] | None,
    trace: Path | None,
    trace_format: str | None,
    options: RequestOptions,
    how: dict[str, Any],
    as_json: bool,
) -> None:
    """Shows how requests are served under the plan, and under the engine's default."""
    from aurora.advisor.recommend import engine_default
    from aurora.errors import InfeasiblePlan
    from aurora.reports.json_objects import served_requests_json
    from aurora.reports.trace_tables import request_lines, requests_table

    if trace is not None:
        refuse_given(DRAWN, "without `requests`")
    else:
        refuse_given(("trace_format",), "with `requests`")
    plan = load_plan(path)
    profiles = profiles_of(plan, path, profile)
    check_traffic(plan, profiles)
    requests = None if trace is None else load_requests(trace, trace_format)
    plans, missing = {"plan": plan}, None
    if len(plan.models) == 1:
        try:
            plans["default"] = engine_default(plan.cluster, profiles[0])
        except InfeasiblePlan as error:
            missing = f"default: {error}"
    simulated = {}
    for name, candidate in plans.items():
        with progress_bars() as progress:
            chosen = options if name == "plan" else replace(options, dispatch=RequestOptions.dispatch, ttft_s=None)
            simulated[name] = aurora.simulate_requests(candidate, profiles[0], requests, chosen, progress=progress, **how)
    show(
        as_json,
        served_requests_json(simulated, ("plan", "default")),
        requests_table(simulated),
        missing,
        *request_lines(simulated),
        without_proof(plan, profiles) or None,
    )
