"""Numbers for a report's charts, computed on first use: traffic, loads, runs, speed-ups."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from aurora.algorithms.layers_in_threads import Progress, no_progress
from aurora.algorithms.network.port_bounds import nics_of, port_seconds, spread
from aurora.algorithms.network.switch import timed_steps
from aurora.algorithms.placement.cost_model import SUMMED, layer_costs
from aurora.algorithms.workload.traffic import contiguous_split, exchange_bytes, exchange_rows
from aurora.planner.plan import layer_seconds
from aurora.reports.formatting import size
from aurora.reports.inputs import ReportInputs
from aurora.reports.spans import TransferSpans, whole
from aurora.reports.trace_times import EXCHANGES, Bars, Comparison, Summary, bars, compare, summarise
from aurora.types import TRACE_PHASES, Cluster, ModelPlan, Placement, Profile, Trace
from aurora.types.arrays import FloatArray, IntArray


@dataclass(frozen=True)
class Traffic:
    """Traffic of one model's whole profile, and the loads that it causes, under two placements.

    Axis B is the placement: 0 for experts in index order, 1 for the plan.

    Attributes:
        tokens_BLGG: (2, L, G, G) int64, tokens of the dispatch from GPU to GPU, summed over its steps; zero diagonals.
        row_bytes: bytes of one token's row.
        port_s_BLG: (2, L, G) float64, seconds that each GPU's port, or the NIC that it uses, needs for the dispatch.
        expert_s_BLG: (2, L, G) float64, seconds that each GPU needs for its experts; a replica computes its share of the load.
        expert_bound_s_L: (L,) float64, lower bound, over all placements, on the slowest GPU's seconds for its experts.
    """

    tokens_BLGG: IntArray
    row_bytes: int
    port_s_BLG: FloatArray
    expert_s_BLG: FloatArray
    expert_bound_s_L: FloatArray


def contiguous(profile: Profile) -> Placement:
    """Returns the placement of experts in index order (GPU 0 gets the first ones), as engines place them without a plan."""
    gpu_E = contiguous_split(profile.experts, profile.sources).argmax(axis=1)
    return Placement.stack([Placement.unreplicated(gpu_E, profile.sources)] * profile.layers)


def traffic(cluster: Cluster, model: ModelPlan, profile: Profile) -> Traffic:
    """Returns the traffic of a profile under the model's plan, and with experts in index order.

    Args:
        cluster: the plan's cluster.
        model: the model's part of the plan.
        profile: a profile of the same model.
    """
    placements = contiguous(profile), model.placement
    row_bytes = profile.row_bytes(model.deduplicated)
    tokens_BLGG = np.array(
        [[planned_rows(profile, layer, model, placed).sum(axis=0) for layer in range(profile.layers)] for placed in placements]
    )
    port_s_BLG = np.array([[_port_seconds(tokens_GG * row_bytes, cluster) for tokens_GG in side] for side in tokens_BLGG])
    costs_L = [layer_costs(cluster, profile, layer, model.deduplicated) for layer in range(profile.layers)]
    expert_s_BLG = np.array(
        [
            [costs.phase_times(placed.split_EG(layer), model.hierarchy).expert_G for layer, costs in enumerate(costs_L)]
            for placed in placements
        ]
    )
    bound_s_L = np.array([spread(costs.expert_s_WGE[0], model.placement.split_LG is not None) for costs in costs_L])
    return Traffic(tokens_BLGG, row_bytes, port_s_BLG, expert_s_BLG, bound_s_L)


def _port_seconds(bytes_GG: IntArray, cluster: Cluster) -> FloatArray:
    """(G,) seconds of each GPU's port, or of the NIC that it uses if that takes longer."""
    port_s_G, nics = port_seconds(bytes_GG, cluster.network), nics_of(cluster.network)
    return port_s_G if nics is None else np.maximum(port_s_G, nics.seconds(bytes_GG))


