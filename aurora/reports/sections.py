"""Sections of a report's page: charts and tables of traffic, times, placement and decisions."""

from collections.abc import Mapping, Sequence

import numpy as np

from aurora.reports.chart_data import Chart, Frame, Section, Selector, Sheet, sheet, ticks
from aurora.reports.formatting import percent, seconds
from aurora.reports.numbers import ReportNumbers, relative_loads
from aurora.reports.plan_tables import plan_table
from aurora.reports.spans import TransferSpans, interval_colouring
from aurora.reports.trace_tables import comparison_table, summary_table
from aurora.reports.trace_times import COMPUTE_INDICES, EXCHANGES, TIMED_PHASES, Bars
from aurora.types.arrays import FloatArray, IntArray

SIDES = ("before", "after")
EXPERT_SCALE = 0.01  # of a layer's mean: what one step of a packed load stands for


def experts_section(report: ReportNumbers) -> Section:
    """Returns the section with heat maps over all layers: load of each expert, and of each GPU without and with the plan."""
    text = (
        "The first map shows the tokens of each expert in every layer. The other two show the time of each GPU for the "
        "dispatch and its experts: with experts in index order, and as planned. Colours show the load relative"
        " to the mean of the layer. A balanced layer has one colour."
    )
    if not report.traffic_M:
        return Section("experts", "Load per expert and GPU", text, missing=report.of.without)
    frames, rows = [], []
    for model, flows, profile in zip(report.of.models, report.traffic_M, report.of.profiles, strict=False):
        parts = relative_loads(flows, profile)
        most_L, before_L, after_L = (part_LX.max(axis=1) for part_LX in parts)
        words = (
            f"{model}: the hottest expert has {most_L.max():.2f} times its layer's mean; the busiest GPU "
            f"{before_L.max():.2f} times before, {after_L.max():.2f} times after."
        )
        columns = {
            name: np.rint(part_LX.T.ravel() / EXPERT_SCALE).astype(np.int64)
            for name, part_LX in zip(("experts", *SIDES), parts, strict=True)
        }
        columns["rows"] = np.array([part_LX.shape[1] for part_LX in parts])
        frames.append(Frame(words, columns, scale=EXPERT_SCALE))
        for layer in range(profile.layers):
            cells = [(str(part_LX[layer].argmax()), f"{part_LX[layer].max():.2f}") for part_LX in parts]
            rows.append((model, str(layer), *(cell for pair in cells for cell in pair)))
    heads = ("model", "layer", "hottest expert", "times", "busiest GPU before", "times", "busiest GPU after", "times")
    maps = [["Tokens of experts", "experts", "expert", "layer"]]
    maps += [["GPUs before: index order", "before", "GPU", "layer"], ["GPUs after: as planned", "after", "GPU", "layer"]]
    about = {"maps": maps, "relative": True, "square": False}
    tables = (Sheet("Largest loads by layer, relative to the mean", heads, tuple(rows)),)
    models = Selector("model", report.of.models)
    chart = Chart("expert-map", "heat", "Load by expert and layer", (models,), frames, about, tables)
    return Section("experts", "Load per expert and GPU", text, (chart,))


