"""Reports: loads and decisions of control loops while a model served; sums of coded aggregations."""

from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aurora.types.arrays import Value, numbers


@dataclass(frozen=True)
class PlacementChange:
    """A change of a model's placement that its control loop decided. Times are seconds since the run began.

    Args:
        at_s: when it was decided.
        action, kind, reason: as of `aurora.planner.control.controller.Decision`.
        layers: the layers that change.
        moves: how many experts move.
        bytes: of their weights.
        took_s: seconds until the placement was in force; None: it never was, since the run was dry, the moves failed or the
            run ended before.
    """

    at_s: float
    action: str
    kind: str
    reason: str
    layers: tuple[int, ...]
    moves: int
    bytes: int
    took_s: float | None


@dataclass(frozen=True)
class ControlWindow:
    """A window of traffic as a control loop saw it, or some in sequence: means, but time, age and traffic are the last one's.

    Args:
        at_s: when it was decided on, in seconds since the run began.
        windows: how many windows these are.
        balancedness: mean over largest load of the GPUs, by the placement in force.
        expected_balancedness: the same of the placement wanted, in the next window.
        age_s: seconds since the placement came into force.
        traffic: how many times traffic had changed until then.
    """

    at_s: float
    windows: int
    balancedness: float
    expected_balancedness: float
    age_s: float
    traffic: int


@dataclass(frozen=True, eq=False, repr=False)
class ControlReport(Value):
    """Loads that a control loop saw and its decisions for one model. In a dry run it is what it would have done.

    Args:
        model: the model's name.
        dry_run: whether it only said what it would do.
        windows: windows of traffic.
        skipped: of these, how many were replaced by later ones before they were looked at.
        decisions: how many, by kind of reason.
        balancedness: mean over largest load of the GPUs in the last window; None: no window had tokens.
        expected_balancedness: the same as expected after the last decision.
        age_s: seconds since the placement in force came into force.
        bytes: of expert weights that moved.
        move_s: seconds in which they did.
        failures: of planning, moving or saying.
        stuck: how many times the loop did not get on.
        changes: the newest changes that were decided.
        series: the windows that had tokens; in long runs neighbours are joined.

    Raises:
        BadInput: if numbers are none, or not finite.
    """

    model: str
    dry_run: bool
    windows: int
    skipped: int
    decisions: Mapping[str, int]
    balancedness: float | None
    expected_balancedness: float | None
    age_s: float
    bytes: int
    move_s: float
    failures: int
    stuck: int
    changes: tuple[PlacementChange, ...]
    series: tuple[ControlWindow, ...]

    def __post_init__(self) -> None:
        last = [value for value in (self.balancedness, self.expected_balancedness) if value is not None]
        counted = [self.windows, self.skipped, self.bytes, self.failures, self.stuck, *self.decisions.values()]
        numbers("control report", [*counted, *last, self.age_s, self.move_s])
        numbers("control report, series", np.array([astuple(window) for window in self.series]).reshape(-1, 6), 2)
        moves = [(each.at_s, each.moves, each.bytes, each.took_s or 0.0, len(each.layers)) for each in self.changes]
        numbers("control report, changes", np.array(moves).reshape(-1, 5), 2)


@dataclass(frozen=True)
class WorkerReport:
    """One worker's part in an aggregation round.

    Attributes:
        worker: the worker's number.
        batches: the batches that it holds.
        state: "working", "used", "not needed" (its batches had come already), "not waited for", "wrong: ..." (it sent what its
            batches do not give), or what else was wrong with it.
        seconds: seconds from the start of the round until its message came or it was given up; None before that.
    """

    worker: int
    batches: tuple[int, ...]
    state: str = "working"
    seconds: float | None = None


@dataclass(frozen=True, eq=False, repr=False)
class AggregationResult(Value):
    """The sum of one aggregation round.

    Attributes:
        total: the sum over all batches, in the shape of one batch's result.
        arrived: the workers whose messages came before the sum was known, in the order of arrival.
        reports: one report per worker.
        seconds: seconds of the whole round.
        compute_s: the longest time that an arrived worker computed, in seconds.
        late: number of messages that belonged to earlier rounds or were sent twice.
    """

    total: NDArray[Any]
    arrived: tuple[int, ...]
    reports: tuple[WorkerReport, ...]
    seconds: float
    compute_s: float
    late: int = 0