def planned_rows(profile: Profile, layer: int, model: ModelPlan, placement: Placement) -> IntArray:
    """Returns (S, G, G) int64, the rows between GPUs in each step of a layer's dispatch, under a given placement."""
    split_EG = placement.split_EG(layer)
    return exchange_rows(profile, layer, split_EG, deduplicated=model.deduplicated, hierarchy=model.hierarchy)


def tokens_of(profile: Profile) -> float:
    """Returns the number of tokens in a profile, over all windows and source ranks."""
    return float(profile.tokens_TLSE.sum()) / (profile.layers * profile.top_k)


def relative_loads(flows: Traffic, profile: Profile) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Returns loads / mean of the layer: (L, E) of experts; (L, G) of GPUs with experts in index order; (L, G) as planned.

    Args:
        flows: the traffic of `profile`.
        profile: the profile. An expert's load is its tokens; a GPU's load is its seconds for dispatch and experts.
    """
    before_LG, after_LG = flows.port_s_BLG + flows.expert_s_BLG
    experts, before, after = (
        load_LX / load_LX.mean(axis=1, keepdims=True).clip(1e-30) for load_LX in (profile.load_LE, before_LG, after_LG)
    )
    return experts, before, after


ALIKE = 3.0  # factor up to which dispatched bytes differ between traffic of which times can be compared: numbers' widths do too


@dataclass(frozen=True)
class Serving:
    """Speed at which requests are served.

    Attributes:
        by: origin of the numbers: "measured", "predicted", or "by the objective" if there is no run.
        name: name of the run or of the way of serving.
        seconds: seconds of all steps, of all models.
        steps: number of steps; concurrent steps of several models count once.
        tokens: tokens of all steps, of all models; None if unknown.
    """

    by: str
    name: str
    seconds: float
    steps: int
    tokens: float | None

    @property
    def step_s(self) -> float:
        """Mean seconds of a step."""
        return self.seconds / self.steps


@dataclass(frozen=True)
class ReportNumbers:
    """Numbers of a report, computed on first use: predictions, times of traces, and traffic of profiles.

    Attributes:
        of: the inputs of the report.
        progress: called with (name of the work, amount done, whole amount).
    """

    of: ReportInputs
    progress: Progress = no_progress

    @cached_property
    def traffic_M(self) -> tuple[Traffic, ...]:
        """Traffic of each model; empty without profiles."""
        pairs = zip(self.of.plan.models, self.of.profiles, strict=False)
        return tuple(traffic(self.of.plan.cluster, model, profile) for model, profile in pairs)

    @cached_property
    def objective_s(self) -> tuple[float, float]:
        """Seconds of all layers by the plan's objective: (experts in index order, as planned). Needs profiles."""
        plan, profiles = self.of.plan, self.of.profiles
        ways = [contiguous(profile) for profile in profiles], [model.placement for model in plan.models]
        before_s, after_s = (float(layer_seconds(plan, way, profiles).sum()) for way in ways)
        return before_s, after_s

    @cached_property
    def planned_MLW(self) -> tuple[tuple[tuple[TransferSpans, TransferSpans], ...], ...]:
        """Transfers of the whole profile in the plan's orders: planned_MLW[model][layer] is (dispatch, combine).

        Empty without profiles.
        """
        cluster = self.of.plan.cluster
        transfers_M = []
        for model, profile in zip(self.of.plan.models, self.of.profiles, strict=False):
            layers = []
            for layer, (dispatch, combine) in enumerate(zip(model.dispatch_L, model.combine_L, strict=True)):
                rows_SGG = planned_rows(profile, layer, model, model.placement)
                there_SGG, back_SGG = (exchange_bytes(rows_SGG, profile, way, model.deduplicated) for way in EXCHANGES)
                times = timed_steps(dispatch, there_SGG, cluster.network), timed_steps(combine, back_SGG, cluster.network)
                layers.append((whole(times[0]), whole(times[1])))
            transfers_M.append(tuple(layers))
        return tuple(transfers_M)

    @cached_property
    def summaries(self) -> tuple[Summary, ...]:
        """Summaries of the traces, in sequence."""
        return tuple(summarise(trace, self.of.plan.cluster) for _, trace in self.of.traces)

    @cached_property
    def bars(self) -> tuple[Bars, ...]:
        """Bars of each trace: the intervals that the timeline draws."""
        return tuple(bars(trace) for _, trace in self.of.traces)

    @cached_property
    def comparison(self) -> Comparison | None:
        """Comparison of the first predicted with the first measured trace; None unless both exist."""
        both = len(self.first) == 2
        return compare(self.first["predicted"][1], self.first["measured"][1]) if both else None

    @property
    def serving(self) -> Serving | None:
        """Speed by the last measured trace, else the last predicted one, else the plan's objective; None if unknown."""
        return next((runs[-1] for runs in self._served if runs), None)

    @property
    def speedup(self) -> tuple[Serving, Serving] | None:
        """Speeds to compare, (before, after): the first run and the last run, which serve the same requests; None if unknown.

        Measured runs are taken if there are two, else predicted ones, else the objective without and with the plan.
        """
        return next(((runs[0], runs[-1]) for runs in self._served if len(runs) > 1), None)

    @cached_property
    def _served(self) -> tuple[list[Serving], list[Serving], list[Serving]]:
        """Speed by measured traces, by predicted ones, and by the objective: experts in index order, and as planned."""
        runs = [self._run(name, trace) for name, trace in self.of.traces]
        measured, predicted = ([run for run in runs if run.by == kind] for kind in ("measured", "predicted"))
        if not (profiles := self.of.profiles):
            return measured, predicted, []
        windows = [profile.windows if self.of.plan.options.aim in SUMMED else 1 for profile in profiles]  # else: of one window
        tokens = sum(tokens_of(profile) * part / profile.windows for profile, part in zip(profiles, windows, strict=True))
        ways = zip(("experts in index order", "as planned"), self.objective_s, strict=True)
        return measured, predicted, [Serving("by the objective", *way, max(windows), tokens) for way in ways]

    def _run(self, name: str, trace: Trace) -> Serving:
        """Speed that a trace shows. Its tokens are the profiles', times the bytes that it dispatches over theirs."""
        tokens = 0.0
        for model, (flows, profile) in enumerate(zip(self.traffic_M, self.of.profiles, strict=True)):
            planned_bytes = int(flows.tokens_BLGG[1].sum()) * flows.row_bytes
            of_model = model if self.of.plan.colocated else None  # else all are of one model, or of its micro-batches
            tokens += tokens_of(profile) * (_dispatched_bytes(trace, of_model) / planned_bytes if planned_bytes else 1.0)
        return Serving(trace.kind, name, trace.seconds, len(np.unique(trace.step_X)), tokens if self.traffic_M else None)

    @cached_property
    def first(self) -> dict[str, tuple[str, Trace]]:
        """The first trace of each kind, "predicted" and "measured", with its name."""
        return {trace.kind: (name, trace) for name, trace in reversed(self.of.traces)}

    @cached_property
    def why_incomparable(self) -> str | None:
        """Sentence on why first predicted and first measured trace cannot be compared: their traffic differs too much.

        None if they can be compared.
        """
        if len(self.first) < 2:
            return None
        (first, predicted), (other, measured) = self.first["predicted"], self.first["measured"]
        sent, run = (_dispatched_bytes(trace) for trace in (predicted, measured))
        if sent <= ALIKE * run and run <= ALIKE * sent:
            return None
        return f"{first} dispatches {size(sent)}, {other} {size(run)}: aurora run --compare predicts the run's own traffic"

    def copies_LE(self, model: int) -> IntArray:
        """Returns (L, E) int64: the number of GPUs that hold each expert of the model with index `model`."""
        placement = self.of.plan.models[model].placement
        return np.array([placement.holds_EG(layer).sum(axis=1) for layer in range(len(placement.slots_LG))])


def _dispatched_bytes(trace: Trace, model: int | None = None) -> int:
    """Bytes that a trace sends in dispatches, of all models or of one."""
    rows = trace.sent_X & (trace.phase_X == TRACE_PHASES.index("dispatch"))
    if model is not None:
        rows &= trace.model_X == model
    return int(trace.bytes_X[rows].sum())