def traffic_section(report: ReportNumbers) -> Section:
    """Returns the section with heat maps of every layer's dispatch."""
    text = (
        "The maps show the tokens from each GPU (rows) to each GPU (columns) in the dispatch of one layer, over the whole "
        "profile: with experts in index order, and as planned. Tokens that stay on their GPU are left out. The"
        " bars beside the maps show all tokens that a port sends or receives."
    )
    if not report.traffic_M:
        return Section("traffic", "Traffic before and after", text, missing=report.of.without)
    frames, rows = [], []
    for model, flows in zip(report.of.models, report.traffic_M, strict=True):
        layers = []
        for layer in range(flows.tokens_BLGG.shape[1]):
            sides_BGG = flows.tokens_BLGG[:, layer]
            columns: dict[str, IntArray] = {"rows": np.array([len(report.of.gpus)] * 2)}
            for side, tokens_GG in zip(SIDES, sides_BGG, strict=True):
                columns |= {side: tokens_GG.ravel(), f"{side}-out": tokens_GG.sum(axis=1), f"{side}-in": tokens_GG.sum(axis=0)}
            tops = [_busiest(flows.port_s_BLG[side, layer]) for side in (0, 1)]
            travel = [str(int(tokens_GG.sum())) for tokens_GG in sides_BGG]
            words = (
                f"{model}, layer {layer}. Busiest port before: {tops[0]}; after: {tops[1]}. "
                f"Tokens that travel: {travel[0]} before, {travel[1]} after."
            )
            layers.append(Frame(words, columns, scale=float(flows.row_bytes)))
            rows.append((model, str(layer), *travel, *tops))
        frames.append(layers)
    heads = ("model", "layer", "tokens before", "tokens after", "busiest port before", "busiest port after")
    choices = Selector("model", report.of.models), Selector("layer")
    tables = (Sheet("Traffic by layer", heads, tuple(rows)),)
    maps = [["Before: experts in index order", "before", "GPU", "GPU"], ["After: as planned", "after", "GPU", "GPU"]]
    about = {"maps": maps, "relative": False, "square": True}
    chart = Chart("traffic-map", "heat", "Tokens between GPUs", choices, frames, about, tables)
    return Section("traffic", "Traffic before and after", text, (chart,))


def loads_section(report: ReportNumbers) -> Section:
    """Returns the section on the busiest port and the slowest GPU of each layer, beside their bounds."""
    text = (
        "The charts show the time of each layer's busiest port and of its slowest GPU's experts, for the whole profile. No "
        "order of the dispatch is faster than its bound, no placement makes the slowest GPU's experts faster than theirs."
    )
    if not report.traffic_M:
        return Section("loads", "Loads by layer", text, missing=report.of.without)
    ports_M, experts_M = [], []
    for flows, planned_LW in zip(report.traffic_M, report.planned_MLW, strict=True):
        ordered_L, bound_L = (np.array([getattr(there, name) for there, _ in planned_LW]) for name in ("seconds", "bound_s"))
        ports_M.append(_sides(flows.port_s_BLG) | {"after, in the planned order": ordered_L, "bound of any order": bound_L})
        experts_M.append(_sides(flows.expert_s_BLG) | {"bound of any placement": flows.expert_bound_s_L})
    ports = _by_layer(report, "port-loads", "Busiest port: seconds of the dispatch", ports_M)
    experts = _by_layer(report, "expert-loads", "Slowest GPU: seconds of its experts", experts_M)
    return Section("loads", "Loads by layer", text, (ports, experts))


def _sides(load_BLG: FloatArray) -> dict[str, FloatArray]:
    """The largest load of each layer, before and after."""
    return dict(zip(SIDES, load_BLG.max(axis=2), strict=True))


def _by_layer(numbers: ReportNumbers, name: str, title: str, seconds_ML: Sequence[Mapping[str, FloatArray]]) -> Chart:
    """A chart of every layer's seconds, given by model and label."""
    frames, rows = [], []
    for model, seconds_L in zip(numbers.of.models, seconds_ML, strict=True):
        sums = "; ".join(f"{label} {seconds(float(value_L.sum()))}" for label, value_L in seconds_L.items())
        frames.append(Frame(f"{model}, all layers: {sums}.", seconds_L))
        rows += [(model, str(layer), *map(seconds, row)) for layer, row in enumerate(zip(*seconds_L.values(), strict=True))]
    labels, models = list(seconds_ML[0]), Selector("model", numbers.of.models)
    about = {"axis": "layer", "names": None, "series": [[label, label] for label in labels], "unit": "s"}
    table = Sheet(title, ("model", "layer", *labels), tuple(rows))
    return Chart(name, "bars", title, (models,), frames, about, (table,))


