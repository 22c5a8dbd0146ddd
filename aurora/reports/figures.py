"""A report's figures for papers, SVG and PNG. What is drawn has been computed elsewhere."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from aurora.reports.inputs import ReportInputs
from aurora.reports.numbers import ReportNumbers
from aurora.reports.pictures import canvas, save_picture
from aurora.reports.spans import TransferSpans, interval_colouring
from aurora.reports.tables import seconds
from aurora.reports.trace_times import COMPUTE_INDICES, TIMED_PHASES
from aurora.reports.traffic_loads import Traffic
from aurora.types.arrays import FloatArray, IntArray

PEERS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#7b6bb5", "#8a8d1b")
TONES = (
    ("#9ecae1", "#dbe3ea", "#08519c", "#4a98cf", "#2171b5", "#c6dbef", "#6baed6", "#f2f4f7"),
    ("#fdc08a", "#f1e4d8", "#a63603", "#f58a3c", "#d95f0e", "#fddcc0", "#fd8d3c", "#faf5f0"),
)  # a model's phases, waiting last


def draw(inputs: ReportInputs, folder: Path) -> list[Path]:
    """Draws traffic, loads and schedule of each model's slowest layer, loads of all layers, and a timeline of each trace.

    Args:
        inputs: the plan, its traces and its traffic.
        folder: folder to write the pictures to.

    Returns:
        Paths of the files written.
    """
    import matplotlib

    with matplotlib.rc_context({"text.parse_math": False}):  # models' names are text, whatever is in them
        return _drawn(inputs, folder)


def _drawn(inputs: ReportInputs, folder: Path) -> list[Path]:
    """Draws and writes every figure."""
    found = ReportNumbers(inputs)
    written: list[Path] = []
    for number, (flows, planned_LW) in enumerate(zip(found.traffic_M, found.planned_MLW, strict=True)):
        layer = int(np.argmax([there.seconds for there, _ in planned_LW]))
        dispatch, model = planned_LW[layer][0], inputs.models[number]
        title = f"{model}, layer {layer}"
        tokens_BGG, ports_BGL = flows.tokens_BLGG[:, layer], flows.port_s_BLG.transpose(0, 2, 1)
        written += _maps(title, tokens_BGG, ("to GPU", "from GPU"), "tokens", folder, f"traffic-{number}")
        written += _loads(title, flows, layer, dispatch.bound_s, folder, f"loads-{number}")
        written += _maps(model, ports_BGL, ("layer", "GPU"), "seconds of the dispatch", folder, f"layers-{number}")
        written += _gantt(
            f"{title}: dispatch, {seconds(dispatch.seconds)}", dispatch, len(inputs.gpus), folder, f"schedule-{number}"
        )
    for number in range(len(inputs.traces)):
        written += _timeline(found, number, folder)
    return written


def _maps(
    title: str, value_BRC: IntArray | FloatArray, axes: tuple[str, str], unit: str, folder: Path, name: str
) -> list[Path]:
    """Heat maps side by side: in index order, and as planned."""
    drawn = canvas(8.4, 3.9)
    plots = drawn.subplots(1, 2)
    for plot, value_RC, side in zip(plots, value_BRC, ("in index order", "as planned"), strict=True):
        picture = plot.imshow(value_RC, cmap="Blues", aspect="auto", vmin=0, vmax=float(value_BRC.max()) or 1.0)
        plot.set_title(f"{title}: {side}", fontsize="medium")
        plot.set_xlabel(axes[0])
        plot.set_ylabel(axes[1])
        _whole(plot.xaxis, plot.yaxis)
    drawn.colorbar(picture, ax=plots, label=unit, shrink=0.8)
    return save_picture(drawn, folder, name)


def _loads(title: str, flows: Traffic, layer: int, bound_s: float, folder: Path, name: str) -> list[Path]:
    drawn = canvas(8.4, 3.4)
    parts = (
        (flows.port_s_BLG, bound_s, "dispatch of the port"),
        (flows.expert_s_BLG, float(flows.expert_bound_s_L[layer]), "experts"),
    )
    for plot, (load_BLG, line_s, what) in zip(drawn.subplots(1, 2), parts, strict=True):
        at_G = np.arange(load_BLG.shape[2])
        for side, (label, colour) in enumerate((("in index order", "#9aa3ad"), ("as planned", "#0b6cb8"))):
            plot.bar(at_G + 0.4 * side - 0.2, load_BLG[side, layer], 0.4, label=label, color=colour)
        plot.axhline(line_s, color="#a8400c", linestyle="--", linewidth=1, label="bound")
        plot.set_title(f"{title}: {what}", fontsize="medium")
        plot.set_xlabel("GPU")
        plot.set_ylabel("seconds")
        _whole(plot.xaxis)
    drawn.legend(*plot.get_legend_handles_labels(), fontsize="small", ncols=3, loc="outside lower center")
    return save_picture(drawn, folder, name)


def _gantt(title: str, transfers: TransferSpans, ranks: int, folder: Path, name: str) -> list[Path]:
    drawn = canvas(8.4, max(2.4, 0.16 * ranks + 1.2))
    plot = drawn.add_subplot()
    _spans(plot, transfers.src_X, transfers.start_s_X, transfers.end_s_X, [PEERS[dst % len(PEERS)] for dst in transfers.dst_X])
    plot.set_title(title + "; colours tell receivers", fontsize="medium")
    plot.set_ylabel("sending GPU")
    _whole(plot.yaxis)
    plot.set_ylim(ranks - 0.4, -0.6)
    return save_picture(drawn, folder, name)


def _timeline(found: ReportNumbers, number: int, folder: Path) -> list[Path]:
    name, trace = found.of.traces[number]
    shown, ranks = found.bars[number].first_steps(1), len(found.of.plan.cluster)
    drawn = canvas(8.4, max(2.8, 0.32 * ranks + 1.6))
    plot = drawn.add_subplot()
    track_X = shown.rank_X * 2 + ~np.isin(shown.phase_X, COMPUTE_INDICES)
    colours = [TONES[model][phase] for model, phase in zip(shown.model_X.tolist(), shown.phase_X.tolist(), strict=True)]
    _spans(plot, track_X, shown.start_s_X, shown.end_s_X, colours)
    names = [f"{rank} {what}" for rank in range(ranks) for what in ("computes", "network")]
    plot.set_yticks(range(2 * ranks), names, fontsize="x-small")
    plot.set_ylim(2 * ranks - 0.4, -0.6)
    plot.set_title(f"{name} ({trace.kind}), {seconds(trace.seconds)}; first step", fontsize="medium")
    for model, label in enumerate(found.of.models):
        for phase, tone in zip(TIMED_PHASES, TONES[model], strict=True):
            plot.barh(0, 0, color=tone, label=f"{label}: {phase}")
    plot.set_xlim(0, float(shown.end_s_X.max()))
    drawn.legend(fontsize="x-small", ncols=4, loc="outside lower center")
    return save_picture(drawn, folder, f"timeline-{number}")


def _spans(plot: Any, track_X: IntArray, start_s_X: FloatArray, end_s_X: FloatArray, colours: Sequence[str]) -> None:
    level_X = interval_colouring(track_X, start_s_X, end_s_X)
    depth = np.ones(int(track_X.max(initial=0)) + 1)
    np.maximum.at(depth, track_X, level_X + 1)
    height_X = 0.84 / depth[track_X]
    plot.barh(track_X - 0.42 + (level_X + 0.5) * height_X, end_s_X - start_s_X, height_X, start_s_X, color=colours, linewidth=0)
    plot.set_xlabel("seconds")
    plot.set_xlim(left=0)


def _whole(*sides: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    for side in sides:
        side.set_major_locator(MaxNLocator(integer=True))
