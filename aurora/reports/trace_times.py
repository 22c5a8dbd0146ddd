"""Times of a Trace: definitions of all figures that tables, charts and JSON show of it.

A transfer starts when both sender and receiver are ready. A phase's seconds on a rank are the time in which at least one of its
events is active there. Time between a rank's events is waiting: for a peer, the port, or the GPU. The time of an exchange is
that of the port direction that is busy with it longest, so waiting for late ranks is not network time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aurora.algorithms.network.port_bounds import nics_of
from aurora.errors import BadInput
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
    """Bars of a timeline: intervals of the ranks' time, sorted by start. Bars of one model, rank and phase do not overlap.

    Attributes:
        rank_X, model_X, step_X, layer_X, phase_X: (X,) int64, rank, model, step, layer and phase of each bar; phases as index
            in TIMED_PHASES. A rank's waiting belongs to the step and layer of the event that ends it.
        bytes_X: (X,) int64, bytes that the rank sends during the bar.
        start_s_X, end_s_X: (X,) float64, seconds since the start of the first bar.
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
        """Returns the bars of the first n whole steps, for the largest n with at most `most` bars in total, but at least 1."""
        upto = np.bincount(self.step_X).cumsum()
        rows = self.step_X < max(1, int((upto <= most).sum()))
        return Bars(*(column[rows] for column in vars(self).values()))