def _busiest(load_G: FloatArray) -> str:
    return f"GPU {int(load_G.argmax())}, {seconds(float(load_G.max()))}"


MOST_BARS = 60_000
EXCHANGE_BITS, TIMELINE_BITS = 16, 26


def schedule_section(report: ReportNumbers) -> Section:
    """Returns the section on each port's transfers in the plan's orders, over the whole profile."""
    text = (
        "The chart shows the transfers of one all-to-all over time, as planned for the whole profile. Colours and numbers name "
        "the other end of a transfer."
    )
    own_table, gpus = sheet(plan_table(report.of.plan, explain=True)), report.of.gpus
    if not report.planned_MLW:
        return Section("schedule", "Schedule", text, sheets=(own_table,), missing=report.of.without)
    frames: list[list[list[Frame]]] = []
    rows = []
    for model, planned_LW in zip(report.of.models, report.planned_MLW, strict=True):
        frames.append([])
        for layer, planned_W in enumerate(planned_LW):
            frames[-1].append([])
            for phase, transfers in zip(EXCHANGES, planned_W, strict=True):
                took, busiest, bound = map(seconds, (transfers.seconds, transfers.busiest_s, transfers.bound_s))
                words = f"{model}, layer {layer}, {phase}: {took} from start to end, busiest port {busiest}, bound {bound}."
                frames[-1][-1].append(_gantt(words, transfers, len(gpus)))
                rows.append((model, str(layer), phase, took, busiest, bound, str(len(transfers.src_X))))
    choices = Selector("model", report.of.models), Selector("layer"), Selector("phase", EXCHANGES)
    about = {"track": "GPU", "names": list(gpus), "views": ["sends", "receives"], "fields": [], **_machine(report, 1)}
    heads = ("model", "layer", "phase", "start to end", "busiest port", "bound", "transfers")
    tables = (Sheet("All-to-alls", heads, tuple(rows)), own_table)
    chart = Chart("gantt", "spans", "Transfers by port", choices, frames, about, tables)
    return Section("schedule", "Schedule", text, (chart,))


def _gantt(words: str, transfers: TransferSpans, gpus: int) -> Frame:
    columns, tick_s = ticks(transfers.start_s_X, transfers.end_s_X, EXCHANGE_BITS)
    for view, track_X in enumerate((transfers.src_X, transfers.dst_X)):
        columns |= _tracks(view, track_X, transfers.start_s_X, transfers.end_s_X, gpus)
    return Frame(words, {**columns, "bytes": transfers.bytes_X.astype(np.float32)}, scale=tick_s)


def timeline_section(report: ReportNumbers) -> Section:
    """Returns the section with timelines of each rank's compute and exchanges: one view per trace, measured traces first."""
    title = "Interleaving" if len(report.of.traced) > 1 else "Timeline"
    text = "The chart shows when each rank computes, exchanges and waits. A bar is a part of one phase of one layer."
    if not report.of.traces:
        missing = "Give traces: aurora simulate PLAN writes a predicted trace, aurora run PLAN a measured one."
        return Section("timeline", title, text, missing=missing)
    frames = []
    most = MOST_BARS // len(report.bars)
    runs = sorted(zip(report.of.traces, report.bars, report.summaries, strict=True), key=lambda run: run[2].kind != "measured")
    for (name, trace), whole, summary in runs:
        shown = whole.first_steps(most)
        steps, of = int(shown.step_X.max()) + 1, int(whole.step_X.max()) + 1
        words = f"{name} ({trace.kind}): {seconds(summary.seconds)}, utilisation {percent(summary.utilisation)}; " + (
            f"all steps, {of}." if steps == of else f"steps 0 to {steps - 1} of {of}."
        )
        frames.append(_ranks(words, shown, len(report.of.gpus)))
    names = [f"{rank} {part}" for rank in report.of.gpus for part in ("computes", "network")]
    fields = [["model", list(report.of.traced)], ["step", None], ["layer", None], ["phase", list(TIMED_PHASES)]]
    about = {"track": "rank", "names": names, "views": [], "fields": fields, "legend": _legend(report)}
    about |= _machine(report, 2)
    tables = *phase_sheets(report), *(sheet(summary_table(summary)) for summary in report.summaries)
    traces = Selector("trace", tuple(name for (name, _), _, _ in runs))
    chart = Chart("timeline-chart", "spans", "Ranks over time", (traces,), frames, about, tables)
    return Section("timeline", title, text, (chart,))


