"""Tables of what plans are made from: profiles, drift, clusters, links and compute curves. `most` is as in plan_tables."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from rich.table import Table

from aurora.planner.network.transfer_seconds import exchange_seconds
from aurora.planner.workload.load_statistics import LEVEL
from aurora.reports.formatting import Row, add_worst, percent, right, seconds, size
from aurora.types import PHASES, Cluster, Curve, Profile
from aurora.types.arrays import FloatArray

if TYPE_CHECKING:
    from aurora.planner.evaluate import Drift
    from aurora.planner.workload.load_statistics import LoadIntervals


def profile_table(profile: Profile, loads: "LoadIntervals | None" = None, most: int | None = None) -> Table:
    """Returns a table of each layer's load and skew.

    Args:
        profile: the traffic.
        loads: confidence intervals of the loads, for a column on the hottest expert's share; None: no such column.
        most: number of layers to show, the most skewed; None: all.
    """
    heads = right("MoE layer", "tokens to experts", "max/mean expert load", "hottest expert")
    table = Table(*heads, title=f"{profile.model}: {profile.windows} windows, {profile.sources} sources, top-{profile.top_k}")
    if loads is not None:
        table.add_column("its share", justify="right")
        low, high = loads.bottleneck.low, loads.bottleneck.high
        table.caption = (
            f"fullest of {profile.sources} ranks, experts in order: {low:.3f} to {high:.3f} times the mean; intervals of "
            f"{LEVEL:.0%}, {loads.drawn} drawn again"
        )
    rows: list[Row] = []
    for layer, load_E in enumerate(profile.load_LE):
        skew = load_E.max() / load_E.mean() if load_E.any() else 0.0
        at = layer, int(load_E.argmax())
        share = [] if loads is None else [f"{percent(loads.low_LE[at])} to {percent(loads.high_LE[at])}"]
        rows.append((float(skew), (str(layer), str(load_E.sum()), f"{skew:.2f}", str(at[1]), *share)))
    return add_worst(table, rows, most)


def drift_table(drift: "Drift", most: int | None = None) -> Table:
    """Returns a table of the drift in each layer, beside the drift that chance alone would show.

    Args:
        drift: the drift between two profiles.
        most: number of layers to show, the furthest apart; None: all.
    """
    table = Table(
        *right("MoE layer", "total variation", "by chance up to", f"overlap of the {drift.hot} hottest"),
        title=f"loss {percent(drift.loss)}; shares of experts differ by {percent(float(drift.variation_L.mean()))}",
    )
    layers = zip(drift.variation_L.tolist(), drift.noise_L.tolist(), drift.overlap_L.tolist(), strict=True)
    rows: list[Row] = [(row[0], (str(layer), *map(percent, row))) for layer, row in enumerate(layers)]
    return add_worst(table, rows, most)


def cluster_table(cluster: Cluster) -> Table:
    """Returns a table of each rank's GPU and port."""
    table = Table(
        title=f"{cluster.name}: {len(cluster)} GPUs" + (f", incast {percent(cluster.incast)}" if cluster.incast else "")
    )
    for column in ("rank", "name", "kind"):
        table.add_column(column)
    for column in ("node", "out", "in", "memory", "speed", "start-up"):
        table.add_column(column, justify="right")
    for rank, gpu in enumerate(cluster.gpus):
        ports = (f"{gpu.out_Bps / 1e9:.4g} GB/s", f"{gpu.in_Bps / 1e9:.4g} GB/s", f"{gpu.memory_bytes / 1e9:.4g} GB")
        table.add_row(str(rank), gpu.name, gpu.kind, str(gpu.node), *ports, f"{gpu.speed:.3g}", seconds(gpu.startup_s))
    return table


def links_table(rate_Bps_GG: FloatArray, startup_s_GG: FloatArray) -> Table:
    """Returns a table of each pair's rate and start-up time: senders down, receivers across.

    Args:
        rate_Bps_GG: (G, G) float64, bytes per second from each rank to each.
        startup_s_GG: (G, G) float64, start-up seconds of a message from each rank to each.
    """
    heads = right("rank", *map(str, range(len(rate_Bps_GG))))
    table = Table(*heads, title="messages from row to column, one at a time: GB/s, start-up")
    for rank, (rates, startups) in enumerate(zip(rate_Bps_GG.tolist(), startup_s_GG.tolist(), strict=True)):
        pairs = [f"{rate / 1e9:.3g}, {seconds(wait)}" for rate, wait in zip(rates, startups, strict=True)]
        table.add_row(str(rank), *(pair if peer != rank else "-" for peer, pair in enumerate(pairs)))
    return table


def curves_table(model: str, kinds: Mapping[str, Sequence[Curve]]) -> Table:
    """Returns a table of each phase's compute time at a few token counts.

    Args:
        model: the model's name, for the title.
        kinds: by kind of GPU, a curve for each of PHASES.
    """
    table = Table("kind", *right("tokens", *PHASES), title=f"{model}: compute times")
    for kind, curves in kinds.items():
        most = int(max(curve.tokens_X[-1] for curve in curves))
        for tokens in [1 << power for power in range(0, most.bit_length(), 3)]:
            table.add_row(kind, str(tokens), *(seconds(float(curve(tokens))) for curve in curves))
    return table


def link_curves_table(cluster: Cluster) -> Table:
    """Returns a table of the seconds of exchanges by a cluster's link curves: bytes that a GPU sends down, partners across.

    Args:
        cluster: with link curves.
    """
    curves = cluster.link_curves
    title = f"{cluster.name}: exchanges with so many GPUs at once"
    table = Table(*right("a GPU sends", *(str(curve.partners) for curve in curves)), title=title)
    least, most = (round(np.log10(reach([curve.bytes_X[at] for curve in curves]))) for reach, at in ((min, 0), (max, -1)))
    for sent in 10.0 ** np.arange(least, most + 1):
        table.add_row(size(sent), *(seconds(float(exchange_seconds([curve], [sent], [curve.partners])[0])) for curve in curves))
    return table
