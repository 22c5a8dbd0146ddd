"""Result of a coded aggregation, and the state of each worker."""

from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from aurora.types.value import Value


@dataclass(frozen=True)
class WorkerReport:
    """One worker's part in an aggregation round."""

    worker: int  # its number
    batches: tuple[int, ...]  # the batches that it holds
    state: str = "working"  # or "used", "not needed" (its batches had come already), "not waited for", what was wrong
    seconds: float | None = None  # from the start of the round until its message came or it was given up; None before that


@dataclass(frozen=True, eq=False, repr=False)
class AggregationResult(Value):
    """The sum of one aggregation round."""

    total: NDArray[Any]  # the sum over all batches
    arrived: tuple[int, ...]  # the workers whose messages came before the sum was known, in the order of arrival
    reports: tuple[WorkerReport, ...]  # one for each worker
    seconds: float  # duration of the whole round
    compute_s: float  # the longest time that an arrived worker computed
    late: int = 0  # how many messages came that belonged to earlier rounds or were sent twice
