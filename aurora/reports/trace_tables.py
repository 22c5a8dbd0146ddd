"""Tables and lines on what was simulated or measured: traces, comparisons, training through failures, workers, control."""

from rich.table import Column, Table

from aurora.reports.compare import CaseErrors, Comparison
from aurora.reports.formatting import DASH, Row, add_worst, percent, right, seconds, size
from aurora.reports.plan_tables import estimated
from aurora.reports.request_tables import percentiles
from aurora.reports.trace_times import Summary
from aurora.types import Cluster, ControlReport


def summary_table(
    summary: Summary, bounded: bool = True, most: int | None = None, between_s: tuple[float, float] | None = None
) -> Table:
    """Returns a table of the time of each layer, of the busiest port in its exchanges, and that a rank waits, the mean.

    Args:
        summary: the summary of a trace.
        bounded: whether to show fluid bounds and gaps, which hold only if the run's ports had the cluster's rates.
        most: number of layers to show, the slowest; None: all.
        between_s: the seconds between which those of the trace lie, where they are estimated from counts alone.
    """
    spent = ", ".join(f"{phase} {seconds(value)}" for phase, value in summary.phases.items() if value)
    caption = f"a rank's time, the mean: {spent}; utilisation {percent(summary.utilisation)}"
    if bounded:
        caption += f", busiest ports {percent(summary.exchange_gap)} above the fluid bound"
    table = Table(
        Column("model", overflow="fold"),  # ends with the number of the micro-batch
        *right("layer", "time", "dispatch", "combine", "waiting", *(("fluid bound", "gap") if bounded else ())),
        title=f"{summary.kind}: {seconds(summary.seconds)}{estimated(between_s)}",
        caption=caption,
    )
    rows: list[Row] = []
    for row in summary.layers:
        cells = [seconds(value) for value in (row.seconds, row.dispatch_s, row.combine_s, row.waiting_s)]
        bounds = (seconds(row.bound_s), percent(row.gap)) if bounded else ()
        rows.append((row.seconds, (row.model, str(row.layer), *cells, *bounds)))
    return add_worst(table, rows, most)


def models_table(summary: Summary) -> Table | None:
    """Returns a table of the time, the steps and the time per output token of each model or micro-batch; None for a single one.

    Args:
        summary: the summary of a trace.
    """
    if len(summary.models) == 1:
        return None
    columns = ("steps", "time", *(f"{what} {name}" for what in ("step", "TPOT") for name in ("p50", "p99")))
    table = Table(
        Column("model", overflow="fold"),
        *right(*columns),
        caption="time: from the start of a model's first step to the end of its last; TPOT: from the end of a step to the end "
        "of the next, for which a request that generates waits",
    )
    for model in summary.models:
        times = [percentiles(each_X)[name] for each_X in (model.step_s_T, model.between_s_X) for name in ("p50", "p99")]
        cells = [DASH if value is None else seconds(value) for value in times]
        table.add_row(model.model, str(len(model.step_s_T)), seconds(model.seconds), *cells)
    table.add_row("all", "", seconds(summary.seconds), *[""] * 4)
    return table


def comparison_table(found: Comparison) -> Table:
    """Returns a table of predicted and measured seconds by phase and in all; the caption gives the errors of single cases."""
    kinds = (("network", found.network), ("compute", found.compute))
    caption = "; ".join(f"{kind}: {_case_line(errors)}" for kind, errors in kinds if errors is not None)
    if found.unmatched:
        caption += f"; {found.unmatched} cases are in only one trace"
    table = Table(
        "model",
        "phase",
        *right("predicted", "measured", "error"),
        title=f"prediction error {percent(found.error)}",
        caption=f"a rank's seconds, the mean; {caption}",
    )
    for row in found.phases:
        off = "-" if row.error is None else percent(row.error)
        table.add_row(row.model, row.phase, seconds(row.predicted_s), seconds(row.measured_s), off)
    table.add_row("whole run", "", seconds(found.predicted_s), seconds(found.measured_s), percent(found.error))
    return table


def network_line(cluster: Cluster) -> str:
    """Returns a line on a measured cluster's start-up time and rates, with which a prediction was made."""
    rates = sorted({f"{gpu.out_Bps / 1e6:.3g}" for gpu in cluster.gpus}, key=float)
    startup = seconds(cluster.gpus[0].startup_s)
    return f"predicted on the network as measured before serving: {startup} a message, {'/'.join(rates)} MB/s"


def _case_line(errors: CaseErrors) -> str:
    return f"median error {percent(errors.median)} of {errors.cases} cases, worst {percent(errors.worst)} ({errors.worst_at})"


def control_line(report: ControlReport) -> str:
    """Returns a line on what a control loop saw and decided."""
    counts = ", ".join(f"{kind} {count}" for kind, count in sorted(report.decisions.items(), key=lambda each: -each[1]))
    parts = [f"{report.model}: {'dry run, ' if report.dry_run else ''}{report.windows} windows; decisions: {counts or 'none'}"]
    if report.balancedness is not None:
        parts.append(f"balancedness {report.balancedness:.3f}, {report.expected_balancedness:.3f} expected")
    parts.append(f"placement {seconds(report.age_s)} old")
    if report.bytes:
        parts.append(f"{size(report.bytes)} {'would move' if report.dry_run else f'moved in {seconds(report.move_s)}'}")
    parts += [f"{what} {count}" for what, count in (("failures", report.failures), ("times stuck", report.stuck)) if count]
    return "; ".join(parts)


def control_table(report: ControlReport, most: int | None = None) -> Table | None:
    """Returns a table of the changes that a control loop decided on; None if there are none.

    Args:
        report: what it decided.
        most: how many changes to show, the newest ones; None: all that are kept.
    """
    shown = report.changes[-(most or len(report.changes)) :]
    if not shown:
        return None
    left = sum(report.decisions.get(kind, 0) for kind in ("gain", "slower")) - len(shown)
    table = Table(
        *right("at"),
        "action",
        "reason",
        *right("layers", "moves", "bytes", "in force after"),
        title=f"{report.model}: changes of the placement",
        caption=f"{left} earlier ones are not shown" if left else None,
    )
    for each in shown:
        done = DASH if each.took_s is None else seconds(each.took_s)
        many = str(len(each.layers)), str(each.moves), size(each.bytes)
        table.add_row(f"{each.at_s:.1f} s", each.action, each.reason, *many, done)
    return table
