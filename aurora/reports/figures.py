"""A report's figures for papers. What is drawn has been computed elsewhere."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from aurora.reports.formatting import seconds
from aurora.reports.inputs import ReportInputs
from aurora.reports.numbers import ReportNumbers
from aurora.reports.pictures import canvas, save_picture
from aurora.reports.spans import TransferSpans, interval_colouring
from aurora.reports.trace_times import COMPUTE_INDICES, TIMED_PHASES
from aurora.reports.traffic_loads import Traffic, relative_loads
from aurora.types import ControlReport
from aurora.types.arrays import FloatArray, IntArray

PAGE, COLUMN = 7.0, 3.3  # inches: the width of a page, and of one of its two columns
TALLEST = 9.0  # inches
PEERS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#7b6bb5", "#8a8d1b")
TONES = (
    ("#9ecae1", "#dbe3ea", "#08519c", "#4a98cf", "#2171b5", "#c6dbef", "#6baed6", "#0b2f4f", "#f2f4f7"),
    ("#fdc08a", "#f1e4d8", "#a63603", "#f58a3c", "#d95f0e", "#fddcc0", "#fd8d3c", "#5c1f02", "#faf5f0"),
    ("#a1d99b", "#dde9dc", "#006d2c", "#52b36a", "#31a354", "#c7e9c0", "#74c476", "#00381a", "#f1f6f0"),
    ("#bcbddc", "#e4e2ec", "#54278f", "#8b86c0", "#756bb1", "#dadaeb", "#9e9ac8", "#2f1450", "#f5f3f8"),
)  # a model's phases, waiting last; further models take the same tones again
SIDES = ("in index order", "as planned")


@dataclass(frozen=True)
class Paper:
    """How figures look and where they go.

    Attributes:
        folder: folder to write to.
        width: inches.
        suffixes: kinds of files: "svg", "png", "pdf".
    """

    folder: Path
    width: float
    suffixes: tuple[str, ...]

    @property
    def narrow(self) -> bool:
        """Whether plots stand one below the other."""
        return self.width < PAGE

    def plots(self, height: float, many: int = 1) -> tuple[Any, list[Any]]:
        """Returns a figure and its plots of `height` inches each, side by side where there is room."""
        rows, columns = (many, 1) if self.narrow else (1, many)
        drawn = canvas(self.width, min(TALLEST, height * rows))
        return drawn, list(drawn.subplots(rows, columns, squeeze=False).ravel())

    def save(self, drawn: Any, name: str) -> list[Path]:
        """Writes a figure. Returns the paths."""
        return save_picture(drawn, self.folder, name, self.suffixes)


def draw(inputs: ReportInputs, folder: Path, width: float = PAGE, suffixes: tuple[str, ...] = ("svg", "png")) -> list[Path]:
    """Draws loads of all layers, traffic, loads and schedule of each model's slowest layer, and a timeline of each trace.

    Args:
        inputs: the plan, its traces and its traffic.
        folder: folder to write the figures to.
        width: width of the figures in inches; below PAGE, plots stand one below the other.
        suffixes: kinds of files: "svg", "png", "pdf".

    Returns:
        Paths of the files written.
    """
    import matplotlib

    found, paper = ReportNumbers(inputs), Paper(folder, width, suffixes)
    written: list[Path] = []
    with matplotlib.rc_context({"font.size": 8, "text.parse_math": False, "pdf.fonttype": 42}):
        for number, (flows, planned_LW) in enumerate(zip(found.traffic_M, found.planned_MLW, strict=True)):
            layer = int(np.argmax([there.seconds for there, _ in planned_LW]))
            dispatch, model = planned_LW[layer][0], inputs.models[number]
            title = f"{model}, layer {layer}"
            traffic = {
                f"{title}: {side}": tokens_GG for side, tokens_GG in zip(SIDES, flows.tokens_BLGG[:, layer], strict=True)
            }
            written += _maps(paper, f"traffic-{number}", traffic, [("to GPU", "from GPU")] * 2, "tokens")
            experts_LE, *gpus_BLG = relative_loads(flows, inputs.profiles[number])
            loads = {f"{model}: experts": experts_LE.T}
            loads |= {f"GPUs {side}": gpus_LG.T for side, gpus_LG in zip(SIDES, gpus_BLG, strict=True)}
            axes = [("layer", what) for what in ("expert", "GPU", "GPU")]
            written += _maps(paper, f"layers-{number}", loads, axes, "load / mean of the layer", mean=1.0)
            written += _loads(paper, f"loads-{number}", title, flows, layer, dispatch.bound_s)
            written += _gantt(paper, f"schedule-{number}", f"{title}: dispatch, {seconds(dispatch.seconds)}", dispatch, found)
        for number in range(len(inputs.traces)):
            written += _timeline(paper, found, number)
        for number, (model, report) in enumerate(found.control.items()):
            written += _decisions(paper, f"decisions-{number}", model, report) if report.series else []
    return written


def _maps(
    paper: Paper,
    name: str,
    value_RC: Mapping[str, IntArray | FloatArray],
    axes: Sequence[tuple[str, str]],
    label: str,
    mean: float | None = None,
) -> list[Path]:
    """Heat maps by title, in one scale; with a mean, colours tell what is above it and what below."""
    drawn, plots = paper.plots(2.6, len(value_RC))
    most = max(float(values.max()) for values in value_RC.values()) or 1.0
    scale = {"cmap": "Blues", "vmin": 0, "vmax": most} if mean is None else {"cmap": "RdBu_r", "vmin": 0, "vmax": 2 * mean}
    for plot, (title, values), (across, down) in zip(plots, value_RC.items(), axes, strict=True):
        picture = plot.imshow(values, aspect="auto", interpolation="nearest", **scale)
        _labels(plot, title, across, down)
        _whole(plot.xaxis, plot.yaxis)
    drawn.colorbar(picture, ax=plots, label=label, shrink=0.8, extend="neither" if mean is None else "max")
    return paper.save(drawn, name)


def _loads(paper: Paper, name: str, title: str, flows: Traffic, layer: int, bound_s: float) -> list[Path]:
    drawn, plots = paper.plots(2.4, 2)
    parts = (
        (flows.port_s_BLG, bound_s, "dispatch of the port"),
        (flows.expert_s_BLG, float(flows.expert_bound_s_L[layer]), "experts"),
    )
    for plot, (load_BLG, line_s, what) in zip(plots, parts, strict=True):
        at_G = np.arange(load_BLG.shape[2])
        for side, (label, colour) in enumerate(zip(SIDES, ("#9aa3ad", "#0b6cb8"), strict=True)):
            plot.bar(at_G + 0.4 * side - 0.2, load_BLG[side, layer], 0.4, label=label, color=colour)
        plot.axhline(line_s, color="#a8400c", linestyle="--", linewidth=1, label="bound")
        _labels(plot, f"{title}: {what}", "GPU", "seconds")
        _whole(plot.xaxis)
    drawn.legend(*plots[0].get_legend_handles_labels(), fontsize="small", ncols=3, loc="outside lower center")
    return paper.save(drawn, name)


def _gantt(paper: Paper, name: str, title: str, transfers: TransferSpans, found: ReportNumbers) -> list[Path]:
    ranks = len(found.of.gpus)
    drawn, (plot,) = paper.plots(max(2.0, 0.14 * ranks + 1.0))
    _spans(plot, transfers.src_X, transfers.start_s_X, transfers.end_s_X, [PEERS[dst % len(PEERS)] for dst in transfers.dst_X])
    _labels(plot, f"{title}\ncolours: receiving GPU", "seconds", "sending GPU")
    _whole(plot.yaxis)
    plot.set_ylim(ranks - 0.4, -0.6)
    return paper.save(drawn, name)


def _timeline(paper: Paper, found: ReportNumbers, number: int) -> list[Path]:
    trace_name, trace = found.of.traces[number]
    shown, ranks, models = found.bars[number].first_steps(1), len(found.of.plan.cluster), found.of.models
    columns = 8 // (min(2, len(models)) * (1 + paper.narrow))
    rows = -(-len(models) * len(TIMED_PHASES) // columns)
    drawn, (plot,) = paper.plots(max(2.6, 0.28 * ranks + 1.4) + 0.16 * max(0, rows - 4 * (1 + paper.narrow)))
    track_X = shown.rank_X * 2 + ~np.isin(shown.phase_X, COMPUTE_INDICES)
    tone_X = zip((shown.model_X % len(TONES)).tolist(), shown.phase_X.tolist(), strict=True)
    colours = [TONES[model][phase] for model, phase in tone_X]
    _spans(plot, track_X, shown.start_s_X, shown.end_s_X, colours)
    names = [f"{rank} {what}" for rank in range(ranks) for what in ("computes", "network")]
    plot.set_yticks(range(2 * ranks), names, fontsize="x-small")
    plot.set_ylim(2 * ranks - 0.4, -0.6)
    _labels(plot, f"{trace_name}\n{trace.kind}, {seconds(trace.seconds)}; first step", "seconds", "")
    for label, tones in zip(models, cycle(TONES), strict=False):
        for phase, tone in zip(TIMED_PHASES, tones, strict=True):
            plot.barh(0, 0, color=tone, label=phase if len(models) == 1 else f"{label}: {phase}")
    plot.set_xlim(0, float(shown.end_s_X.max()))
    drawn.legend(fontsize="x-small", ncols=columns, loc="outside lower center")
    return paper.save(drawn, f"timeline-{number}")


def _decisions(paper: Paper, name: str, model: str, report: ControlReport) -> list[Path]:
    """Balancedness over time, and when experts began to move."""
    drawn, (plot,) = paper.plots(2.2)
    at_s = [window.at_s for window in report.series]
    for label, field, colour in (("balancedness", "balancedness", PEERS[0]), ("expected", "expected_balancedness", PEERS[1])):
        plot.step(at_s, [getattr(window, field) for window in report.series], where="pre", label=label, color=colour)
    for action, colour in (("move", PEERS[2]), ("undo", PEERS[5])):
        done_s = [change.at_s for change in report.changes if change.action == action and change.took_s is not None]
        for number, each_s in enumerate(done_s):
            plot.axvline(each_s, color=colour, linestyle=":", linewidth=1, label=action if number == 0 else None)
    plot.set_ylim(0, 1.02)
    plot.set_xlim(left=0)
    _labels(plot, f"{model}: decisions over time", "seconds", "mean / largest load")
    drawn.legend(fontsize="small", ncols=4, loc="outside lower center")
    return paper.save(drawn, name)


def _spans(plot: Any, track_X: IntArray, start_s_X: FloatArray, end_s_X: FloatArray, colours: Sequence[str]) -> None:
    level_X = interval_colouring(track_X, start_s_X, end_s_X)
    depth = np.ones(int(track_X.max(initial=0)) + 1)
    np.maximum.at(depth, track_X, level_X + 1)
    height_X = 0.84 / depth[track_X]
    plot.barh(track_X - 0.42 + (level_X + 0.5) * height_X, end_s_X - start_s_X, height_X, start_s_X, color=colours, linewidth=0)
    plot.set_xlim(left=0)


def _labels(plot: Any, title: str, across: str, down: str) -> None:
    plot.set_title(title, fontsize="medium")
    plot.set_xlabel(across)
    plot.set_ylabel(down)


def _whole(*sides: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    for side in sides:
        side.set_major_locator(MaxNLocator(integer=True))
