"""Times as charts: all-to-alls port by port, and ranks over a whole run."""

from collections.abc import Iterator, Sequence

import numpy as np

from aurora.reports.charts import Chart, Frame, Section, Selector, Sheet, sheet, ticks
from aurora.reports.formatting import percent, seconds
from aurora.reports.numbers import ReportNumbers
from aurora.reports.plan_tables import plan_table
from aurora.reports.spans import TransferSpans, interval_colouring, traced
from aurora.reports.trace_tables import comparison_table, summary_table
from aurora.reports.trace_times import COMPUTE_INDICES, TIMED_PHASES, Bars
from aurora.types.arrays import FloatArray, IntArray

MOST_TRANSFERS = 600_000  # that a page holds; what is planned comes first
MOST_BARS = 60_000
EXCHANGE_BITS, TIMELINE_BITS = 16, 26
WAYS = ("dispatch", "combine")


def schedule_section(found: ReportNumbers) -> Section:
    """Returns the section on the transfers of each port: for the whole profile as planned, and for each trace's first step."""
    text = "The transfers of one all-to-all by time. Colours and numbers in the bars tell the other end of a transfer."
    gpus = found.of.gpus
    shown: dict[str, list[list[list[Frame]]]] = {}
    rows, left = [], MOST_TRANSFERS
    for source, all_MLW in _sources(found):
        many = sum(len(one.src_X) for of_LW in all_MLW for of_W in of_LW for one in of_W)
        if many > left and shown:
            text += f" Left out for its size: {source}."
            continue
        left -= many
        shown[source] = []
        for model, of_LW in zip(found.of.models, all_MLW, strict=True):
            shown[source].append([])
            for layer, of_W in enumerate(of_LW):
                cells_W = [tuple(map(seconds, (one.seconds, one.busiest_s, one.bound_s))) for one in of_W]
                words = [
                    f"{model}, layer {layer}, {way}: {a} from start to end, {b} of the busiest port, its bound {c}."
                    for way, (a, b, c) in zip(WAYS, cells_W, strict=True)
                ]
                shown[source][-1].append([_gantt(each, one, len(gpus)) for each, one in zip(words, of_W, strict=True)])
                rows += [
                    (source, model, str(layer), way, *cells, str(len(one.src_X)))
                    for way, cells, one in zip(WAYS, cells_W, of_W, strict=True)
                ]
    own_table = sheet(plan_table(found.of.plan))
    if not shown:
        return Section("schedule", "Schedule", text, sheets=(own_table,), missing=found.of.without + " Or give a trace.")
    choices = Selector("source", tuple(shown)), Selector("model", found.of.models), Selector("layer"), Selector("phase", WAYS)
    about = {"track": "GPU", "names": list(gpus), "views": ["sends", "receives"], "fields": [], **_machine(found, 1)}
    heads = ("source", "model", "layer", "phase", "start to end", "busiest port", "bound", "transfers")
    tables = (Sheet("All-to-alls", heads, tuple(rows)), own_table)
    chart = Chart("gantt", "spans", "Transfers by port", choices, list(shown.values()), about, tables)
    return Section("schedule", "Schedule", text, (chart,))


def _sources(found: ReportNumbers) -> Iterator[tuple[str, Sequence[Sequence[Sequence[TransferSpans]]]]]:
    """Transfers to show: by source name, then by model, layer and phase."""
    plan = found.of.plan
    if found.planned_MLW:
        yield "as planned, the whole profile", found.planned_MLW
    for name, trace in found.of.traces:
        yield (
            f"{name}, step 0" + (f" of {trace.names_M[0]}" if len(trace.names_M) > len(plan.models) else ""),
            [
                [[traced(trace, number, 0, layer, way, plan.cluster) for way in WAYS] for layer in range(len(model.dispatch_L))]
                for number, model in enumerate(plan.models)
            ],
        )


def _gantt(words: str, transfers: TransferSpans, gpus: int) -> Frame:
    columns, tick_s = ticks(transfers.start_s_X, transfers.end_s_X, EXCHANGE_BITS)
    for view, track_X in enumerate((transfers.src_X, transfers.dst_X)):
        columns |= _tracks(view, track_X, transfers.start_s_X, transfers.end_s_X, gpus)
    return Frame(words, {**columns, "bytes": transfers.bytes_X.astype(np.float32)}, scale=tick_s)


