"""Summary of a Trace: seconds, utilisation and gaps."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aurora.types import TRACE_PHASES, Cluster, Trace
from aurora.types.arrays import FloatArray, gap

COMPUTE = tuple(TRACE_PHASES.index(phase) for phase in ("gate", "expert", "aggregate"))
EXCHANGES = tuple(TRACE_PHASES.index(phase) for phase in ("dispatch", "combine"))


@dataclass(frozen=True)
class LayerSummary:
    """One MoE layer of one model, summed over all steps.

    Attributes:
        model, layer: the model's name and the index of the MoE layer.
        seconds: seconds from the layer's first event in a step to its last.
        dispatch_s, combine_s: seconds from the start of the first transfer in a step to the end of the last.
        bound_s: fluid bound of the same transfers, in seconds, dispatch plus combine.
    """

    model: str
    layer: int
    seconds: float
    dispatch_s: float
    combine_s: float
    bound_s: float

    @property
    def gap(self) -> float:
        """(dispatch_s + combine_s) / bound_s - 1."""
        return gap(self.dispatch_s + self.combine_s, self.bound_s)


@dataclass(frozen=True)
class Summary:
    """A trace in numbers.

    Attributes:
        kind: "predicted" or "measured".
        seconds: seconds from the first event of the run to the last.
        utilisation_G: (G,) float64, compute time of each rank divided by the seconds of the run.
        layers: one LayerSummary per layer, by model and then by layer.
    """

    kind: str
    seconds: float
    utilisation_G: FloatArray
    layers: tuple[LayerSummary, ...]

    @property
    def utilisation(self) -> float:
        """Mean of utilisation_G."""
        return float(self.utilisation_G.mean())

    @property
    def exchange_gap(self) -> float:
        """Seconds of all exchanges of the run, divided by the sum of their fluid bounds, minus one."""
        return gap(sum(x.dispatch_s + x.combine_s for x in self.layers), sum(x.bound_s for x in self.layers))


def summarise(trace: Trace, cluster: Cluster) -> Summary:
    """Summarises a trace.

    Args:
        trace: a predicted or measured trace.
        cluster: the GPUs, whose port rates give the bounds; a fabric is ignored.

    Returns:
        The run's and each layer's seconds, and each rank's utilisation.
    """
    ranks = trace.ranks
    computing = np.isin(trace.phase_X, COMPUTE)
    busy_G = np.bincount(trace.rank_X[computing], weights=(trace.end_s_X - trace.start_s_X)[computing], minlength=ranks)
    layers = []
    for model, name in enumerate(trace.names_M):
        of_model = trace.model_X == model
        for layer in np.unique(trace.layer_X[of_model]):
            rows = of_model & (trace.layer_X == layer)
            dispatch_s, combine_s = (_span(trace, rows & (trace.phase_X == phase)) for phase in EXCHANGES)
            layers.append(
                LayerSummary(name, int(layer), _span(trace, rows), dispatch_s, combine_s, _fluid(trace, rows, cluster))
            )
    seconds = trace.seconds
    return Summary(trace.kind, seconds, busy_G / max(seconds, 1e-30), tuple(layers))


def _span(trace: Trace, rows: NDArray[np.bool_]) -> float:
    """First start to last end of the rows, step by step, summed."""
    steps = trace.step_X[rows]
    if not len(steps):
        return 0.0
    start, end = np.full(steps.max() + 1, np.inf), np.full(steps.max() + 1, -np.inf)
    np.minimum.at(start, steps, trace.start_s_X[rows])
    np.maximum.at(end, steps, trace.end_s_X[rows])
    seen = np.isfinite(start)
    return float((end[seen] - start[seen]).sum())


def _fluid(trace: Trace, rows: NDArray[np.bool_], cluster: Cluster) -> float:
    """The fluid bounds of the rows' dispatches and combines, summed over steps."""
    total = 0.0
    for phase in EXCHANGES:
        own = rows & (trace.phase_X == phase)
        if not own.any():
            continue
        # load[step, direction, rank]: seconds that a port needs for its share
        load = np.zeros((int(trace.step_X[own].max()) + 1, 2, trace.ranks))
        rate_DG = np.stack([cluster.in_Bps_G, cluster.out_Bps_G])
        at = (trace.sent_X[own].astype(int), trace.rank_X[own])
        np.add.at(load, (trace.step_X[own], *at), trace.bytes_X[own] / rate_DG[at])
        total += float(load.max(axis=(1, 2)).sum())
    return total
