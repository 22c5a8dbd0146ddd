"""Times of a Trace: the one definition of every figure that tables, charts, JSON and advice show of it.

A transfer is under way from when both of its ends are ready. A phase's seconds on a rank are the time in which its events are
under way there. A rank waits between its events, whatever for: a peer, the port, or the GPU. An exchange takes as long as the
busiest direction of a port is busy with it, so that waiting for ranks that come late is no network time.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aurora.advisor.sharing import step_times
from aurora.planner.network.routes import nics_of
from aurora.reports.formatting import distinct
from aurora.reports.spans import union
from aurora.types import TRACE_PHASES, Cluster, Trace
from aurora.types.arrays import FloatArray, IntArray, gap
from aurora.types.trace import COMPUTE_PHASES

TIMED_PHASES = (*TRACE_PHASES, "waiting")
COMPUTE, EXCHANGES = COMPUTE_PHASES, ("dispatch", "combine")
COMPUTE_INDICES = tuple(map(TIMED_PHASES.index, COMPUTE))


@dataclass(frozen=True)
class Bars:
    """What ranks do, piece by piece, by start. Pieces of one model on one rank and of one phase do not overlap.

    Attributes:
        rank_X, model_X, step_X, layer_X, phase_X: (X,) int64, which rank, model, step, layer and phase; phases by their index
            in TIMED_PHASES. A rank's waiting counts to the step and layer of what it waits for.
        bytes_X: (X,) int64, bytes that the rank sends in the piece.
        start_s_X, end_s_X: (X,) float64, seconds since the start of the first piece.
    """

    rank_X: IntArray
    model_X: IntArray
    step_X: IntArray
    layer_X: IntArray
    phase_X: IntArray
    bytes_X: IntArray
    start_s_X: FloatArray
    end_s_X: FloatArray

    def first_steps(self, most: int) -> "Bars":
        """Returns as many whole steps from the start as have at most `most` bars in all; at least one step."""
        upto = np.bincount(self.step_X).cumsum()
        kept = self.step_X < max(1, int((upto <= most).sum()))
        return Bars(*(column[kept] for column in vars(self).values()))


@dataclass(frozen=True)
class LayerSummary:
    """One MoE layer of one model, summed over all steps.

    Attributes:
        model, layer: the model's name and the index of the MoE layer.
        seconds: seconds from the layer's first event in a step to its last.
        dispatch_s, combine_s: seconds of the exchanges, as `case_seconds` has them.
        waiting_s: seconds that a rank waits, the mean over ranks.
        bound_s: fluid bound of the same transfers, in seconds, dispatch plus combine.
    """

    model: str
    layer: int
    seconds: float
    dispatch_s: float
    combine_s: float
    waiting_s: float
    bound_s: float

    @property
    def gap(self) -> float:
        """(dispatch_s + combine_s) / bound_s - 1."""
        return gap(self.dispatch_s + self.combine_s, self.bound_s)


@dataclass(frozen=True, eq=False)
class ModelSummary:
    """The steps of one model, or of one micro-batch of a model.

    Attributes:
        model: its name.
        begins_s_T, ends_s_T: (T,) float64, when its steps begin and end, in seconds from the start of the run.
    """

    model: str
    begins_s_T: FloatArray
    ends_s_T: FloatArray

    @property
    def seconds(self) -> float:
        """From the start of its first step to the end of its last."""
        return float(self.ends_s_T.max(initial=0.0) - self.begins_s_T.min(initial=self.ends_s_T.max(initial=0.0)))

    @property
    def step_s_T(self) -> FloatArray:
        """(T,) float64, from the start of each step to its end."""
        return self.ends_s_T - self.begins_s_T

    @property
    def between_s_X(self) -> FloatArray:
        """(T - 1,) float64, from the end of a step to that of the next: what a request that is in both waits for its token."""
        return np.diff(self.ends_s_T)


@dataclass(frozen=True)
class Summary:
    """A trace in numbers.

    Attributes:
        kind: "predicted" or "measured".
        seconds: seconds from the first event of the run to the last.
        phases_M: for each model, a rank's seconds in each of TIMED_PHASES, the mean over ranks. They add up to the time from a
            rank's first event to its last.
        utilisation_G: (G,) float64, compute time of each rank divided by the seconds of the run.
        layers: one LayerSummary per layer, by model and then by layer.
        models: one ModelSummary per model, or micro-batch.
    """

    kind: str
    seconds: float
    phases_M: tuple[Mapping[str, float], ...]
    utilisation_G: FloatArray
    layers: tuple[LayerSummary, ...]
    models: tuple[ModelSummary, ...]

    @property
    def phases(self) -> dict[str, float]:
        """A rank's seconds in each phase, the mean over ranks, all models added; phases of different models may overlap."""
        return {phase: sum(phases[phase] for phases in self.phases_M) for phase in TIMED_PHASES}

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
        cluster: the GPUs, whose ports, and NICs of servers, give the bounds.

    Returns:
        The run's, each layer's and each model's seconds, and each rank's utilisation.
    """
    found, (case_C4, case_s_C) = bars(trace), case_seconds(trace)
    length_X, computing = found.end_s_X - found.start_s_X, np.isin(found.phase_X, COMPUTE_INDICES)
    busy_G = np.bincount(found.rank_X[computing], weights=length_X[computing], minlength=trace.ranks)
    waits = found.phase_X == TIMED_PHASES.index("waiting")
    layers, names_M = [], distinct(trace.names_M)
    served_X = trace.phase_X != TRACE_PHASES.index("moves")  # these belong to no layer's time
    for model, name in enumerate(names_M):
        for layer in np.unique(trace.layer_X[trace.model_X == model]).tolist():
            rows = served_X & (trace.model_X == model) & (trace.layer_X == layer)
            of_layer = (case_C4[:, 0] == model) & (case_C4[:, 2] == layer)
            dispatch_s, combine_s = (
                float(case_s_C[of_layer & (case_C4[:, 3] == TRACE_PHASES.index(phase))].sum()) for phase in EXCHANGES
            )
            waiting_s = float(length_X[waits & (found.model_X == model) & (found.layer_X == layer)].sum()) / trace.ranks
            bound_s = _fluid(trace, rows, cluster)
            layers.append(LayerSummary(name, layer, span_s(trace, rows), dispatch_s, combine_s, waiting_s, bound_s))
    models = tuple(ModelSummary(name, *step_times(trace, model)) for model, name in enumerate(names_M))
    seconds = trace.seconds
    return Summary(trace.kind, seconds, phase_seconds(trace, found), busy_G / max(seconds, 1e-30), tuple(layers), models)


def phase_seconds(trace: Trace, found: Bars) -> tuple[dict[str, float], ...]:
    """Returns, for each model, a rank's seconds in each of TIMED_PHASES, the mean over ranks.

    Args:
        trace: a predicted or measured trace.
        found: its bars.
    """
    phases, models = len(TIMED_PHASES), len(trace.names_M)
    of_X, length_X = found.model_X * phases + found.phase_X, found.end_s_X - found.start_s_X
    total_MY = np.bincount(of_X, weights=length_X, minlength=models * phases).reshape(models, phases) / trace.ranks
    return tuple(dict(zip(TIMED_PHASES, total_Y, strict=True)) for total_Y in total_MY.tolist())


def case_seconds(trace: Trace) -> tuple[IntArray, FloatArray]:
    """Returns how long each phase of a step's layer took: on the slowest rank; of an exchange, in a port's busiest direction.

    Args:
        trace: a predicted or measured trace.

    Returns:
        (C, 4) int64 model, step, layer and phase of each case, and (C,) float64 seconds.
    """
    case_X4 = np.stack([trace.model_X, trace.step_X, trace.layer_X, trace.phase_X], axis=1)
    case_C4, case_X = np.unique(case_X4, axis=0, return_inverse=True)
    key_X = (case_X.reshape(-1) * trace.ranks + trace.rank_X) * 2 + trace.sent_X
    row_X, first, start_s, end_s = union(key_X, under_way_s(trace), trace.end_s_X)
    busy_s = np.bincount(key_X[row_X][first], weights=end_s - start_s, minlength=len(case_C4) * trace.ranks * 2)
    return case_C4, busy_s.reshape(len(case_C4), trace.ranks * 2).max(axis=1, initial=0.0)


def bars(trace: Trace) -> Bars:
    """Returns a trace as bars, with the waiting between them, from its first start."""
    keys = trace.rank_X, trace.model_X, trace.step_X, trace.layer_X, trace.phase_X
    shape = tuple(int(column.max(initial=0)) + 1 for column in keys)
    key_X = np.ravel_multi_index(keys, shape)
    row_X, first, start_s, end_s = union(key_X, under_way_s(trace), trace.end_s_X)
    which = np.unravel_index(key_X[row_X][first], shape)
    sent = np.add.reduceat(np.where(trace.sent_X, trace.bytes_X, 0)[row_X], first) if len(first) else first
    worker_X = which[0] * shape[1] + which[1]
    at, busy, from_s, to_s = union(worker_X, start_s, end_s)
    next_X = at[busy][1:]  # the first bar after each gap
    waits = worker_X[next_X] == worker_X[at[busy][:-1]]
    waited = [column[next_X[waits]] for column in which]
    waited[-1][:] = TIMED_PHASES.index("waiting")
    columns = [
        np.concatenate(pair) for pair in zip((*which, sent), (*waited, np.zeros(waits.sum(), dtype=np.int64)), strict=True)
    ]
    began = trace.start_s_X.min(initial=np.inf)
    columns += [np.append(start_s, to_s[:-1][waits]) - began, np.append(end_s, from_s[1:][waits]) - began]
    by_start = np.lexsort((*columns[4::-1], columns[6]))
    return Bars(*(column[by_start] for column in columns))


def transfer_ends(trace: Trace) -> IntArray:
    """Returns (F, 2) int64: the rows of each transfer's sender and receiver; an end without its other end is left out."""
    columns = trace.model_X, trace.step_X, trace.layer_X, trace.phase_X
    shape = (*(int(column.max(initial=0)) + 1 for column in columns), trace.ranks, trace.ranks)
    ends = []
    for sent in (True, False):
        rows = np.flatnonzero((trace.peer_X >= 0) & (trace.sent_X == sent))
        pair = (trace.rank_X, trace.peer_X) if sent else (trace.peer_X, trace.rank_X)
        key = np.ravel_multi_index([column[rows] for column in (*columns, *pair)], shape)
        by_key = np.lexsort((trace.start_s_X[rows], key))
        key, rows = key[by_key], rows[by_key]
        turn = np.arange(len(key)) - np.searchsorted(key, key)  # of several transfers of a pair
        ends.append((key * (len(trace) + 1) + turn, rows))
    _, sent_at, received_at = np.intersect1d(ends[0][0], ends[1][0], assume_unique=True, return_indices=True)
    return np.stack([ends[0][1][sent_at], ends[1][1][received_at]], axis=1)


