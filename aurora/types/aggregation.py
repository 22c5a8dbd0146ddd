"""Result of a coded aggregation, and the state of each worker."""

from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from aurora.types.arrays import Value


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
