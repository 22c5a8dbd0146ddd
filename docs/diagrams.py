"""Draws the pictures of the documentation with aurora itself: `python docs/diagrams.py` writes docs/images/*.svg."""

from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import aurora
from aurora.types.trace import TRACE_PHASES

IMAGES = Path(__file__).parent / "images"
COLOURS = ["#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#a463f2"]
BYTES_GG = np.array([[0, 4, 0, 5], [1, 0, 2, 2], [2, 2, 0, 2], [4, 3, 0, 0]]) * 1_000_000
KIND = "NVIDIA H100 80GB HBM3"
MIXTRAL = {
    "num_local_experts": 8, "num_experts_per_tok": 2, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 3, "vocab_size": 32000,
}  # fmt: skip
LOADS_E = [600, 560, 120, 120, 20, 10, 10, 10]


def orders() -> Figure:
    """Draws one all-to-all of four ranks three times: smallest first, all at once, and in aurora's order."""
    methods = {"sjf": "smallest first", "all-at-once": "all at once", "openshop": "planned (openshop)"}
    ranks = [aurora.Gpu(f"gpu-{rank}", "any", 0, 1e9, 1e9, 10**9) for rank in range(len(BYTES_GG))]
    cluster = aurora.Cluster("four", tuple(ranks))
    figure, axes = plt.subplots(1, 3, figsize=(9, 2.4), sharex=True, sharey=True, layout="constrained")
    for axis, (method, title) in zip(axes, methods.items(), strict=True):
        schedule = aurora.order(BYTES_GG, cluster, method)
        for src, dst, start_s, end_s, rate_Bps in zip(
            schedule.src_X, schedule.dst_X, schedule.start_s_X, schedule.end_s_X, schedule.rate_Bps_X, strict=True
        ):
            height = 0.8 * rate_Bps / 1e9
            below = 0.8 * (0.0 if method != "all-at-once" else _share_below(schedule, src, dst, start_s))
            axis.broken_barh([(start_s * 1e3, (end_s - start_s) * 1e3)], (dst - 0.4 + below, height), color=COLOURS[src])
        axis.axvline(schedule.fluid_bound_s * 1e3, color="black", linestyle=":", linewidth=1)
        axis.set_title(f"{title}: {schedule.makespan_s * 1e3:.1f} ms", fontsize=10)
        axis.set_xlabel("ms")
    axes[0].set_yticks(range(len(BYTES_GG)), [f"to rank {rank}" for rank in range(len(BYTES_GG))])
    axes[0].invert_yaxis()
    handles = [mpl.patches.Patch(color=COLOURS[rank], label=f"from rank {rank}") for rank in range(len(BYTES_GG))]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return figure


def _share_below(schedule: aurora.Schedule, src: int, dst: int, start_s: float) -> float:
    """Returns which part of the receiver's port lower-numbered senders use at `start_s`."""
    same = (schedule.dst_X == dst) & (schedule.src_X < src) & (schedule.start_s_X <= start_s) & (schedule.end_s_X > start_s)
    return float(schedule.rate_Bps_X[same].sum() / 1e9)


def bounds() -> Figure:
    """Draws the bytes of every port; the largest one divided by its rate is the fluid bound."""
    figure, axis = plt.subplots(figsize=(6, 2.4), layout="constrained")
    ranks = np.arange(len(BYTES_GG))
    sent_G, received_G = BYTES_GG.sum(1) / 1e6, BYTES_GG.sum(0) / 1e6
    axis.bar(ranks - 0.2, sent_G, 0.38, label="sent", color=COLOURS[0])
    axis.bar(ranks + 0.2, received_G, 0.38, label="received", color=COLOURS[1])
    bound = max(sent_G.max(), received_G.max())
    axis.axhline(bound, color="black", linestyle=":", linewidth=1)
    axis.text(
        len(ranks) - 0.5, bound, f"fluid bound: {bound:.0f} MB at 1 GB/s = {bound:.0f} ms", ha="right", va="bottom", fontsize=9
    )
    axis.set_xticks(ranks, [f"rank {rank}" for rank in ranks])
    axis.set_ylabel("MB")
    axis.set_ylim(0, bound * 1.35)
    axis.legend(frameon=False, ncols=2, loc="upper left", fontsize=9)
    return figure


