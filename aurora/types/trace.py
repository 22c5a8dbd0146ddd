"""Trace: measured or predicted events, in the same columns, so that the two can be compared."""

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aurora.errors import BadInput
from aurora.types.arrays import FloatArray, IntArray, Value, check_arrays, check_name, locked

TRACE_PHASES = ("gate", "counts", "dispatch", "expert", "combine", "aggregate", "head")
COMPUTE_PHASES = ("gate", "expert", "aggregate", "head")  # in which a rank's GPU computes


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
            the gates.
        peer_X: (X,) int64, the other rank of a transfer; -1 otherwise.
        sent_X: (X,) bool, whether the row is the sender's end of a transfer.
        start_s_X: (X,) float64, seconds since the start of the run.
        end_s_X: (X,) float64, seconds since the start of the run.
        bytes_X: (X,) int64, payload bytes of a transfer.

    Raises:
        BadInput: if columns differ in length or hold invalid numbers.
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
            column = np.asarray(getattr(self, name))
            if column.shape != (len(self),) or column.dtype.kind != np.dtype(dtype).kind:
                expected = f"{np.dtype(dtype)} with {len(self)} along X as in rank_X"
                raise BadInput(f"trace, {name}: expected {expected}, found {column.dtype} of shape {column.shape}")
            object.__setattr__(self, name, locked(np.array(column, dtype=dtype)))
        if (self.end_s_X < self.start_s_X).any():
            raise BadInput("trace: an event ends before it starts")

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
