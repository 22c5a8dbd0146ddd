"""Sections of a report's page: figures and tables of traffic, times and placement."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from aurora.reports.figures import Figure, View, grouped_bars, heat_map, spans, views_of
from aurora.reports.formatting import percent, seconds
from aurora.reports.numbers import ReportNumbers, relative_loads
from aurora.reports.plan_tables import plan_table
from aurora.reports.spans import TransferSpans, interval_colouring
from aurora.reports.tables import Columns, Table, text
from aurora.reports.trace_tables import comparison_table, summary_table
from aurora.reports.trace_times import COMPUTE_INDICES, EXCHANGES, TIMED_PHASES, Bars
from aurora.types.arrays import FloatArray, IntArray

SIDES = ("before", "after")
BEFORE, AFTER = "before: experts in index order", "after: as planned"
BY_LAYER: Columns = {"model": text, "layer": str}
MOST_BARS = 60_000  # of all timelines
MOST_TRANSFERS = 40_000  # of all schedules, above which those of the busiest ports alone are drawn
MOST_CELLS = 200_000  # of maps of traffic, above which tokens are rounded to two digits
FEWEST_PORTS, FEW_PORTS = 6, 16  # that are shown at once, at least and at most
HEAT_PX = 440  # height of a heat map with many rows
TICKS, FEW_TICKS = 1 << 16, 1 << 12  # parts of the whole to which times of bars are rounded


@dataclass(frozen=True)
class Section:
    """Section of the page.

    Attributes:
        name: the section's anchor.
        title, text: heading and text above the figures.
        figures, tables: the figures and tables in it.
    """

    name: str
    title: str
    text: str
    figures: tuple[Figure, ...] = ()
    tables: tuple[Table, ...] = ()


def experts_section(report: ReportNumbers) -> Section:
    """Returns the section with heat maps over all layers: load of each expert, and of each GPU without and with the plan."""
    about = (
        "The first map shows the tokens of each expert in every layer. The other two show the time that each GPU needs to send "
        "tokens to their experts (the dispatch) and to compute its experts: with experts in index order, and as planned. "
        "Colours compare with the mean of the layer. A balanced layer has one colour."
    )
    models, profiles, gpus = report.of.models, report.of.profiles, len(report.of.gpus)
    loads_M = [relative_loads(flows, profile) for flows, profile in zip(report.traffic_M, profiles, strict=True)]
    layers, experts = (max(getattr(profile, axis) for profile in profiles) for axis in ("layers", "experts"))
    maps = [("Tokens of experts", "expert", experts), *((f"GPUs {side}", "GPU", gpus) for side in (BEFORE, AFTER))]
    height = max(min(26 * many, max(3 * many, HEAT_PX)) for _, _, many in maps)
    specs = [heat_map(title, (row, "layer"), many, layers, height, relative=True) for title, row, many in maps]
    heads = ("hottest expert", "busiest GPU before", "busiest GPU after")
    rows = [
        (name, layer, *(_largest(load_LX[layer], "{:.2f} times the mean".format) for load_LX in loads))
        for name, profile, loads in zip(models, profiles, loads_M, strict=True)
        for layer in range(profile.layers)
    ]
    views = [
        View(
            (name,),
            "; ".join(
                f"{head}: {load_LX.max():.2f} times its layer's mean" for head, load_LX in zip(heads, loads, strict=True)
            ),
            tuple({"value": load_LX.T.ravel().round(2), "across": len(load_LX)} for load_LX in loads),
        )
        for name, loads in zip(models, loads_M, strict=True)
    ]
    table = Table({**BY_LAYER, **dict.fromkeys(heads, text)}, rows, "Largest loads by layer")
    figure = Figure("expert-map", "Load by expert and layer", tuple(specs), ("model",), views, table)
    return Section("experts", "Load per expert and GPU", about, (figure,))


def traffic_section(report: ReportNumbers) -> Section:
    """Returns the section with heat maps of every layer's dispatch, and the tokens of each port."""
    about = (
        "The maps show the tokens from each GPU (rows) to each GPU (columns) in the dispatch of one layer, over the whole "
        "profile: with experts in index order, and as planned. Tokens that stay on their GPU are left out. The bars below show "
        "all tokens that a GPU's port (its network interface) sends or receives."
    )
    rows, panels, gpus = [], [], len(report.of.gpus)
    shown = _coarse if sum(flows.tokens_BLGG.size for flows in report.traffic_M) > MOST_CELLS else np.ravel
    for model, flows in zip(report.of.models, report.traffic_M, strict=True):
        for layer, sides_BGG in enumerate(flows.tokens_BLGG.swapaxes(0, 1)):
            scale = {"across": gpus, "most": int(sides_BGG.max(initial=1)), "row_bytes": flows.row_bytes}
            ports = [_long(range(gpus), dict(zip(SIDES, sides_BGG.sum(axis=axis), strict=True))) for axis in (2, 1)]
            panels.append((*({"value": shown(tokens_GG), **scale} for tokens_GG in sides_BGG), *ports))
            busiest = (_largest(flows.port_s_BLG[side, layer], seconds) for side in (0, 1))
            rows.append((model, layer, *sides_BGG.sum(axis=(1, 2)).tolist(), *busiest))
    heads = ("tokens that travel before", "after", "busiest port before: GPU", "after: GPU")
    table = Table({**BY_LAYER, **dict.fromkeys(heads, str)}, rows, "Traffic by layer")
    specs = [heat_map(title.capitalize(), ("GPU", "GPU"), gpus, gpus, relative=False) for title in (BEFORE, AFTER)]
    specs += [grouped_bars(f"Tokens that a port {way}", "GPU", SIDES, "tokens") for way in ("sends", "receives")]
    views = views_of(table, 2, panels)
    figure = Figure("traffic-map", "Tokens between GPUs", tuple(specs), ("model", "layer"), views, table)
    rounded = " In the maps of so large a plan, tokens are rounded to two digits." if shown is _coarse else ""
    return Section("traffic", "Traffic before and after", about + rounded, (figure,))


