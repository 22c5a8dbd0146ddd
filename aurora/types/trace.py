"""Trace: measured or predicted events, in the same columns, so that the two can be compared; and reports of control loops."""

from collections import deque
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aurora.errors import BadInput
from aurora.types.arrays import FloatArray, IntArray, Value, check_arrays, check_name, locked, numbers

TRACE_PHASES = ("gate", "counts", "dispatch", "expert", "combine", "aggregate", "head", "moves")
COMPUTE_PHASES = ("gate", "expert", "aggregate", "head")  # in which a rank's GPU computes


@dataclass(frozen=True)
class PlacementChange:
    """A change of a model's placement that its control loop decided.

    Args:
        at_s: time of the decision, in seconds since the run began.
        action, kind, reason: as in `aurora.algorithms.control.controller.Decision`.
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
        moves = [(change.at_s, change.moves, change.bytes, change.took_s or 0.0, len(change.layers)) for change in self.changes]
        numbers("control report, changes", np.array(moves).reshape(-1, 5), 2)


@dataclass(frozen=True, eq=False, repr=False)
class Trace(Value):
    """Events of a run, one row each, sorted by start. A transfer has two rows, one at the sender and one at the receiver.

    Args:
        kind: "predicted" or "measured".
        names_M: the models' names.
        ranks: number of ranks.
        rank_X: (X,) int64, the rank of each event.
        model_X: (X,) int64, the model.
        step_X: (X,) int64, the step of the run.
        layer_X: (X,) int64, the MoE layer.
        phase_X: (X,) int64, index into TRACE_PHASES; "head" is the work after the last layer, which predictions spread over
            the gates; "moves" is work after a step while experts move: transfers of weights and changes of layers to the new
            placement, all recorded as layer 0.
        peer_X: (X,) int64, the other rank of a transfer; -1 otherwise.
        sent_X: (X,) bool, whether the row is the sender's end of a transfer.
        start_s_X: (X,) float64, seconds since the start of the run.
        end_s_X: (X,) float64, seconds since the start of the run.
        bytes_X: (X,) int64, payload bytes of a transfer.
        control_M: reports of the models' control loops, one per model; empty without `adapt`.

    Raises:
        BadInput: if columns differ in length or hold invalid numbers, or a control loop is of another model.
    """

    kind: str
    names_M: tuple[str, ...]
    ranks: int
    rank_X: IntArray
    model_X: IntArray
    step_X: IntArray
    layer_X: IntArray
    phase_X: IntArray
    peer_X: NDArray[Any]  # which may be below zero
    sent_X: NDArray[np.bool_]
    start_s_X: FloatArray
    end_s_X: FloatArray
    bytes_X: IntArray
    control_M: tuple[ControlReport, ...] = ()

    COLUMNS = (
        *("rank_X", "model_X", "step_X", "layer_X", "phase_X", "bytes_X"),
        *("peer_X", "sent_X", "start_s_X", "end_s_X"),
    )

    def __post_init__(self) -> None:
        if self.kind not in ("predicted", "measured"):
            raise BadInput(f"trace: kind must be predicted or measured, found {self.kind!r}")
        for name in self.names_M:
            check_name("trace: names_M", name)
        check_arrays(self, "trace, ")
        for name, dtype in (("peer_X", np.int64), ("sent_X", np.bool_)):
            object.__setattr__(self, name, locked(np.array(getattr(self, name), dtype=dtype)))
            if len(getattr(self, name)) != len(self):
                raise BadInput(f"trace, {name}: expected {len(self)} along X as in rank_X, found {len(getattr(self, name))}")
        if (self.end_s_X < self.start_s_X).any():
            raise BadInput("trace: an event ends before it starts")
        for report in self.control_M:
            if report.model not in self.names_M:
                raise BadInput(f"trace: expected decisions on {' or '.join(self.names_M)}, found some on {report.model!r}")

    def __len__(self) -> int:
        return len(self.rank_X)

    @property
    def seconds(self) -> float:
        """Seconds from the first start to the last end."""
        return float(self.end_s_X.max() - self.start_s_X.min()) if len(self) else 0.0


TransferEnd = tuple[int, bool, int]  # the rank at the other end, whether this one has sent, and bytes
LOCAL: TransferEnd = (-1, False, 0)  # of a phase without a transfer


class TraceRecorder:
    """Collects events of the simulator or the runtime and makes a Trace of them.

    Args:
        kind, names_M, ranks: as in Trace.
        most: maximum number of rows; the newest are kept. None: all rows are kept.
    """

    def __init__(self, kind: str, names_M: tuple[str, ...], ranks: int, most: int | None = None) -> None:
        self.kind, self.names_M, self.ranks = kind, names_M, ranks
        self.rows: deque[Row] = deque(maxlen=most)
        self._blocks: list[tuple[NDArray[Any], ...]] = []

    def add(
        self, rank: int, model: int, step: int, layer: int, phase: str, start_s: float, end_s: float, end: TransferEnd = LOCAL
    ) -> None:
        """Records one phase of a rank, or one end of a transfer.

        Args:
            rank: the rank.
            model, step, layer, phase: as the columns of Trace; the phase is a name in TRACE_PHASES.
            start_s, end_s: seconds since the start of the run.
            end: for a transfer: the other rank, whether `rank` is the sender, and the bytes. LOCAL: no transfer.
        """
        keys = (model, step, layer, TRACE_PHASES.index(phase))
        self.rows.append((start_s, end_s, rank, *keys, *end))

    def transfers(
        self, model: int, step: int, layer: int, phase: str, pairs_2X: IntArray, bytes_X: IntArray, span_s_2X: FloatArray
    ) -> None:
        """Records both ends of all transfers of an all-to-all.

        Args:
            model, step, layer, phase: as in `add`.
            pairs_2X: (2, X) sources and destinations.
            bytes_X: (X,) bytes of each transfer.
            span_s_2X: (2, X) starts and ends, in seconds since the start of the run.
        """
        same = [np.full(len(bytes_X), value) for value in (model, step, layer, TRACE_PHASES.index(phase))]
        for (rank_X, peer_X), sent in ((pairs_2X, True), (pairs_2X[::-1], False)):
            self._blocks.append((*span_s_2X, rank_X, *same, peer_X, np.full(len(bytes_X), sent), bytes_X))

    def trace(self) -> Trace:
        """Returns the Trace of all events recorded so far."""
        rows = list(zip(*self.rows, strict=True)) or [()] * len(_COLUMN_TYPES)
        single: tuple[NDArray[Any], ...] = tuple(
            np.array(column, dtype=kind) for column, kind in zip(rows, _COLUMN_TYPES, strict=True)
        )
        columns = [np.concatenate(parts) for parts in zip(single, *self._blocks, strict=True)]
        by_start = np.lexsort(columns[::-1])
        start, end, rank, model, step, layer, phase, peer, sent, size = (column[by_start] for column in columns)
        return Trace(self.kind, self.names_M, self.ranks, rank, model, step, layer, phase, peer, sent, start, end, size)


Row = tuple[float, float, int, int, int, int, int, int, bool, int]
_COLUMN_TYPES = (np.float64, np.float64, *[np.int64] * 6, np.bool_, np.int64)
