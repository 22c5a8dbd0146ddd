"""Tables and lines on simulated and measured runs: traces, comparisons, requests, control, workers."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from aurora.reports.formatting import percent, seconds, speedup
from aurora.reports.plan_tables import estimated
from aurora.reports.tables import Columns, Table, text
from aurora.reports.trace_times import CaseErrors, Comparison, Summary
from aurora.types import Cluster
from aurora.types.arrays import FloatArray
from aurora.types.requests import RequestSimulation

PERCENTILES = (50, 90, 99)


def percentiles(seconds_X: FloatArray | Sequence[float]) -> dict[str, float | None]:
    """Returns {name: percentile of the seconds}, with names such as "p99"; values are None if there are no seconds.

    Args:
        seconds_X: (X,) float64.
    """
    values = np.percentile(seconds_X, PERCENTILES).tolist() if len(seconds_X) else [None] * len(PERCENTILES)
    return {f"p{percentile}": value for percentile, value in zip(PERCENTILES, values, strict=True)}


def requests_table(simulations: Mapping[str, RequestSimulation]) -> Table:
    """Returns a table of simulations of the same requests: a column for each, one for even ranks, and a speed-up.

    Args:
        simulations: {"plan" or "default": its simulation}, first the one whose speed-up over the other is shown.
    """
    first = next(iter(simulations.values()))
    requests = first.served.requests
    inputs, outputs = (int(tokens_Q.sum()) for tokens_Q in (requests.input_tokens_Q, requests.output_tokens_Q))
    served = [*(simulation.served for simulation in simulations.values()), first.even]
    both = len(simulations) == 2
    title = f"{len(requests)} requests in {seconds(float(requests.arrival_s_Q[-1]))}: {inputs} tokens in, {outputs} out"
    caption = (
        "output tokens/s: from the first arrival to the last token; TTFT: time to first token; TPOT: time per "
        "output token after it; percentiles of requests; busiest rank: its tokens in a step over the mean of the ranks, mean "
        "and p99 of the time; even ranks: under the plan, if ranks shared every step's tokens evenly"
    )
    rows: list[tuple[str | None, ...]] = []

    def add(name: str, cells: Iterable[str | None], gain: str | None = "") -> None:
        rows.append((name, *cells, *([gain] if both else [])))

    rates = [run.tokens_per_s for run in served]
    add("output tokens/s", (f"{rate:,.3g}" if rate < 100 else f"{rate:,.0f}" for rate in rates), speedup(*rates[:2]))
    ttfts, tpots = ([percentiles(run.ttft_s_Q) for run in served], [percentiles(run.tpot_s_X) for run in served])
    for metric, times in (("TTFT", ttfts), ("TPOT", tpots)):
        for name in times[0]:
            after, before, *_ = values = [quantiles[name] for quantiles in times]
            gain = None if after is None or before is None else speedup(before, after)
            add(f"{metric} {name}", (None if value is None else seconds(value) for value in values), gain)
    add("busiest rank", (f"{run.busiest:.2f}, {run.busiest_p99:.2f}" for run in served))
    add("steps", (str(run.steps) for run in served))
    if requests.blocks_Q:
        add("in prefix cache", (percent(run.cached_tokens / inputs) for run in served))
    heads = (*simulations, "even ranks", *(["speed-up"] if both else []))
    return Table({"": text, **dict.fromkeys(heads, str)}, rows, title, caption)


def request_lines(simulations: Mapping[str, RequestSimulation]) -> Sequence[str]:
    """Returns sentences on simulations of the same requests: growing queues, the error of interpolated steps, and assumptions.

    Args:
        found: {name of the plan or engine default: its simulation}.
    """
    source = next(iter(simulations.values())).served.requests.source
    lines = [f"Requests read as {source}."] if source else []
    for name, simulation in simulations.items():
        if simulation.served.queue_grows:
            waiting = (simulation.served.waiting(*part) for part in ((0.25, 0.5), (0.75, 1.0)))
            before, after = (f"{value:.0f}" for value in waiting)
            lines.append(
                f"{name}: overloaded. The queue grows, from {before} requests without a first token in the second quarter of "
                f"the arrivals to {after} in the last: TTFT depends on how long requests go on arriving."
            )
    for name, simulation in simulations.items():
        if len(simulation.off_C):
            off = np.abs(simulation.off_C)
            lines.append(
                f"{name}: steps are interpolated between {simulation.points} simulated ones; of {len(off)} drawn steps the "
                f"error is {percent(float(np.median(off)))} in the median, {percent(float(off.max()))} at most."
            )
    return [*lines, *next(iter(simulations.values())).assumptions]


def p50_p99(*times: FloatArray | Sequence[float]) -> list[float | None]:
    """Returns the median and the 99th percentile of each kind of seconds; None of those without any."""
    return [percentiles(seconds_X)[name] for seconds_X in times for name in ("p50", "p99")]


def summary_table(summary: Summary, most: int | None = None, from_counts: bool = False) -> Table:
    """Returns a table with one row per layer: its seconds, exchange seconds of the busiest port, and mean waiting of a rank.

    Args:
        summary: the summary of a trace.
        most: number of layers to show, the slowest; None: all.
        from_counts: whether the run's seconds are estimated from counts.
    """
    spent = ", ".join(f"{phase} {seconds(value)}" for phase, value in summary.phases.items() if value)
    caption = f"a rank's time, the mean: {spent}; utilisation {percent(summary.utilisation)}"
    columns: Columns = {"model": text, "layer": str, **dict.fromkeys(("time", "dispatch", "combine", "waiting"), seconds)}
    if summary.kind == "predicted":  # a run's ports may have other rates than the cluster's
        caption += f", busiest ports {percent(summary.exchange_gap)} above the fluid bound"
        together = sum(model.seconds for model in summary.models) > summary.seconds * (1 + 1e-9)
        caption += "; gaps count the time in which another model has the port" if together else ""
        columns = {**columns, "fluid bound": seconds, "gap": percent}
    caption += "; dispatch and combine: of the busiest port; ranks may be in several layers at once"
    rows = [
        (row.model, row.layer, row.seconds, row.dispatch_s, row.combine_s, row.waiting_s, row.bound_s, row.gap)[: len(columns)]
        for row in summary.layers
    ]
    title = f"{summary.kind}: {seconds(summary.seconds)}{estimated(from_counts)}"
    return Table(columns, rows, title, caption).worst(most, lambda row: row[2])


def models_table(summary: Summary) -> Table | None:
    """Returns a table of seconds, steps and TPOT of each model or micro-batch; None if there is only one.

    Args:
        summary: the summary of a trace.
    """
    if len(summary.models) == 1:
        return None
    rows: list[tuple[Any, ...]] = [
        (part.model, len(part.step_s_T), part.seconds, *p50_p99(part.step_s_T, part.between_s_X)) for part in summary.models
    ]
    times = ("time", "step p50", "step p99", "TPOT p50", "TPOT p99")
    caption = (
        "time: from the start of a model's first step to the end of its last; TPOT: from the end of a step to the end "
        "of the next, for which a request that generates waits"
    )
    rows.append(("all", None, summary.seconds, *[None] * 4))
    return Table({"model": text, "steps": str, **dict.fromkeys(times, seconds)}, rows, caption=caption)


def comparison_table(comparison: Comparison) -> Table:
    """Returns a table of predicted and measured seconds, by phase and in total; its caption has the errors of single cases."""
    kinds = (("network", comparison.network), ("compute", comparison.compute))
    caption = "; ".join(f"{kind}: {_case_line(errors)}" for kind, errors in kinds if errors is not None)
    if comparison.unmatched:
        caption += f"; {comparison.unmatched} cases are in only one trace"
    rows = [(row.model, row.phase, row.predicted_s, row.measured_s, row.error) for row in comparison.phases]
    return Table(
        {"model": text, "phase": text, "predicted": seconds, "measured": seconds, "error": percent},
        [*rows, ("whole run", "", comparison.predicted_s, comparison.measured_s, comparison.error)],
        f"prediction error {percent(comparison.error)}",
        f"a rank's seconds, the mean; {caption}",
    )


def network_line(cluster: Cluster) -> str:
    """Returns a line on the measured start-up time and rates of the cluster for which a prediction was made."""
    rates = sorted({f"{gpu.out_Bps / 1e6:.3g}" for gpu in cluster.gpus}, key=float)
    startup = seconds(cluster.gpus[0].startup_s)
    return f"predicted on the network as measured before serving: {startup} a message, {'/'.join(rates)} MB/s"


def _case_line(errors: CaseErrors) -> str:
    return f"median error {percent(errors.median)} of {errors.cases} cases, worst {percent(errors.worst)} ({errors.worst_at})"
