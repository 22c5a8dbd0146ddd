"""Inputs of a report: a plan, traces of it, and the traffic that it serves."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from aurora.algorithms.check.fit import check_traffic
from aurora.errors import BadInput
from aurora.reports.formatting import distinct
from aurora.types import TRACE_PHASES, Plan, Profile, Trace
from aurora.types.options import MOST_MICRO_BATCHES

FORMS = {"html": "report.html", "perfetto": "report.perfetto.json.gz"}  # and the file that the command line writes by default


@dataclass(frozen=True)
class ReportInputs:
    """Inputs of a report: a plan, its traces and its traffic.

    Attributes:
        plan: the plan.
        traces: (name, trace) pairs; all are compared with the first.
        profiles: the traffic, one profile for each model of the plan; or empty.
        without: for a report without profiles, a sentence on how to provide them.

    Raises:
        BadInput: if a trace or a profile belongs to another plan.
    """

    plan: Plan
    traces: tuple[tuple[str, Trace], ...] = ()
    profiles: tuple[Profile, ...] = ()
    without: str = "Pass --profile once per model."

    def __post_init__(self) -> None:
        for name, trace in self.traces:
            _check_trace(self.plan, name, trace)
        if self.profiles:
            check_traffic(self.plan, self.profiles)

    @property
    def models(self) -> tuple[str, ...]:
        """The models' names, numbered if two have the same name."""
        return distinct([model.model for model in self.plan.models])

    @property
    def traced(self) -> tuple[str, ...]:
        """Names of what the plan's traces time: the models, or the micro-batches of a single model."""
        return max((self.names_in(trace) for _, trace in self.traces), key=len, default=self.models)

    def names_in(self, trace: Trace) -> tuple[str, ...]:
        """Returns the names of a trace's models, or of its micro-batches if it has any."""
        return self.models if len(trace.names_M) == len(self.models) else trace.names_M

    @property
    def gpus(self) -> tuple[str, ...]:
        """Names of the GPUs, by rank."""
        return tuple(str(rank) for rank in range(len(self.plan.cluster)))


def named_traces(paths: Sequence[str], traces: Sequence[Trace]) -> dict[str, Trace]:
    """Returns traces by name: the file's name, or its path if two files share a name; repeated paths are numbered.

    Args:
        paths: paths of the traces' files.
        traces: the traces, in the sequence of `paths`.
    """
    short = [path.rsplit("/", 1)[-1] for path in paths]
    names = short if len(set(short)) == len(short) else list(paths)
    named: dict[str, Trace] = {}
    for name, trace in zip(names, traces, strict=True):
        named[name if name not in named else f"{name} ({len(named)})"] = trace
    return named


def _check_trace(plan: Plan, name: str, trace: Trace) -> None:
    cuts: Sequence[int] = (1,) if plan.colocated else range(1, MOST_MICRO_BATCHES + 1)
    named = {parts: plan.with_micro_batches(parts).served_names for parts in cuts}
    parts = next((parts for parts, names in named.items() if names == tuple(trace.names_M)), 1)
    names = named[parts]
    if (names, len(plan.cluster)) != (tuple(trace.names_M), trace.ranks):
        raise BadInput(
            f"{name}: a trace of another plan: expected {' and '.join(names)} on {len(plan.cluster)} ranks, "
            f"found {' and '.join(trace.names_M)} on {trace.ranks}"
        )
    if not len(trace):
        raise BadInput(f"{name}: expected events, found an empty trace")
    limits = {"rank": len(plan.cluster), "peer": len(plan.cluster), "model": len(names), "phase": len(TRACE_PHASES)}
    for column, limit in limits.items():
        if (most := int(getattr(trace, f"{column}_X").max())) >= limit:
            raise BadInput(f"{name}: a trace of another plan: expected {column} 0 to {limit - 1}, found {most}")
    layers_M = np.array([len(model.dispatch_L) for model in plan.models] * parts)
    if (beyond := trace.layer_X >= layers_M[trace.model_X]).any():
        model, layer = int(trace.model_X[beyond][0]), int(trace.layer_X[beyond][0])
        raise BadInput(
            f"{name}: a trace of another plan: expected {layers_M[model]} MoE layers of {names[model]!r}, found layer {layer}"
        )