def loads_section(report: ReportNumbers) -> Section:
    """Returns the section on the busiest port and the slowest GPU of each layer, beside their bounds."""
    about = (
        "The charts show the time of each layer's busiest port and of its slowest GPU's experts, for the whole profile. A "
        "bound is the least that is possible: no order of the dispatch is faster than its bound, no placement makes the "
        "slowest GPU's experts faster than theirs."
    )
    ports_M, experts_M = [], []
    for flows, planned_LW in zip(report.traffic_M, report.planned_MLW, strict=True):
        ordered_L, bound_L = (np.array([getattr(there, name) for there, _ in planned_LW]) for name in ("seconds", "bound_s"))
        ports, experts = (
            dict(zip(SIDES, load_BLG.max(axis=2), strict=True)) for load_BLG in (flows.port_s_BLG, flows.expert_s_BLG)
        )
        ports_M.append(ports | {"in the planned order": ordered_L, "bound of any order": bound_L})
        experts_M.append(experts | {"bound of any placement": flows.expert_bound_s_L})
    busiest = _by_layer(report, "port-loads", "Busiest port: seconds of the dispatch", ports_M)
    slowest = _by_layer(report, "expert-loads", "Slowest GPU: seconds of its experts", experts_M)
    return Section("loads", "Loads by layer", about, (busiest, slowest))


def _by_layer(report: ReportNumbers, name: str, title: str, seconds_ML: Sequence[Mapping[str, FloatArray]]) -> Figure:
    """A figure of every layer's seconds, given by model and label."""
    views, rows = [], []
    for model, seconds_L in zip(report.of.models, seconds_ML, strict=True):
        sums = "; ".join(f"{label} {seconds(float(value_L.sum()))}" for label, value_L in seconds_L.items())
        views.append(View((model,), f"all layers: {sums}", (_long(range(len(seconds_L["before"])), seconds_L),)))
        rows += [(model, layer, *row) for layer, row in enumerate(zip(*seconds_L.values(), strict=True))]
    table = Table({**BY_LAYER, **dict.fromkeys(seconds_ML[0], seconds)}, rows, title)
    return Figure(name, title, (grouped_bars("", "layer", tuple(seconds_ML[0]), "seconds"),), ("model",), views, table)


def _largest(load_X: FloatArray, form: Any) -> str:
    return f"{int(load_X.argmax())}, {form(float(load_X.max()))}"


