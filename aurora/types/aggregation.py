"""A sum that was collected from workers, and what became of each of them."""

from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from aurora.types.value import Value


@dataclass(frozen=True)
class WorkerReport:
    """One worker's part. batches: their numbers. seconds: when its message came or it was given up; None: not yet.

    state: "working", "used", "not needed" (a copy of what had come), "not waited for", or what was wrong with it.
    """

    worker: int
    batches: tuple[int, ...]
    state: str = "working"
    seconds: float | None = None


@dataclass(frozen=True, eq=False, repr=False)
class AggregationResult(Value):
    """total: the sum over all batches. waited: the workers whose messages came until it was known, in that order.

    compute_s: the longest that one of them computed. late: messages of earlier rounds that came meanwhile.
    """

    total: NDArray[Any]
    waited: tuple[int, ...]
    shares: tuple[WorkerReport, ...]
    seconds: float
    compute_s: float
    late: int = 0
