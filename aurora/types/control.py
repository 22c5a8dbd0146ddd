"""Reports of control loops: loads, decisions, moves."""

from collections.abc import Mapping
from dataclasses import astuple, dataclass

import numpy as np

from aurora.types.arrays import Value, numbers


@dataclass(frozen=True)
class PlacementChange:
    """A change of a model's placement that its control loop decided.

    Args:
        at_s: time of the decision, in seconds since the run began.
        action, kind, reason: as in `aurora.planner.control.controller.Decision`.
        layers: the layers that change.
        moves: number of experts that GPUs fetch.
        bytes: bytes of these experts' weights.
        took_s: seconds from the decision until the new placement was in force; None if it never was, in a dry run, or because
            the moves failed or the run ended first.
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
    """One window of traffic as a control loop saw it.

    Balancedness is the mean load of the GPUs divided by the largest: 1 is balanced.

    Args:
        at_s: time of the window's decision, in seconds since the run began.
        balancedness: balancedness under the placement in force.
        expected_balancedness: balancedness that the controller expects in the next window, under the placement that it wants.
        age_s: seconds since the placement in force came into force.
        traffic: number of changes of traffic that the controller had detected so far.
    """

    at_s: float
    balancedness: float
    expected_balancedness: float
    age_s: float
    traffic: int


@dataclass(frozen=True, eq=False, repr=False)
class ControlReport(Value):
    """Report of one model's control loop: the loads of its windows, its decisions, and the moves.

    Args:
        model: the model's name.
        dry_run: whether the loop only reported its decisions and moved nothing.
        windows: number of windows of traffic that the loop received.
        skipped: number of received windows that were replaced by a later one before the loop read them.
        decisions: number of decisions by kind of reason.
        balancedness: mean load of the GPUs divided by the largest, in the last window; None: no window had tokens.
        expected_balancedness: the same ratio, as expected after the last decision.
        age_s: seconds since the placement in force came into force.
        bytes: bytes of expert weights that moved.
        move_s: seconds that the moves took.
        failures: number of exceptions while planning, moving or logging.
        stuck: number of times that the loop missed its heartbeat.
        changes: the newest decided changes of the placement.
        series: the newest windows that had tokens.

    Raises:
        BadInput: if a number is not a finite number.
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
        numbers("control report, series", np.array([astuple(window) for window in self.series]).reshape(-1, 5), 2)
        moves = [(each.at_s, each.moves, each.bytes, each.took_s or 0.0, len(each.layers)) for each in self.changes]
        numbers("control report, changes", np.array(moves).reshape(-1, 5), 2)
