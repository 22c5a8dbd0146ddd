"""What happened, or what is predicted to: the same columns either way, so that one can be laid over the other."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aurora.errors import BadInput
from aurora.types.arrays import FloatArray, IntArray, counts, locked, numbers
from aurora.types.value import Value

TRACE_PHASES = ("gate", "counts", "dispatch", "expert", "combine", "aggregate")


@dataclass(frozen=True, eq=False, repr=False)
class Trace(Value):
    """One row an event, X of them, by start.

    rank_X, epoch_X, model_X, step_X, layer_X int64; phase_X int64 indexes TRACE_PHASES; peer_X the other rank of a
    transfer or -1; start_s_X, end_s_X seconds since the run's start; bytes_X payload. A transfer has a row on both ends;
    `sent_X` tells which rows are the sender's. kind: "predicted" or "measured".
    """

    kind: str
    names_M: tuple[str, ...]
    ranks: int
    rank_X: IntArray
    epoch_X: IntArray
    model_X: IntArray
    step_X: IntArray
    layer_X: IntArray
    phase_X: IntArray
    peer_X: IntArray
    sent_X: NDArray[np.bool_]
    start_s_X: FloatArray
    end_s_X: FloatArray
    bytes_X: IntArray

    INTEGERS = ("rank_X", "epoch_X", "model_X", "step_X", "layer_X", "phase_X", "bytes_X")
    COLUMNS = (*INTEGERS, "peer_X", "sent_X", "start_s_X", "end_s_X")

    def __post_init__(self) -> None:
        if self.kind not in ("predicted", "measured"):
            raise BadInput(f"trace: kind must be predicted or measured, found {self.kind!r}")
        for name in self.INTEGERS:
            object.__setattr__(self, name, counts(f"trace, {name}", getattr(self, name), 1))
        object.__setattr__(self, "peer_X", locked(np.array(self.peer_X, dtype=np.int64)))
        object.__setattr__(self, "sent_X", locked(np.array(self.sent_X, dtype=np.bool_)))
        for name in ("start_s_X", "end_s_X"):
            object.__setattr__(self, name, numbers(f"trace, {name}", getattr(self, name)))
        if len({len(getattr(self, name)) for name in self.COLUMNS}) != 1:
            raise BadInput("trace: expected columns of one length")
        if (self.end_s_X < self.start_s_X).any():
            raise BadInput("trace: an event ends before it starts")

    def __len__(self) -> int:
        return len(self.rank_X)

    @property
    def seconds(self) -> float:
        """From the first start to the last end."""
        return float(self.end_s_X.max() - self.start_s_X.min()) if len(self) else 0.0


class TraceRecorder:
    """Collects events and makes the Trace of them; simulator and backend write through the same one."""

    def __init__(self, kind: str, names_M: tuple[str, ...], ranks: int) -> None:
        self.kind, self.names_M, self.ranks = kind, names_M, ranks
        self.rows: list[Row] = []
        self._epoch = 0
        self._ranks_R: Sequence[int] = range(ranks)
        self._blocks: list[tuple[NDArray[Any], ...]] = []

    def begin(self, epoch: int, ranks_R: Sequence[int]) -> None:
        """What `add` and `transfer` are told from now on is of this epoch, by ranks that go by these numbers in the trace."""
        self._epoch, self._ranks_R = epoch, ranks_R

    def add(self, rank: int, model: int, step: int, layer: int, phase: str, start_s: float, end_s: float) -> None:
        """A compute phase or a barrier of one rank."""
        here = self._ranks_R[rank]
        self.rows.append((start_s, end_s, here, self._epoch, model, step, layer, TRACE_PHASES.index(phase), -1, False, 0))

    def transfer(
        self,
        rank: int,
        model: int,
        step: int,
        layer: int,
        phase: str,
        peer: int,
        sent: bool,
        size: int,
        start_s: float,
        end_s: float,
    ) -> None:
        """One end of a transfer of `size` bytes: `rank` sent to or received from `peer`."""
        here, there = self._ranks_R[rank], self._ranks_R[peer]
        which = (self._epoch, model, step, layer, TRACE_PHASES.index(phase))
        self.rows.append((start_s, end_s, here, *which, there, sent, size))

    def transfers(
        self,
        model: int,
        step: int,
        layer: int,
        phase: str,
        src_X: IntArray,
        dst_X: IntArray,
        bytes_X: IntArray,
        start_s_X: FloatArray,
        end_s_X: FloatArray,
    ) -> None:
        """Both ends of each of an all-to-all's transfers, (X,) each."""
        same = [np.full(len(src_X), value) for value in (self._epoch, model, step, layer, TRACE_PHASES.index(phase))]
        for rank_X, peer_X, sent in ((src_X, dst_X, True), (dst_X, src_X, False)):
            sent_X = np.full(len(src_X), sent)
            self._blocks.append((start_s_X, end_s_X, rank_X, *same, peer_X, sent_X, bytes_X))

    def trace(self) -> Trace:
        rows = list(zip(*self.rows, strict=True)) or [()] * len(_COLUMN_TYPES)
        single: tuple[NDArray[Any], ...] = tuple(
            np.array(column, dtype=kind) for column, kind in zip(rows, _COLUMN_TYPES, strict=True)
        )
        columns = [np.concatenate(parts) for parts in zip(single, *self._blocks, strict=True)]
        by_start = np.lexsort(columns[::-1])
        start, end, rank, epoch, model, step, layer, phase, peer, sent, size = (column[by_start] for column in columns)
        return Trace(self.kind, self.names_M, self.ranks, rank, epoch, model, step, layer, phase, peer, sent, start, end, size)


Row = tuple[float, float, int, int, int, int, int, int, int, bool, int]
_COLUMN_TYPES = (np.float64, np.float64, *[np.int64] * 7, np.bool_, np.int64)
