"""One round of a coded aggregation: which messages have arrived, and whether they determine the sum. No transport in it."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aurora.errors import RankFailed
from aurora.planner.gradient_codes import GradientCode
from aurora.runtime.distributed.launcher import describe_error
from aurora.types import AggregationResult, WorkerReport

Array = NDArray[Any]
Watch = Callable[[Sequence[WorkerReport]], None]
ROUNDING = 0.05  # how far a decoded count may be from a whole number


@dataclass(frozen=True)
class Answer:
    """Answer of a worker in a round.

    Attributes:
        round: the round's number.
        total: the sum of the worker's batches; None if it failed.
        seconds: seconds that it computed.
        error: why it failed; empty if it did not.
    """

    round: int
    total: Array | None
    seconds: float = 0.0
    error: str = ""


@dataclass
class _Copies:
    """Results of workers that hold the same batches: (result, its senders) for each different result."""

    versions: list[tuple[Array, list[int]]] = field(default_factory=list)
    settled: bool = False  # whether the first version is the one that counts
    computed: bool = False  # whether it was computed by the master

    def add(self, worker: int, result: Array) -> None:
        """Adds what a worker has sent."""
        for version, senders in self.versions:
            if _same(version, result):
                senders.append(worker)
                return
        self.versions.append((result, [worker]))

    def settle(self, true: Array) -> list[int]:
        """Makes the version that is the true result the only one. Returns the workers that sent another."""
        wrong = [worker for version, senders in self.versions if not _same(version, true) for worker in senders]
        self.versions = [each for each in self.versions if _same(each[0], true)] or [(true, [])]
        self.settled = self.computed = True
        return wrong


class AggregationRound:
    """One round at the master: what has arrived, and whether it determines the sum.

    Args:
        number: the round's number.
        code: which worker computes which batches.
        like: an array with the sum's shape and type.
        watch: called with all reports whenever one changes.
        compute: returns what a worker should send.
    """

    def __init__(self, number: int, code: GradientCode, like: Array, watch: Watch, compute: Callable[[int], Array]) -> None:
        self.began_s = time.perf_counter()
        self._number, self._code, self._like, self._watch = number, code, like, watch
        self._compute = compute
        batches_W = [tuple(np.flatnonzero(code_B).tolist()) for code_B in code.code_WB]
        self._reports = [WorkerReport(worker, batches) for worker, batches in enumerate(batches_W)]
        self._arrived: list[int] = []
        self._sums: dict[int, Array] = {}  # by worker, where messages are no copies of each other
        self._copies = {} if code.needed is not None else {batches: _Copies() for batches in sorted({*batches_W} - {()})}
        self._weights: Any = None
        self._compute_s, self._late = 0.0, 0

    @property
    def determined(self) -> bool:
        """True if what has arrived determines the sum."""
        if self._code.needed is not None:
            return self._weights is not None
        return all(copies.settled for copies in self._copies.values())

    def set_state(self, worker: int, state: str) -> None:
        """Records what became of a worker, now, and tells `watch`."""
        seconds = time.perf_counter() - self.began_s
        self._reports[worker] = replace(self._reports[worker], state=state, seconds=seconds)
        self._watch(self._reports)

    def skip_idle(self) -> None:
        """Marks the workers without batches as not needed: they send nothing."""
        for report in self._reports:
            if not report.batches:
                self.set_state(report.worker, "not needed")

    def take(self, worker: int, answer: Answer) -> None:
        """Handles a worker's answer: counted as late, refused, used, or compared with those of the same batches."""
        if answer.round != self._number or self._reports[worker].state != "working":
            self._late += 1
            return
        total = answer.total
        if total is None or (refusal := self._refusal(total)):
            self.set_state(worker, f"failed: {answer.error}" if total is None else refusal)
            self.check_recoverable()
            return
        self._compute_s = max(self._compute_s, answer.seconds)
        self._arrived.append(worker)
        if self._code.needed is not None:
            self._sums[worker] = total
            self.set_state(worker, "used")
            self._weights = self._code.weights(self._arrived)
            return
        batches = self._reports[worker].batches
        copies = self._copies[batches]
        self.set_state(worker, "not needed" if copies.versions else "used")
        copies.add(worker, total)
        copies.settled = True
        if len(copies.versions) > 1:
            self._settle(batches)

    def _settle(self, batches: tuple[int, ...]) -> None:
        """Computes what workers of the same batches should have sent, and sets those aside that sent something else."""
        holders = [report.worker for report in self._reports if report.batches == batches]
        copies = self._copies[batches]
        try:
            true = copies.versions[0][0] if copies.computed else self._compute(holders[0])
        except Exception as error:
            what = f"batches {', '.join(map(str, batches))}, which workers {', '.join(map(str, holders))} hold"
            raise RankFailed(f"aggregation: {what}, cannot be checked here: {describe_error(error)}") from None
        for worker in copies.settle(true):
            self._arrived.remove(worker)
            self.set_state(worker, "wrong: sent something else than what was computed anew for its batches")
        used = next((worker for worker in self._arrived if worker in holders), None)
        if used is not None and self._reports[used].state == "not needed":
            self.set_state(used, "used")

    def lose(self, worker: int, reason: str) -> None:
        """Records that a worker's process has ended."""
        if self._reports[worker].state == "working":
            self.set_state(worker, reason)

    def check_recoverable(self) -> None:
        """Raises RankFailed where the sum cannot be determined even if all that still work send theirs."""
        working = {report.batches for report in self._reports if report.state == "working"}
        lost = [r for r in self._reports if r.batches and r.seconds is not None and r.worker not in self._arrived]
        if not lost or self.determined:
            return
        if self._code.needed is None:
            gone = [batches for batches, copies in self._copies.items() if not copies.versions and batches not in working]
            missing, recoverable = sorted(batch for batches in gone for batch in batches), not gone
        else:
            possible = self._arrived + [report.worker for report in self._reports if report.state == "working"]
            missing = np.flatnonzero(~self._code.holds_WB[np.array(possible, dtype=np.int64)].any(axis=0)).tolist()
            recoverable = self._code.weights(possible) is not None
        if recoverable:
            return
        what = f"batches {', '.join(map(str, missing))} are" if missing else "the sum is"
        reasons = "; ".join(f"worker {report.worker} {report.state}" for report in lost)
        raise RankFailed(f"aggregation: {what} held by no worker that is left: {reasons}")

    def result(self) -> AggregationResult:
        """The sum and what became of each worker, once it is determined."""
        if self._code.needed is None:
            weighted = [(copies.versions[0][0], 1.0) for copies in self._copies.values()]
        else:
            pairs = zip(self._arrived, self._weights.tolist(), strict=True)
            weighted = [(self._sums[worker], weight) for worker, weight in pairs if weight]
        total = _decoded(weighted, self._code, self._like)
        seconds = time.perf_counter() - self.began_s
        reports = [replace(r, state="not waited for") if r.state == "working" else r for r in self._reports]
        self._watch(reports)
        return AggregationResult(total, tuple(self._arrived), tuple(reports), seconds, self._compute_s, self._late)

    def _refusal(self, total: Array) -> str:
        """Why a worker's sum cannot be used; empty where it can."""
        dtype = self._like.dtype if self._code.needed is None else np.dtype(np.float64)
        if total.shape != self._like.shape or total.dtype != dtype:
            return f"refused: expected {dtype} {self._like.shape}, found {total.dtype} {total.shape}"
        if total.dtype.kind == "f" and not np.isfinite(total).all():
            return "refused: expected finite numbers, found NaN or infinity"
        return ""