def _long(at: Sequence[Any], values: Mapping[str, Sequence[float] | FloatArray | IntArray]) -> dict[str, Any]:
    """Columns of a bar for each series at each point."""
    return {
        "at": np.tile(np.array(at), len(values)),
        "series": np.repeat(list(values), len(at)),
        "value": np.concatenate([np.asarray(column) for column in values.values()]),
    }


def _coarse(tokens: IntArray) -> IntArray:
    """Tokens, rounded to two digits."""
    unit: IntArray = 10 ** np.maximum(np.floor(np.log10(np.maximum(tokens.ravel(), 1))).astype(np.int64) - 1, 0)
    return (tokens.ravel() + unit // 2) // unit * unit


def phases_figure(report: ReportNumbers) -> Figure:
    """Returns a figure of a rank's seconds in each phase, one bar per trace."""
    names, runs = [name for name, _ in report.of.traces], report.summaries
    words = "; ".join(f"{name}: {seconds(run.seconds)}, GPUs compute for {percent(run.utilisation)} of it"
                      for name, run in zip(names, runs, strict=True))  # fmt: skip
    rows = [(phase, *(run.phases[phase] for run in runs)) for phase in TIMED_PHASES]
    rows.append(("start to end", *(run.seconds for run in runs)))
    title = "Seconds by phase, the mean over ranks; phases overlap where several models share a rank"
    table = Table({"phase": text, **dict.fromkeys(names, seconds)}, rows, title)
    series = _long(TIMED_PHASES, {name: [*run.phases.values()] for name, run in zip(names, runs, strict=True)})
    spec = grouped_bars("", "phase", names, "seconds", lying=True)
    return Figure("phases", "Where the time goes", (spec,), (), [View((), words, (series,))], table)


def schedule_section(report: ReportNumbers) -> Section:
    """Returns the section on each port's transfers in the plan's orders, over the whole profile."""
    about = (
        "The chart shows the transfers of one all-to-all over time, as planned for the whole profile: the dispatch brings "
        "tokens to their experts, the combine brings results back. Colours and numbers name the other end of a transfer."
    )
    if not report.planned_MLW:
        own = plan_table(report.of.plan, explain=True)
        return Section("schedule", "Schedule", "The table shows the predicted time of each dispatch.", tables=(own,))
    gpus, models = len(report.of.gpus), zip(report.of.models, report.planned_MLW, strict=True)
    exchanges = {
        (model, layer, phase): transfers
        for model, planned_LW in models
        for layer, planned_W in enumerate(planned_LW)
        for phase, transfers in zip(EXCHANGES, planned_W, strict=True)
    }
    whole, large = sum(len(each.src_X) for each in exchanges.values()) <= MOST_TRANSFERS, gpus > FEW_PORTS
    most = None if whole else MOST_TRANSFERS // len(exchanges)
    columns: Columns = {**BY_LAYER, "phase": text, **dict.fromkeys(("start to end", "busiest port", "bound"), seconds)}
    rows = [(*at, found.seconds, found.busiest_s, found.bound_s, len(found.src_X)) for at, found in exchanges.items()]
    table = Table({**columns, "transfers": str}, rows, "All-to-alls")
    panels = [(_ports(transfers, gpus, most), *([_ends(transfers, gpus)] if large else [])) for transfers in exchanges.values()]
    names = [f"{gpu} {way}" for gpu, way in product(report.of.gpus, ("sends", "receives"))]
    told = {"from GPU": "floor(datum.track / 2)", "to GPU": "floor(datum.track2 / 2)"}
    other = "floor(datum.other / 2)"
    specs = [spans("port", names, told, range(8), f"{other} % 8", other)]
    shown: dict[str, list[int] | None] = {}
    if large:
        specs.append(heat_map("When each pair has ended", ("GPU", "GPU"), gpus, gpus, relative=False, told="%"))
        shown["busiest ports"] = None
        about += (
            f" Of {gpus} GPUs it shows the busiest ports. The map below it shows when each GPU (row) has sent all to "
            "each GPU (column), in percent of the whole: ports that are busy to the end have the darkest cells."
        )
    if whole:
        shown |= {"all that send": list(range(0, 2 * gpus, 2)), "all that receive": list(range(1, 2 * gpus, 2))}
        shown |= _by_node(report)
    choices, views = ("model", "layer", "phase"), views_of(table, 3, panels)
    figure = Figure("gantt", "Transfers by port", tuple(specs), choices, views, table, shown)
    return Section("schedule", "Schedule", about, (figure,))


def _ports(transfers: TransferSpans, gpus: int, most: int | None) -> dict[str, Any]:
    """Transfers on the tracks of both their ports, of which there are two per GPU; `most`: of the busiest ports alone."""
    port_2X = np.stack([transfers.src_X * 2, transfers.dst_X * 2 + 1])
    busy_P = np.bincount(port_2X.ravel(), np.tile(transfers.end_s_X - transfers.start_s_X, 2), minlength=2 * gpus)
    chosen = np.argsort(-busy_P, kind="stable")[:FEW_PORTS]
    ticks, kept_X = TICKS, transfers.bytes_X >= 0
    if most is not None:
        counts = np.bincount(port_2X.ravel(), minlength=2 * gpus)[chosen].cumsum()
        chosen = chosen[: max(FEWEST_PORTS, int((counts <= most).sum()))]
        ticks, kept_X = FEW_TICKS, np.isin(port_2X[0], chosen) | np.isin(port_2X[1], chosen)
    drawn = _bars(transfers.start_s_X, transfers.end_s_X, port_2X, 2 * gpus, ticks) | {"bytes": transfers.bytes_X}
    kept = {name: value[kept_X] if isinstance(value, np.ndarray) else value for name, value in drawn.items()}
    return {**kept, "tracks": chosen.tolist()}


def _bars(start_s_X: FloatArray, end_s_X: FloatArray, track_KX: IntArray, tracks: int, ticks: int = TICKS) -> dict[str, Any]:
    """Bars, each on K tracks: starts and lengths in ticks, rounded so that what is adjacent stays so; levels on each track,
    and their numbers; the whole in seconds and in ticks."""
    total_s, depth_T = float(end_s_X.max(initial=0.0)) or 1.0, np.ones(tracks, dtype=np.int64)
    start_X, end_X = (np.rint(column / total_s * ticks).astype(np.int64) for column in (start_s_X, end_s_X))
    drawn: dict[str, Any] = {"begin": start_X, "length": end_X - start_X, "total": total_s, "ticks": ticks}
    for side, track_X in zip(("", "2"), track_KX, strict=False):
        level_X = interval_colouring(track_X, start_s_X, end_s_X)
        np.maximum.at(depth_T, track_X, level_X + 1)
        drawn |= {f"track{side}": track_X, f"level{side}": level_X}
    return drawn | {"depths": depth_T.tolist()}


def _ends(transfers: TransferSpans, gpus: int) -> dict[str, Any]:
    """A map of the time at which each pair's last transfer ends, in percent of the whole."""
    end_GG = np.zeros((gpus, gpus))
    np.maximum.at(end_GG, (transfers.src_X, transfers.dst_X), transfers.end_s_X)
    share_GG = np.ceil(25 * end_GG / max(transfers.seconds, 1e-30)).astype(np.int64) * 4
    return {"value": np.where(end_GG > 0, share_GG, -1).ravel(), "across": gpus, "most": 100, "row_bytes": 0}


def timeline_section(report: ReportNumbers) -> Section:
    """Returns the section with timelines of each rank's compute and exchanges: one view per trace, measured traces first."""
    title = "Interleaving" if len(report.of.traced) > 1 else "Timeline"
    about = (
        "The chart shows when each rank (one process on one GPU) computes, exchanges tokens and waits. A bar is a phase of a "
        "layer: gate chooses experts, counts tells how many tokens will come, dispatch sends them, expert computes, combine "
        "sends results back, aggregate sums them up; head is what follows the last layer."
    )
    rows, panels, most = [], [], MOST_BARS // len(report.bars)
    runs = sorted(zip(report.of.traces, report.bars, report.summaries, strict=True), key=lambda run: run[2].kind != "measured")
    for (name, trace), every, summary in runs:
        shown = every.first_steps(most)
        steps, of = int(shown.step_X.max()) + 1, int(every.step_X.max()) + 1
        drawn = f"all steps, {of}" if steps == of else f"steps 0 to {steps - 1} of {of}"
        rows.append((name, trace.kind, summary.seconds, summary.utilisation, drawn))
        panels.append((_ranks(shown, len(report.of.gpus)),))
    columns: Columns = {"trace": text, "kind": text, "from start to end": seconds, "GPUs compute for": percent, "drawn": text}
    table = Table(columns, rows, "Traces")
    tables = *(summary_table(summary) for summary in report.summaries), *_compared(report)
    names = [f"{rank} {part}" for rank, part in product(report.of.gpus, ("computes", "network"))]
    hues = [
        f"{model}: {phase}" if title == "Interleaving" else phase for model, phase in product(report.of.traced, TIMED_PHASES)
    ]
    told = {"model": "models[datum.model]", "step": "datum.step", "layer": "datum.layer", "phase": "phases[datum.phase]"}
    lists = {"models": report.of.traced, "phases": TIMED_PHASES}
    spec = spans("rank", names, told, hues, "colours[datum.hue]", "phases[datum.phase]", **lists)
    tracks = {"all ranks": list(range(len(names)))} | _by_node(report)
    figure = Figure("timeline-chart", "Ranks over time", (spec,), ("trace",), views_of(table, 1, panels), table, tracks)
    return Section("timeline", title, about, (figure,), tables)


def _compared(report: ReportNumbers) -> Sequence[Table]:
    return () if report.comparison is None else (comparison_table(report.comparison),)


def _by_node(report: ReportNumbers) -> dict[str, list[int]]:
    """The tracks of each node, if there are several, and of each rank, of which each has two."""
    found: dict[str, list[int]] = {}
    nodes = [gpu.node for gpu in report.of.plan.cluster.gpus]
    for rank, node in enumerate(nodes if len(set(nodes)) > 1 else ()):
        found.setdefault(f"node {node}", []).extend([2 * rank, 2 * rank + 1])
    return found | {f"rank {rank}": [2 * rank, 2 * rank + 1] for rank in range(len(nodes))}


def _ranks(shown: Bars, ranks: int) -> dict[str, Any]:
    """A timeline's bars: each rank has a track for what it computes, and one for its network and for waiting."""
    track_X = shown.rank_X * 2 + ~np.isin(shown.phase_X, COMPUTE_INDICES)
    columns = {name: getattr(shown, f"{name}_X") for name in ("model", "step", "layer", "phase", "bytes")}
    hue_X = shown.model_X * len(TIMED_PHASES) + shown.phase_X
    return {**_bars(shown.start_s_X, shown.end_s_X, track_X[None], 2 * ranks), **columns, "hue": hue_X}


def placement_section(report: ReportNumbers) -> Section:
    """Returns the section on the experts of each GPU; with replicas, also on replica counts and survival of GPU failures."""
    experts, copies = [], []
    for number, (name, model) in enumerate(zip(report.of.models, report.of.plan.models, strict=True)):
        for layer, (slots, copies_E) in enumerate(zip(model.placement.slots_LG, report.copies_LE(number), strict=True)):
            shares = model.placement.split_LG[layer] if model.placement.split_LG else [(1.0,) * len(held) for held in slots]
            held_G = zip(report.of.gpus, slots, shares, strict=True)
            experts.append((name, layer, "; ".join(f"GPU {gpu}: {_held(held, share)}" for gpu, held, share in held_G)))
            few = int(copies_E.min())
            copies.append((name, layer, int(copies_E.sum()), few, int((copies_E == few).sum()), few - 1))
    table = Table({**BY_LAYER, "experts of each GPU": text}, experts, "Experts by GPU")
    heads = ("slots", "fewest copies", "experts with so few", "GPUs that may be lost, whichever")
    survival = Table({**BY_LAYER, **dict.fromkeys(heads, str)}, copies, "Copies and survival")
    if all((report.copies_LE(number) == 1).all() for number in range(len(report.of.plan.models))):
        about = "The table shows where the plan puts experts. None has replicas (copies on further GPUs)."
        return Section("placement", "Placement", about, tables=(table,))
    about = (
        "The tables show where the plan puts experts and their replicas: copies, among which an expert's tokens are split, in "
        "brackets each copy's part. A slot holds one expert or copy. If the rarest expert of a layer has N copies, the layer "
        "survives the loss of any N - 1 GPUs."
    )
    return Section("placement", "Replicas and survival", about, tables=(survival, table))


def _held(experts: tuple[int, ...], share: Sequence[float]) -> str:
    return " ".join(f"{e}" if part == 1 else f"{e} ({part:.0%})" for e, part in zip(experts, share, strict=True)) or "none"
