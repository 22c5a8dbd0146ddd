"""Numbers that a report's figures are drawn from, each computed when it is first needed."""

from dataclasses import dataclass
from functools import cached_property
from itertools import repeat

import numpy as np

from aurora.planner.workload.drift import Drift, drift
from aurora.reports.compare import Comparison, compare
from aurora.reports.inputs import ReportInputs
from aurora.reports.spans import TransferSpans, planned
from aurora.reports.trace_times import Bars, Summary, bars, summarise
from aurora.reports.traffic_loads import Traffic, objective_s, placement_bounds_s, traffic
from aurora.types.arrays import IntArray


@dataclass(frozen=True)
class Speedup:
    """How much sooner a run is done.

    Attributes:
        by: "measured", "predicted", or "by the objective" where there are no two runs.
        before, after: names of the two runs that are compared.
        before_s, after_s: seconds of these runs.
    """

    by: str
    before: str
    before_s: float
    after: str
    after_s: float


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
        for model, flows, profile in zip(self.of.plan.models, self.traffic_M, self.of.profiles, strict=False):
            tokens_LGG = flows.tokens_BLGG[1]
            there = map(planned, model.dispatch_L, tokens_LGG * flows.row_bytes, repeat(cluster))
            back = map(planned, model.combine_L, tokens_LGG.transpose(0, 2, 1) * profile.combine_bytes, repeat(cluster))
            found.append(tuple(zip(there, back, strict=True)))
        return tuple(found)

    @cached_property
    def drift_M(self) -> tuple[Drift, ...]:
        """Each model's drift; empty without later profiles. A drift has a loss only if the plan was made from that profile."""
        plan = self.of.plan
        pairs = zip(self.of.profiles, self.of.later, strict=False)
        made_from = [model.profile_digest for model in plan.models]
        return tuple(drift(given, later, plan if made_from == [given.digest] else None) for given, later in pairs)

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
    def speedup(self) -> Speedup | None:
        """Speed-up of the last measured trace over the baseline or the first; else of predicted ones, else by the objective."""
        for kind in ("measured", "predicted"):
            runs = [(self.of.baseline.name, seconds) for by, seconds in self.of.baseline.seconds.items() if by == kind]
            runs += [(name, trace.seconds) for name, trace in self.of.traces if trace.kind == kind]
            if len(runs) > 1:
                return Speedup(kind, *runs[0], *runs[-1])
        if not self.of.profiles:
            return None
        before_s, after_s = self.objective_s
        return Speedup("by the objective", "experts in the order of their numbers", before_s, "as planned", after_s)

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

    def copies_LE(self, model: int) -> IntArray:
        """Returns (L, E) int64: how many GPUs hold each expert of a model, given by its index."""
        placement = self.of.plan.models[model].placement
        held = [[expert for gpu in layer for expert in gpu] for layer in placement.slots_LG]
        return np.array([np.bincount(layer, minlength=placement.experts) for layer in held])
