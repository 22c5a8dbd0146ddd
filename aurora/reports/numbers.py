"""Numbers that a report's figures are drawn from, each computed when it is first needed."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from aurora.advisor.sharing import WaysCompared, compare_sharing
from aurora.errors import InfeasiblePlan
from aurora.planner.evaluate import Drift, drift
from aurora.planner.placement.cost_model import SUMMED
from aurora.planner.workload.traffic import exchange_bytes
from aurora.reports.compare import Comparison, compare
from aurora.reports.formatting import size
from aurora.reports.inputs import ReportInputs
from aurora.reports.spans import TransferSpans, planned
from aurora.reports.trace_times import EXCHANGES, Bars, Summary, bars, span_s, summarise
from aurora.reports.traffic_loads import Traffic, objective_s, placement_bounds_s, planned_rows, tokens_of, traffic
from aurora.types import TRACE_PHASES, ControlReport, Trace
from aurora.types.arrays import IntArray

SAME = 0.01  # bytes that differ less are of the same traffic
ALIKE = 3.0  # factor up to which dispatched bytes differ between traffic of which times can be compared: numbers' widths do too


@dataclass(frozen=True)
class Serving:
    """How fast requests are served.

    Attributes:
        by: "measured", "predicted", or "by the objective" where there is no run.
        name: name of the run or of the way of serving.
        seconds: seconds of all steps, of all models.
        steps: number of steps; those of several models take place together.
        tokens: tokens of all steps, of all models; None if unknown.
        exact: whether `tokens` are the profiles' own; else they are estimated from the bytes that were sent.
        stage_s: by stage ("prefill", "decode"), seconds from a step's first event to its last, the mean; empty if unknown.
    """

    by: str
    name: str
    seconds: float
    steps: int
    tokens: float | None
    exact: bool = True
    stage_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def step_s(self) -> float:
        """Seconds of a step, the mean."""
        return self.seconds / self.steps

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second; None if the tokens are unknown."""
        return None if self.tokens is None else self.tokens / self.seconds