def _same(a: Array, b: Array) -> bool:
    """Returns whether two results are the same: integers exactly, other numbers but for rounding."""
    if a.dtype.kind != "f":
        return np.array_equal(a, b)
    largest = max(float(np.abs(a).max(initial=0.0)), float(np.abs(b).max(initial=0.0)))
    return bool(np.allclose(a, b, rtol=0.0, atol=largest * float(np.sqrt(np.finfo(a.dtype).eps))))


def _decoded(weighted: Sequence[tuple[Array, float]], code: GradientCode, like: Array) -> Array:
    """The weighted sum of the workers' sums, in `like`'s type; integers that a code made real are rounded back."""
    if code.needed is None:
        total = np.zeros_like(like)
        for array, _ in weighted:
            total += array
        return total
    decoded, largest = np.zeros(like.shape), 0.0
    for array, weight in weighted:
        decoded += array * weight
        largest = max(largest, abs(weight) * float(np.abs(array).max(initial=0.0)))
    if not np.issubdtype(like.dtype, np.integer):
        return decoded.astype(like.dtype)
    counts = np.rint(decoded)
    error = max(float(np.abs(decoded - counts).max(initial=0.0)), largest * len(weighted) * np.finfo(np.float64).eps)
    if error > ROUNDING:
        raise RankFailed(f"aggregation: decoded counts are up to {error:.2g} from whole numbers, expected {ROUNDING} at most")
    return counts.astype(like.dtype)