def under_way_s(trace: Trace) -> FloatArray:
    """Returns (X,) float64, when each event begins; a transfer begins when both of its ends are ready."""
    start_s_X, pair_F2 = trace.start_s_X.copy(), transfer_ends(trace)
    ready_s_F = trace.start_s_X[pair_F2].max(axis=1, initial=-np.inf)
    for row_F in pair_F2.T:
        waited = ready_s_F < trace.end_s_X[row_F]  # else it had ended before, and waited for nobody
        start_s_X[row_F[waited]] = ready_s_F[waited]
    return start_s_X


def span_s(trace: Trace, rows: NDArray[np.bool_]) -> float:
    """Returns the seconds from first start to last end of the rows, an (X,) mask, step by step, summed."""
    steps = trace.step_X[rows]
    if not len(steps):
        return 0.0
    start, end = np.full(steps.max() + 1, np.inf), np.full(steps.max() + 1, -np.inf)
    np.minimum.at(start, steps, trace.start_s_X[rows])
    np.maximum.at(end, steps, trace.end_s_X[rows])
    seen = np.isfinite(start)
    return float((end[seen] - start[seen]).sum())


def _fluid(trace: Trace, rows: NDArray[np.bool_], cluster: Cluster) -> float:
    """The fluid bounds of the rows' dispatches and combines, summed over steps; NICs carry what goes between servers."""
    rows, nics = rows & (trace.peer_X >= 0), nics_of(cluster.network)
    case_C2, case_X = np.unique(np.stack([trace.step_X, trace.phase_X])[:, rows], axis=1, return_inverse=True)
    bytes_NCDG = np.zeros((2, case_C2.shape[1], 2, trace.ranks))  # by port and by NIC, in each direction
    server_G = np.zeros(trace.ranks) if nics is None else nics.server_G
    rank_X = trace.rank_X[rows]
    far_X = (server_G[rank_X] != server_G[trace.peer_X[rows]]).astype(int)
    np.add.at(bytes_NCDG, (far_X, case_X.reshape(-1), trace.sent_X[rows].astype(int), rank_X), trace.bytes_X[rows])
    seconds_CDG = bytes_NCDG[0] / np.stack([cluster.in_Bps_G, cluster.out_Bps_G])
    if nics is not None:
        seconds_CDG = np.maximum(seconds_CDG, nics.carried(bytes_NCDG[1]) / nics.Bps_G)
    return float(seconds_CDG.max(axis=(1, 2), initial=0.0).sum())
