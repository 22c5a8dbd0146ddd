"""Comparison of a predicted Trace with a measured one: what the prediction gets wrong, phase by phase."""

from dataclasses import dataclass

import numpy as np

from aurora.errors import BadInput
from aurora.reports.formatting import distinct
from aurora.reports.trace_times import COMPUTE, EXCHANGES, TIMED_PHASES, bars, case_seconds, phase_seconds
from aurora.types import TRACE_PHASES, Trace
from aurora.types.arrays import gap

PREDICTED = {*COMPUTE, *EXCHANGES} - {"head"}


@dataclass(frozen=True)
class PhaseError:
    """One phase of one model.

    Attributes:
        model, phase: names of the model and the phase.
        predicted_s, measured_s: as `Summary.phases_M`.
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
        phases: by model, in the order of TIMED_PHASES.
        network, compute: errors over the exchanges, and over the computed phases; None if there are none.
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
    """Compares a predicted with a measured trace, phase by phase and case by case.

    Args:
        predicted, measured: traces of the same models on equally many ranks.

    Returns:
        Seconds and errors by phase, and over all cases, as `case_seconds` has them.

    Raises:
        BadInput: if the traces are of different runs.
    """
    for trace, kind in ((predicted, "predicted"), (measured, "measured")):
        if trace.kind != kind:
            raise BadInput(f"compare: expected a {kind} trace, found a {trace.kind} one")
    expected, found = ((trace.names_M, trace.ranks) for trace in (measured, predicted))
    if found != expected:
        raise BadInput(f"compare: measured {', '.join(expected[0])} on {expected[1]} ranks, predicted "
                       f"{', '.join(found[0])} on {found[1]}")  # fmt: skip
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