@dataclass(frozen=True)
class LayerSummary:
    """Times of one MoE layer of one model, summed over all steps.

    Attributes:
        model, layer: the model's name and the index of the MoE layer.
        seconds: seconds from the layer's first event in a step to its last.
        dispatch_s, combine_s: seconds of the exchanges, as defined in `case_seconds`.
        waiting_s: seconds that a rank waits, mean over ranks.
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
    """Step times of one model, or of one micro-batch of a model.

    Attributes:
        model: name of the model or micro-batch.
        begins_s_T, ends_s_T: (T,) float64, start and end of its steps, in seconds from the start of the run.
    """

    model: str
    begins_s_T: FloatArray
    ends_s_T: FloatArray

    @property
    def seconds(self) -> float:
        """Seconds from the start of the first step to the end of the last."""
        return float(self.ends_s_T.max(initial=0.0) - self.begins_s_T.min(initial=self.ends_s_T.max(initial=0.0)))

    @property
    def step_s_T(self) -> FloatArray:
        """(T,) float64, seconds from the start of each step to its end."""
        return self.ends_s_T - self.begins_s_T

    @property
    def between_s_X(self) -> FloatArray:
        """(T - 1,) float64, seconds from the end of each step to the end of the next: TPOT of requests in both steps."""
        return np.diff(self.ends_s_T)


@dataclass(frozen=True)
class Summary:
    """Key figures of a trace.

    Attributes:
        kind: "predicted" or "measured".
        seconds: seconds from the first event of the run to the last.
        phases: for each of TIMED_PHASES, the seconds in which at least one model of a rank is in it, mean over ranks. A rank
            counts as waiting while no model is in another phase. For a single model, the phases add up to the time from a
            rank's first event to its last.
        exchanging_s, computing_s: seconds, in the same sense, in any of the phases EXCHANGES, and in any of COMPUTE.
        utilisation_G: (G,) float64, compute time of each rank divided by the seconds of the run.
        layers: one LayerSummary per layer, by model and then by layer.
        models: one ModelSummary per model, or micro-batch.
    """

    kind: str
    seconds: float
    phases: Mapping[str, float]
    exchanging_s: float
    computing_s: float
    utilisation_G: FloatArray
    layers: tuple[LayerSummary, ...]
    models: tuple[ModelSummary, ...]

    @property
    def utilisation(self) -> float:
        """Mean of utilisation_G."""
        return float(self.utilisation_G.mean())

    @property
    def exchange_gap(self) -> float:
        """Seconds of all exchanges of the run / sum of their fluid bounds - 1."""
        return gap(sum(x.dispatch_s + x.combine_s for x in self.layers), sum(x.bound_s for x in self.layers))


def summarise(trace: Trace, cluster: Cluster) -> Summary:
    """Returns the key figures of a trace: seconds of the run, of layers and of models, and the ranks' utilisation.

    Args:
        trace: a predicted or measured trace.
        cluster: the GPUs, whose ports and server NICs determine the bounds.
    """
    spans, (case_C4, case_s_C) = bars(trace), case_seconds(trace)
    length_X, computing = spans.end_s_X - spans.start_s_X, np.isin(spans.phase_X, COMPUTE_INDICES)
    busy_G = np.bincount(spans.rank_X[computing], weights=length_X[computing], minlength=trace.ranks)
    waits = spans.phase_X == TIMED_PHASES.index("waiting")
    layers, names_M = [], distinct(trace.names_M)
    for model, name in enumerate(names_M):
        for layer in np.unique(trace.layer_X[trace.model_X == model]).tolist():
            rows = (trace.model_X == model) & (trace.layer_X == layer)
            of_layer = (case_C4[:, 0] == model) & (case_C4[:, 2] == layer)
            dispatch_s, combine_s = (
                float(case_s_C[of_layer & (case_C4[:, 3] == TRACE_PHASES.index(phase))].sum()) for phase in EXCHANGES
            )
            waiting_s = float(length_X[waits & (spans.model_X == model) & (spans.layer_X == layer)].sum()) / trace.ranks
            bound_s = _fluid(trace, rows, cluster)
            layers.append(LayerSummary(name, layer, span_s(trace, rows), dispatch_s, combine_s, waiting_s, bound_s))
    models = tuple(ModelSummary(name, *step_times(trace, model)) for model, name in enumerate(names_M))
    seconds = trace.seconds
    phases = {phase: any_model_s(spans, trace.ranks, (phase,)) for phase in TRACE_PHASES}
    phases["waiting"] = any_model_s(spans, trace.ranks, TIMED_PHASES) - any_model_s(spans, trace.ranks, TRACE_PHASES)
    exchanging_s, computing_s = (any_model_s(spans, trace.ranks, group) for group in (EXCHANGES, COMPUTE))
    used_G = busy_G / max(seconds, 1e-30)
    return Summary(trace.kind, seconds, phases, exchanging_s, computing_s, used_G, tuple(layers), models)


def step_times(trace: Trace, model: int) -> tuple[FloatArray, FloatArray]:
    """Returns the times at which the steps of a model begin and end, in seconds from the trace's first start.

    Args:
        trace: a predicted or measured trace.
        model: the model's number in the trace.

    Returns:
        (begin_T, end_T), (T,) float64 each: the time at which each step begins on its first rank, and ends on its last.
    """
    own_X, began_s = trace.model_X == model, trace.start_s_X.min(initial=np.inf)
    steps_T, step_X = np.unique(trace.step_X[own_X], return_inverse=True)
    begins_T, ends_T = np.full(len(steps_T), np.inf), np.zeros(len(steps_T))
    np.minimum.at(begins_T, step_X, trace.start_s_X[own_X] - began_s)
    np.maximum.at(ends_T, step_X, trace.end_s_X[own_X] - began_s)
    return begins_T, ends_T


def any_model_s(bars: Bars, ranks: int, phases: Sequence[str]) -> float:
    """Returns the seconds in which at least one model of a rank is in one of `phases`, mean over ranks."""
    rows = np.isin(bars.phase_X, [TIMED_PHASES.index(phase) for phase in phases])
    _, _, start_s, end_s = union(bars.rank_X[rows], bars.start_s_X[rows], bars.end_s_X[rows])
    return float((end_s - start_s).sum()) / ranks


def phase_seconds(trace: Trace, bars: Bars) -> tuple[dict[str, float], ...]:
    """Returns, for each model, {phase: seconds} for TIMED_PHASES, mean over ranks.

    Args:
        trace: a predicted or measured trace.
        found: the bars of `trace`.
    """
    phases, models = len(TIMED_PHASES), len(trace.names_M)
    of_X, length_X = bars.model_X * phases + bars.phase_X, bars.end_s_X - bars.start_s_X
    total_MY = np.bincount(of_X, weights=length_X, minlength=models * phases).reshape(models, phases) / trace.ranks
    return tuple(dict(zip(TIMED_PHASES, total_Y, strict=True)) for total_Y in total_MY.tolist())


def case_seconds(trace: Trace) -> tuple[IntArray, FloatArray]:
    """Returns the seconds of each case: one phase of one layer in one step of one model.

    A computed phase takes as long as on its slowest rank, an exchange as long as its busiest port direction is busy.

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
    """Returns the events of a trace as bars, with bars for waiting between them. Times count from the first event."""
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
    """Returns (F, 2) int64: for each transfer, the trace rows of sender and receiver; rows without a match are omitted."""
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
    """Returns (X,) float64, start time of each event; a transfer starts when both sender and receiver are ready."""
    start_s_X, pair_F2 = trace.start_s_X.copy(), transfer_ends(trace)
    ready_s_F = trace.start_s_X[pair_F2].max(axis=1, initial=-np.inf)
    for row_F in pair_F2.T:
        waited = ready_s_F < trace.end_s_X[row_F]  # else it had ended before, and waited for nobody
        start_s_X[row_F[waited]] = ready_s_F[waited]
    return start_s_X


