"""Comparison of a predicted Trace with a measured one: what the prediction gets wrong, phase by phase."""

from dataclasses import dataclass

import numpy as np

from aurora.errors import BadInput
from aurora.reports.summary import COMPUTE, EXCHANGES
from aurora.types import TRACE_PHASES, Trace
from aurora.types.arrays import IntArray, gap

Case = tuple[int, int, int, int]  # model, step, layer, phase


@dataclass(frozen=True)
class PhaseError:
    """One phase of one model, summed over steps and layers.

    Attributes:
        model, phase: names of the model and the phase.
        predicted_s: predicted seconds; None if the phase is not predicted.
        measured_s: measured seconds on the slowest rank.
    """

    model: str
    phase: str
    predicted_s: float | None
    measured_s: float

    @property
    def error(self) -> float | None:
        """predicted_s / measured_s - 1; None if the phase is not predicted."""
        return None if self.predicted_s is None else gap(self.predicted_s, self.measured_s)


@dataclass(frozen=True)
class CaseErrors:
    """Errors |predicted / measured - 1| over cases; a case is one phase of one (model, step, layer).

    Attributes:
        cases: number of cases.
        median, worst: median and largest error.
        worst_at: model, step, layer and phase of the case with the largest error, in words.
    """

    cases: int
    median: float
    worst: float
    worst_at: str


@dataclass(frozen=True)
class Comparison:
    """A prediction compared with a measurement.

    Attributes:
        predicted_s, measured_s: seconds of the whole run.
        phases: the error of each phase, by model, in the sequence of TRACE_PHASES.
        network, compute: errors over the exchanges, and over all other phases; None if there are none.
        unmatched: how many cases only one of the traces has.
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
    """Compares a predicted with a measured trace, case by case.

    An exchange counts from the moment when both ends of its first transfer are ready until its last transfer ends. Any other
    phase counts with the seconds of its slowest rank.

    Args:
        predicted, measured: traces of the same models on equally many ranks.

    Returns:
        Seconds and errors by phase, and over all cases.

    Raises:
        BadInput: if the traces are of different runs, or one holds a transfer without its other end.
    """
    for trace, kind in ((predicted, "predicted"), (measured, "measured")):
        if trace.kind != kind:
            raise BadInput(f"compare: expected a {kind} trace, found a {trace.kind} one")
    expected, found = ((trace.names_M, trace.ranks) for trace in (measured, predicted))
    if found != expected:
        raise BadInput(f"compare: measured {', '.join(expected[0])} on {expected[1]} ranks, predicted "
                       f"{', '.join(found[0])} on {found[1]}")  # fmt: skip
    predicted_by_case, measured_by_case = _cases(predicted), _cases(measured)
    phases = []
    for model, name in enumerate(measured.names_M):
        for phase, what in enumerate(TRACE_PHASES):
            predicted_s, measured_s = (
                sum(s for case, s in cases.items() if (case[0], case[3]) == (model, phase))
                for cases in (predicted_by_case, measured_by_case)
            )
            if predicted_s > 0 or measured_s > 0:
                phases.append(PhaseError(name, what, None if what == "counts" else predicted_s, measured_s))
    both = [case for case in measured_by_case if case[3] in (*COMPUTE, *EXCHANGES) and predicted_by_case.get(case, 0.0) > 0]
    known = {case for case in (*measured_by_case, *predicted_by_case) if case[3] in (*COMPUTE, *EXCHANGES)}

    def errors(kinds: tuple[int, ...]) -> CaseErrors | None:
        cases = [case for case in both if case[3] in kinds]
        if not cases:
            return None
        error_C = np.abs([gap(predicted_by_case[case], measured_by_case[case]) for case in cases])
        model, step, layer, phase = cases[int(error_C.argmax())]
        at = f"{measured.names_M[model]}, step {step}, layer {layer}, {TRACE_PHASES[phase]}"
        return CaseErrors(len(cases), float(np.median(error_C)), float(error_C.max()), at)

    return Comparison(
        predicted.seconds, measured.seconds, tuple(phases), errors(EXCHANGES), errors(COMPUTE), len(known) - len(both)
    )


def _cases(trace: Trace) -> dict[Case, float]:
    """Returns how long every case took, in seconds."""
    case_X4 = np.stack([trace.model_X, trace.step_X, trace.layer_X, trace.phase_X], axis=1)
    case_C4, case_X = np.unique(case_X4, axis=0, return_inverse=True)
    case_X = case_X.reshape(-1)
    spent_CG = np.zeros((len(case_C4), trace.ranks))
    local_X = trace.peer_X < 0
    np.add.at(spent_CG, (case_X[local_X], trace.rank_X[local_X]), (trace.end_s_X - trace.start_s_X)[local_X])
    seconds_C = spent_CG.max(axis=1, initial=0.0)
    sent, received = _ends(trace)
    of_X = case_X[sent]
    began_C, ended_C = np.full(len(case_C4), np.inf), np.full(len(case_C4), -np.inf)
    np.minimum.at(began_C, of_X, np.maximum(trace.start_s_X[sent], trace.start_s_X[received]))
    np.maximum.at(ended_C, of_X, np.maximum(trace.end_s_X[sent], trace.end_s_X[received]))
    carried = np.isfinite(began_C)
    seconds_C[carried] = (ended_C - began_C)[carried]
    return {(m, t, l, p): s for (m, t, l, p), s in zip(case_C4.tolist(), seconds_C.tolist(), strict=True)}


def _ends(trace: Trace) -> tuple[IntArray, IntArray]:
    """Returns the rows of every transfer's sender and of its receiver."""
    moved_X = np.flatnonzero(trace.peer_X >= 0)
    sent_X = trace.sent_X[moved_X]
    src_X, dst_X = (np.where(sent_X == out, trace.rank_X[moved_X], trace.peer_X[moved_X]) for out in (True, False))
    same = (column[moved_X] for column in (trace.phase_X, trace.layer_X, trace.step_X, trace.model_X))
    keys = (trace.start_s_X[moved_X], dst_X, src_X, *same)
    by_pair = np.lexsort(keys)
    sent, received = (by_pair[sent_X[by_pair] == out] for out in (True, False))
    if len(sent) != len(received) or any((key[sent] != key[received]).any() for key in keys[1:]):
        raise BadInput(f"compare: a {trace.kind} trace holds a transfer without its other end")
    return moved_X[sent], moved_X[received]