def replicas() -> Figure:
    """Draws the load of eight GPUs with one expert each, and with two slots each and replicas."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 2.4), sharey=True, layout="constrained")
    placed = aurora.place(LOADS_E, aurora.GpuSlots.equal(gpus=8, slots=2))
    load_GE = (placed.placement.split_EG(0) * np.array(LOADS_E)[:, None]).T
    for axis, loads_GE, title in (
        (axes[0], np.diag(np.array(LOADS_E, dtype=float)), "one slot per GPU"),
        (axes[1], load_GE, "two slots per GPU, replicas"),
    ):
        below_G = np.zeros(8)
        for expert in range(8):
            axis.bar(
                range(8), loads_GE[:, expert], bottom=below_G, color=plt.get_cmap("tab10")(expert), label=f"expert {expert}"
            )
            below_G += loads_GE[:, expert]
        axis.set_title(f"{title}: largest load {loads_GE.sum(1).max():.0f}", fontsize=10)
        axis.set_xticks(range(8), [f"GPU {gpu}" for gpu in range(8)], fontsize=7)
    axes[0].set_ylabel("tokens")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=8, frameon=False, fontsize=8)
    return figure


def time_slices() -> Figure:
    """Draws what one GPU does while two models share it, one after the other and in time slices (simulated)."""
    gpus = [aurora.Gpu(f"gpu-{rank}", KIND, rank, 25e9, 25e9, 80 * 10**9) for rank in range(4)]
    cluster = aurora.Cluster("four", tuple(gpus))
    options = [aurora.SyntheticOptions(seed=seed, window_tokens=2048) for seed in (0, 1)]
    drawn = [aurora.synthetic_profile("zipf:0.5", MIXTRAL, each, gpu_kinds=[KIND]) for each in options]
    ways = {
        "one after the other": ("off", "exchange"),
        "time slice: exchange": ("on", "exchange"),
        "time slice: layer": ("on", "layer"),
    }
    figure, axes = plt.subplots(3, 1, figsize=(9, 4), sharex=True, layout="constrained")
    for axis, (title, (interleave, time_slice)) in zip(axes, ways.items(), strict=True):
        plan = aurora.plan(cluster, drawn, aurora.PlanOptions(time_slice=time_slice))
        trace = aurora.simulate(plan, drawn, interleave=interleave)
        for model in range(2):
            _draw_rank(axis, trace, model)
        axis.set_title(f"{title}: {trace.seconds * 1e3:.0f} ms", fontsize=10)
        axis.set_yticks([0, 1], ["model A", "model B"])
        axis.invert_yaxis()
    axes[-1].set_xlabel("ms")
    handles = [
        mpl.patches.Patch(color=COLOURS[0], label="computes"),
        mpl.patches.Patch(color=COLOURS[1], label="sends or receives"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return figure


def _draw_rank(axis: Axes, trace: aurora.Trace, model: int) -> None:
    """Draws the events of a model on rank 0 as bars."""
    mine_X = (trace.rank_X == 0) & (trace.model_X == model)
    for phases, colour in ((("gate", "expert", "aggregate"), COLOURS[0]), (("dispatch", "combine"), COLOURS[1])):
        chosen_X = mine_X & np.isin(trace.phase_X, [TRACE_PHASES.index(phase) for phase in phases])
        spans = list(zip(trace.start_s_X[chosen_X] * 1e3, (trace.end_s_X - trace.start_s_X)[chosen_X] * 1e3, strict=True))
        axis.broken_barh(spans, (model - 0.4, 0.8), color=colour, linewidth=0)


PICTURES = {"orders": orders, "bounds": bounds, "replicas": replicas, "time-slices": time_slices}


def main() -> None:
    """Writes every picture."""
    mpl.use("svg")
    mpl.rcParams.update({"svg.hashsalt": "aurora", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    IMAGES.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        draw().savefig(IMAGES / f"{name}.svg", metadata={"Date": None}, facecolor="white")


if __name__ == "__main__":
    main()