def span_s(trace: Trace, rows: NDArray[np.bool_]) -> float:
    """Returns the seconds from first start to last end of each step, summed over steps; `rows` is an (X,) mask of events."""
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


PREDICTED = {*COMPUTE, *EXCHANGES} - {"head"}


@dataclass(frozen=True)
class PhaseError:
    """Predicted and measured seconds of one phase of one model.

    Attributes:
        model, phase: names of the model and the phase.
        predicted_s, measured_s: seconds in the phase, as the mean over ranks.
    """

    model: str
    phase: str
    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float | None:
        """predicted_s / measured_s - 1; None if the phase is not predicted."""
        return gap(self.predicted_s, self.measured_s) if self.predicted_s > 0 else None


@dataclass(frozen=True)
class CaseErrors:
    """Errors |predicted / measured - 1| over cases; a case is one phase of one (model, step, layer).

    Attributes:
        cases: number of cases.
        median, worst: median and largest error.
        worst_at: text with model, step, layer and phase of the case with the largest error.
    """

    cases: int
    median: float
    worst: float
    worst_at: str


@dataclass(frozen=True)
class Comparison:
    """Comparison of a predicted with a measured trace.

    Attributes:
        predicted_s, measured_s: seconds of the whole run.
        phases: errors of the phases, by model, then in the sequence of TIMED_PHASES.
        network, compute: errors over the exchanges, and over the compute phases; None if there are none.
        unmatched: number of cases that occur in only one of the traces.
    """

    predicted_s: float
    measured_s: float
    phases: tuple[PhaseError, ...]
    network: CaseErrors | None
    compute: CaseErrors | None
    unmatched: int

    @property
    def error(self) -> float:
        """predicted_s / measured_s - 1."""
        return gap(self.predicted_s, self.measured_s)


def compare(predicted: Trace, measured: Trace) -> Comparison:
    """Compares a predicted with a measured trace, phase by phase and case by case (see `case_seconds`).

    Args:
        predicted, measured: traces of the same models on the same number of ranks.

    Returns:
        Seconds and errors by phase, and over all cases.

    Raises:
        BadInput: if the traces are of different runs.
    """
    for trace, kind in ((predicted, "predicted"), (measured, "measured")):
        if trace.kind != kind:
            raise BadInput(f"compare: expected a {kind} trace, found a {trace.kind} one")
    expected, simulated = ((trace.names_M, trace.ranks) for trace in (measured, predicted))
    if simulated != expected:
        raise BadInput(f"compare: measured {', '.join(expected[0])} on {expected[1]} ranks, predicted "
                       f"{', '.join(simulated[0])} on {simulated[1]}")  # fmt: skip
    names = distinct(measured.names_M)
    by_model = zip(names, *(phase_seconds(trace, bars(trace)) for trace in (predicted, measured)), strict=True)
    phases = tuple(
        PhaseError(name, phase, predicted_s[phase], measured_s[phase])
        for name, predicted_s, measured_s in by_model
        for phase in TIMED_PHASES
        if predicted_s[phase] > 0 or measured_s[phase] > 0
    )
    predicted_by_case, measured_by_case = (
        {tuple(case): s for case, s in zip(case_C4.tolist(), s_C.tolist(), strict=True)}
        for case_C4, s_C in map(case_seconds, (predicted, measured))
    )
    known = {case for case in (*measured_by_case, *predicted_by_case) if TRACE_PHASES[case[3]] in PREDICTED}
    both = [case for case in sorted(known) if predicted_by_case.get(case, 0.0) > 0 and case in measured_by_case]

    def errors(phases: tuple[str, ...]) -> CaseErrors | None:
        cases = [case for case in both if TRACE_PHASES[case[3]] in phases]
        if not cases:
            return None
        error_C = np.abs([gap(predicted_by_case[case], measured_by_case[case]) for case in cases])
        model, step, layer, phase = cases[int(error_C.argmax())]
        at = f"{names[model]}, step {step}, layer {layer}, {TRACE_PHASES[phase]}"
        return CaseErrors(len(cases), float(np.median(error_C)), float(error_C.max()), at)

    return Comparison(predicted.seconds, measured.seconds, phases, errors(EXCHANGES), errors(COMPUTE), len(known) - len(both))