@dataclass(frozen=True)
class ReportNumbers:
    """Numbers of a report: what its plan promises, what its traces took and what its profiles hold.

    Attributes:
        of: the inputs of the report.
    """

    of: ReportInputs

    @cached_property
    def traffic_M(self) -> tuple[Traffic, ...]:
        """Each model's traffic; empty without profiles."""
        pairs = zip(self.of.plan.models, self.of.profiles, strict=False)
        return tuple(traffic(self.of.plan.cluster, model, profile) for model, profile in pairs)

    @cached_property
    def objective_s(self) -> tuple[float, float]:
        """(without the plan, with the plan), the seconds of all layers; needs profiles."""
        return objective_s(self.of.plan, self.of.profiles)

    @cached_property
    def planned_MLW(self) -> tuple[tuple[tuple[TransferSpans, TransferSpans], ...], ...]:
        """planned_MLW[m][l] is (dispatch, combine) of the whole profile in the plan's orders; empty without profiles."""
        cluster = self.of.plan.cluster
        found = []
        for model, profile in zip(self.of.plan.models, self.of.profiles, strict=False):
            layers = []
            for layer, (dispatch, combine) in enumerate(zip(model.dispatch_L, model.combine_L, strict=True)):
                rows_SGG = planned_rows(profile, layer, model, model.placement)
                there_SGG, back_SGG = (exchange_bytes(rows_SGG, profile, way, model.deduplicated) for way in EXCHANGES)
                layers.append((planned(dispatch, there_SGG, cluster), planned(combine, back_SGG, cluster)))
            found.append(tuple(layers))
        return tuple(found)

    @cached_property
    def drift_M(self) -> tuple[Drift, ...]:
        """Each model's drift; empty without later profiles. A drift has a loss only if the plan was made from that profile."""
        plan = self.of.plan
        pairs = zip(self.of.profiles, self.of.later, strict=False)
        made_from = [model.profile_digest for model in plan.models]
        return tuple(drift(given, later, plan if made_from == [given.digest] else None) for given, later in pairs)

    @cached_property
    def sharing(self) -> WaysCompared | None:
        """What sharing the GPUs, or micro-batches, would bring a plan of one model.

        None for other plans, without profiles, and where some GPU's memory does not hold an equal share of the experts.
        """
        if self.of.plan.colocated or not self.of.profiles:
            return None
        try:
            return compare_sharing(self.of.plan.cluster, self.of.profiles[0])
        except InfeasiblePlan:
            return None

    @cached_property
    def control(self) -> dict[str, ControlReport]:
        """What control loops decided in all traces, by the model's name, numbered where there are more of it."""
        reports = [report for _, trace in self.of.traces for report in trace.control_M]
        models = [report.model for report in reports]
        names = [model if models.count(model) == 1 else f"{model} ({i})" for i, model in enumerate(models)]
        return dict(zip(names, reports, strict=True))

    @cached_property
    def summaries(self) -> tuple[Summary, ...]:
        """Each trace's summary."""
        return tuple(summarise(trace, self.of.plan.cluster) for _, trace in self.of.traces)

    @cached_property
    def bars(self) -> tuple[Bars, ...]:
        """The Bars of each trace."""
        return tuple(bars(trace) for _, trace in self.of.traces)

    @cached_property
    def comparison(self) -> Comparison | None:
        """The first predicted trace compared with the first measured one; None unless there are both."""
        if self.predicted is None or self.measured is None:
            return None
        return compare(self.of.traces[self.predicted][1], self.of.traces[self.measured][1])

    @cached_property
    def serving(self) -> Serving | None:
        """What the plan gives: the last measured trace, else the last predicted one, else its objective; None if unknown."""
        for kind in ("measured", "predicted"):
            if runs := [run for run in self._runs if run.by == kind]:
                return runs[-1]
        return self._ways[1] if self._ways else None

    @cached_property
    def speedup(self) -> tuple[Serving, Serving] | None:
        """(before, after): the baseline or the first run, and the last run; measured, else predicted, else by the objective.

        Compared runs serve the same requests, so that they have the same tokens.
        """
        for kind in ("measured", "predicted"):
            runs, baseline = [run for run in self._runs if run.by == kind], self.of.baseline
            if runs and kind in baseline.seconds:
                runs.insert(0, replace(runs[-1], name=baseline.name, seconds=baseline.seconds[kind], stage_s={}))
            if len(runs) > 1:
                return replace(runs[0], tokens=runs[-1].tokens, exact=runs[-1].exact), runs[-1]
        return self._ways

    @cached_property
    def _runs(self) -> tuple[Serving, ...]:
        """What each trace gives."""
        return tuple(self._run(name, trace) for name, trace in self.of.traces)

    @cached_property
    def _ways(self) -> tuple[Serving, Serving] | None:
        """Experts in the order of their numbers, and as planned, by the objective; None without profiles."""
        profiles = self.of.profiles
        if not profiles:
            return None
        windows = [profile.windows if self.of.plan.options.aim in SUMMED else 1 for profile in profiles]  # else: of one window
        tokens = sum(tokens_of(profile) * part / profile.windows for profile, part in zip(profiles, windows, strict=True))
        names = "experts in the order of their numbers", "as planned"
        before, after = (
            Serving("by the objective", name, seconds, max(windows), tokens)
            for name, seconds in zip(names, self.objective_s, strict=True)
        )
        return before, after

    def _run(self, name: str, trace: Trace) -> Serving:
        """What a trace gives. Its tokens are the profiles', times the bytes that it dispatches over those of the profiles."""
        tokens, exact = 0.0, True
        for model, (flows, profile) in enumerate(zip(self.traffic_M, self.of.profiles, strict=False)):
            planned_bytes = int(flows.tokens_BLGG[1].sum()) * flows.row_bytes
            of_model = model if self.of.plan.colocated else None  # else all are of one model, or of its micro-batches
            part = _dispatched_bytes(trace, of_model) / planned_bytes if planned_bytes else 1.0
            same = abs(part - 1) < SAME
            tokens, exact = tokens + tokens_of(profile) * (1.0 if same else part), exact and same
        steps = np.unique(trace.step_X).tolist()
        stage_s = {}
        if exact and len(self.of.profiles) == 1 and (stage_T := self.of.profiles[0].stage_T) and len(stage_T) == len(steps):
            step_s_T = [span_s(trace, trace.step_X == step) for step in steps]
            pairs = list(zip(stage_T, step_s_T, strict=True))
            stage_s = {stage: float(np.mean([s for its, s in pairs if its == stage])) for stage in dict.fromkeys(stage_T)}
        return Serving(trace.kind, name, trace.seconds, len(steps), tokens if self.traffic_M else None, exact, stage_s)

    @cached_property
    def placement_bounds_s(self) -> tuple[float, float] | None:
        """(without replicas, with replicas): lower bounds in seconds over all placements on this traffic; None if unknown."""
        plan = self.of.plan
        if not self.of.profiles or plan.colocated or plan.models[0].deduplicated:
            return None
        return placement_bounds_s(plan, self.of.profiles[0])

    @property
    def predicted(self) -> int | None:
        """Index of the first predicted trace; None without one."""
        return self._first("predicted")

    @property
    def measured(self) -> int | None:
        """Index of the first measured trace; None without one."""
        return self._first("measured")

    def _first(self, kind: str) -> int | None:
        return next((i for i, (_, trace) in enumerate(self.of.traces) if trace.kind == kind), None)

    @cached_property
    def other_traffic(self) -> str | None:
        """In a sentence, that the first predicted and the first measured trace are of traffic too different to be compared."""
        if self.predicted is None or self.measured is None:
            return None
        (one, predicted), (other, measured) = (self.of.traces[number] for number in (self.predicted, self.measured))
        sent, run = (_dispatched_bytes(trace) for trace in (predicted, measured))
        if sent <= ALIKE * run and run <= ALIKE * sent:
            return None
        return f"{one} dispatches {size(sent)}, {other} {size(run)}: aurora run --compare predicts the run's own traffic"

    def copies_LE(self, model: int) -> IntArray:
        """Returns (L, E) int64: how many GPUs hold each expert of a model, given by its index."""
        placement = self.of.plan.models[model].placement
        held = [[expert for gpu in layer for expert in gpu] for layer in placement.slots_LG]
        return np.array([np.bincount(layer, minlength=placement.experts) for layer in held])


def _dispatched_bytes(trace: Trace, model: int | None = None) -> int:
    """Bytes that a trace sends in dispatches, of all models or of one."""
    rows = trace.sent_X & (trace.phase_X == TRACE_PHASES.index("dispatch"))
    if model is not None:
        rows &= trace.model_X == model
    return int(trace.bytes_X[rows].sum())