def _machine(numbers: ReportNumbers, tracks: int) -> dict[str, list[int]]:
    """The rank of each track, of which every rank has `tracks`, and the node of each rank."""
    cluster = numbers.of.plan.cluster
    return {"ranks": np.repeat(range(len(cluster)), tracks).tolist(), "nodes": [gpu.node for gpu in cluster.gpus]}


def _legend(numbers: ReportNumbers) -> list[list[object]]:
    """Legend entries: each model's name without a colour, followed by its phases with theirs."""
    entries: list[list[object]] = []
    for number, model in enumerate(numbers.of.traced):
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


def phase_sheets(report: ReportNumbers) -> tuple[Sheet, ...]:
    """Returns tables of a rank's seconds by phase and trace and, if both exist, of prediction against measurement."""
    heads = ("phase", *(name for name, _ in report.of.traces))
    rows = [(phase, *(seconds(summary.phases[phase]) for summary in report.summaries)) for phase in TIMED_PHASES]
    rows.append(("start to end", *(seconds(summary.seconds) for summary in report.summaries)))
    means = Sheet(
        "Seconds by phase, the mean over ranks", heads, tuple(rows), "Phases overlap where several models share a rank."
    )
    return (means,) if report.comparison is None else (means, sheet(comparison_table(report.comparison)))


def placement_section(report: ReportNumbers) -> Section:
    """Returns the section on the experts of each GPU; with replicas, also on replica counts and survival of GPU failures."""
    plan = report.of.plan
    rows = []
    for name, model in zip(report.of.models, plan.models, strict=True):
        for layer, slots in enumerate(model.placement.slots_LG):
            shares = (None,) * len(slots) if model.placement.split_LG is None else model.placement.split_LG[layer]
            held_G = zip(report.of.gpus, slots, shares, strict=True)
            rows.append((name, str(layer), "; ".join(f"GPU {gpu}: {_held(experts, share)}" for gpu, experts, share in held_G)))
    table = Sheet(
        "Experts by GPU",
        ("model", "layer", "experts of each GPU"),
        tuple(rows),
        "Part of an expert's load in brackets." if any(m.placement.split_LG for m in plan.models) else "",
    )
    copies_M = [report.copies_LE(number) for number in range(len(plan.models))]
    if not any((copies_LE > 1).any() for copies_LE in copies_M):
        return Section(
            "placement", "Placement", "The table shows where the plan puts experts. None has replicas.", sheets=(table,)
        )
    fewest = []
    for name, copies_LE in zip(report.of.models, copies_M, strict=True):
        for layer, copies_E in enumerate(copies_LE):
            few, rarest = int(copies_E.min()), int((copies_E == copies_E.min()).sum())
            fewest.append((name, str(layer), str(copies_E.sum()), str(few), str(rarest), str(few - 1)))
    heads = ("model", "layer", "slots", "fewest copies", "experts with so few", "GPUs that may be lost, whichever")
    text = (
        "The tables show where the plan puts experts and their replicas. If the rarest expert of a layer has N copies, the "
        "layer survives the loss of any N - 1 GPUs."
    )
    survival = Sheet("Copies and survival", heads, tuple(fewest))
    return Section("placement", "Replicas and survival", text, sheets=(survival, table))


def _held(experts: tuple[int, ...], share: tuple[float, ...] | None) -> str:
    if share is None:
        return " ".join(map(str, experts)) or "none"
    return " ".join(f"{e}" if part == 1 else f"{e} ({part:.0%})" for e, part in zip(experts, share, strict=True)) or "none"