def timeline_section(found: ReportNumbers) -> Section:
    """Returns the section on what every rank computes and exchanges, one view per trace, measured ones first."""
    title = "Interleaving" if len(found.of.traced) > 1 else "Timeline"
    text = "What every rank computes and exchanges, and when it waits; a bar is a piece of one phase of one layer."
    if not found.of.traces:
        missing = "Give traces: aurora simulate PLAN writes a predicted one, aurora run PLAN a measured one."
        return Section("timeline", title, text, missing=missing)
    frames = []
    most = MOST_BARS // len(found.bars)
    runs = sorted(zip(found.of.traces, found.bars, found.summaries, strict=True), key=lambda run: run[2].kind != "measured")
    for (name, trace), whole, summary in runs:
        shown = whole.first_steps(most)
        steps, of = int(shown.step_X.max()) + 1, int(whole.step_X.max()) + 1
        words = f"{name} ({trace.kind}): {seconds(summary.seconds)}, utilisation {percent(summary.utilisation)}; " + (
            f"all steps, {of}." if steps == of else f"steps 0 to {steps - 1} of {of}."
        )
        frames.append(_ranks(words, shown, len(found.of.gpus)))
    names = [f"{rank} {what}" for rank in found.of.gpus for what in ("computes", "network")]
    fields = [["model", list(found.of.traced)], ["step", None], ["layer", None], ["phase", list(TIMED_PHASES)]]
    about = {"track": "rank", "names": names, "views": [], "fields": fields, "legend": _legend(found)}
    about |= _machine(found, 2)
    tables = *phase_sheets(found), *(sheet(summary_table(summary)) for summary in found.summaries)
    traces = Selector("trace", tuple(name for (name, _), _, _ in runs))
    chart = Chart("timeline-chart", "spans", "Ranks over time", (traces,), frames, about, tables)
    return Section("timeline", title, text, (chart,))


def _machine(found: ReportNumbers, tracks: int) -> dict[str, list[int]]:
    """The rank of each track, of which every rank has `tracks`, and the node of each rank."""
    cluster = found.of.plan.cluster
    return {"ranks": np.repeat(range(len(cluster)), tracks).tolist(), "nodes": [gpu.node for gpu in cluster.gpus]}


def _legend(found: ReportNumbers) -> list[list[object]]:
    """Legend entries: each model's name without a colour, followed by its phases with theirs."""
    entries: list[list[object]] = []
    for number, model in enumerate(found.of.traced):
        entries += [[model, None], *([phase, number * len(TIMED_PHASES) + i] for i, phase in enumerate(TIMED_PHASES))]
    return entries


def _ranks(words: str, shown: Bars, ranks: int) -> Frame:
    columns, tick_s = ticks(shown.start_s_X, shown.end_s_X, TIMELINE_BITS)
    track_X = shown.rank_X * 2 + ~np.isin(shown.phase_X, COMPUTE_INDICES)
    columns |= _tracks(0, track_X, shown.start_s_X, shown.end_s_X, ranks * 2)
    columns |= {"hue": shown.model_X * len(TIMED_PHASES) + shown.phase_X, "bytes": shown.bytes_X.astype(np.float32)}
    columns |= {"field0": shown.model_X, "field1": shown.step_X, "field2": shown.layer_X, "field3": shown.phase_X}
    return Frame(words, columns, scale=tick_s)


def _tracks(view: int, track_X: IntArray, start_s_X: FloatArray, end_s_X: FloatArray, tracks: int) -> dict[str, IntArray]:
    """The columns of a view: each interval's track, its level there, and how many levels each track has."""
    level_X = interval_colouring(track_X, start_s_X, end_s_X)
    depth = np.ones(tracks, dtype=np.int64)
    np.maximum.at(depth, track_X, level_X + 1)
    return {f"track{view}": track_X, f"level{view}": level_X, f"depth{view}": depth}


def phase_sheets(found: ReportNumbers) -> tuple[Sheet, ...]:
    """Returns the tables of a rank's seconds by phase and trace, and of prediction against measurement if there are both."""
    heads = ("phase", *(name for name, _ in found.of.traces))
    rows = [(phase, *(seconds(summary.phases[phase]) for summary in found.summaries)) for phase in TIMED_PHASES]
    rows.append(("start to end", *(seconds(summary.seconds) for summary in found.summaries)))
    means = Sheet("Seconds by phase, the mean over ranks", heads, tuple(rows), "Phases of different models may overlap.")
    return (means,) if found.comparison is None else (means, sheet(comparison_table(found.comparison)))
