"""Coded aggregation: a sum over batches by redundant workers. No slow worker is waited for if others have its batches.

The master is `CodedAggregator`; it keeps the answers of a round in an `AggregationRound`. A worker runs `serve_rounds`: it
computes its batches in the newest round, and sends their sum. A pipe to each worker carries rounds, with the arguments that the
worker does not have yet, and answers. Two threads of the master serve each pipe. So a worker that neither reads nor sends
delays nobody, and gets the newest round when it reads again. Answers for the same batches are compared; if they differ, the
master computes the batches itself.
Source: BCC (arXiv:1710.09990).
"""

import os
import pickle
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from typing import Any, Generic, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from aurora.errors import BadInput, RankFailed
from aurora.planner.gradient_codes import GradientCode
from aurora.runtime.distributed.launcher import RankInfo, describe_error, start_process
from aurora.types import AggregationResult, WorkerReport

Array = NDArray[Any]
Arguments = Mapping[str, Array]
Work = Callable[[int, Arguments], Array]  # (batch, the round's arguments) -> its result
Delay = Callable[[int, int], float]  # (worker, round) -> seconds that it waits first: rehearses stragglers
T = TypeVar("T")


@dataclass(frozen=True)
class AggregationJob:
    """Job with which workers are started: the computation of a batch, and the codes, of which each round uses one."""

    work: Work
    codes: tuple[GradientCode, ...]
    delay_s: Delay | None


@dataclass(frozen=True)
class Round(Generic[T]):
    """Message to a worker that a round has begun.

    Attributes:
        number: the round's number.
        code: index of the code that it uses.
        arguments: arguments of the computation by name: arrays at a worker, pickled arrays at the master.
    """

    number: int
    code: int
    arguments: Mapping[str, T]


class Newest(Generic[T]):
    """Slot from one thread to another that keeps only the newest value; values that were not taken in time are skipped."""

    def __init__(self) -> None:
        self._values = 0  # how many were put
        self._newest: Any = None
        self._changed = threading.Condition()

    def put(self, value: T) -> None:
        """Replaces the newest value."""
        with self._changed:
            self._values, self._newest = self._values + 1, value
            self._changed.notify()

    def after(self, seen: int, timeout_s: float | None = None) -> tuple[int, T]:
        """Waits, at most timeout_s, until more than `seen` values were put. Returns the number put and the newest value."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_after(seen), timeout_s)
            return self._values, self._newest

    def is_after(self, seen: int) -> bool:
        """Returns whether more than `seen` values were put."""
        return self._values > seen


def run_worker(connection: Connection, rank_info: RankInfo, job: AggregationJob) -> None:
    """Main function of a worker's process: serves rounds, and sends an unexpected error to the master."""
    try:
        serve_rounds(connection, rank_info.rank, job)
    except BaseException as error:
        with suppress(OSError):  # the master is gone
            connection.send(describe_error(error))


def serve_rounds(connection: Connection, worker: int, job: AggregationJob) -> None:
    """Serves the newest round, again and again, until the process is killed.

    If a round ends before the worker has computed its sum, the worker sends nothing for it, and goes on with the newest round.

    Args:
        connection: pipe to the master; the process ends when the master is gone.
        worker: the worker's number.
        job: the work and the codes.
    """
    rounds: Newest[Round[Array]] = Newest()
    threading.Thread(target=_receive_rounds, args=(connection, rounds), daemon=True, name="aurora-rounds").start()
    seen, newest = rounds.after(0)
    while True:
        delay_s = job.delay_s(worker, newest.number) if job.delay_s else 0.0
        if not (delay_s and rounds.after(seen, delay_s)[0] > seen):
            code, began_s, total, error = job.codes[newest.code], time.perf_counter(), None, ""
            try:
                total = weighted_sum(job.work, code, worker, newest.arguments, partial(rounds.is_after, seen))
            except Exception as failure:
                lines = str(failure).strip().splitlines()
                error = f"{type(failure).__name__}: {lines[0] if lines else 'no message'}"
            if not rounds.is_after(seen) and code.code_WB[worker].any():
                connection.send(Answer(newest.number, total, time.perf_counter() - began_s, error))
        seen, newest = rounds.after(seen)


def weighted_sum(work: Work, code: GradientCode, worker: int, arguments: Arguments, over: Callable[[], bool]) -> Array | None:
    """Returns the sum of the worker's batches by the code's weights; None if it holds none.

    Args:
        work: computes a batch.
        code: tells the worker's batches and their weights.
        worker: the worker's number.
        arguments: arguments of the round.
        over: returns whether the round is over; if so, the sum is abandoned.

    Raises:
        BadInput: if batches' results have different shapes.
    """
    total: Array | None = None
    for batch in np.flatnonzero(code.code_WB[worker]).tolist():
        result = work(batch, arguments)
        if code.needed is not None:
            result = result * code.code_WB[worker, batch]
        if total is not None and total.shape != result.shape:
            raise BadInput(f"batch {batch}: expected shape {total.shape} like the batch before, found {result.shape}")
        total = np.array(result) if total is None else total + result
        if over():
            break
    return total


def send_rounds(connection: Connection, rounds: Newest[Round[bytes] | None]) -> None:
    """Sends a worker each new round, the newest if several came, with the arguments that changed; returns at a round None."""
    sent, (seen, newest) = dict[str, bytes](), rounds.after(0)
    with suppress(OSError):  # the worker is gone
        while newest is not None:
            new = {name: packed for name, packed in newest.arguments.items() if sent.get(name) is not packed}
            connection.send((newest.number, newest.code, tuple(newest.arguments), tuple(new)))
            for packed in new.values():
                connection.send_bytes(packed)
            sent |= new
            seen, newest = rounds.after(seen)


def _receive_rounds(connection: Connection, rounds: Newest[Round[Array]]) -> None:
    """Receives what `send_rounds` sends; ends the process when the master is gone."""
    received: dict[str, Array] = {}
    try:
        while True:
            number, code, names, new = connection.recv()
            for name in new:
                received[name] = connection.recv()
            rounds.put(Round(number, code, {name: received[name] for name in names}))
    finally:
        os._exit(1)


Watch = Callable[[Sequence[WorkerReport]], None]
ROUNDING = 0.05  # how far a decoded count may be from a whole number


@dataclass(frozen=True)
class Answer:
    """Answer of a worker in a round.

    Attributes:
        round: the round's number.
        total: weighted sum of the worker's batches; None if it failed.
        seconds: seconds of its computation.
        error: reason of the failure; empty if there was none.
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
    """One round at the master: collects the workers' answers until they determine the sum.

    Args:
        number: the round's number.
        code: tells the batches of each worker.
        like: an array with the sum's shape and type.
        watch: called with the reports of all workers whenever one of them changes.
        compute: called with a worker's number; returns the answer that it should send, computed here.
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
        """True if the answers so far determine the sum."""
        if self._code.needed is not None:
            return self._weights is not None
        return all(copies.settled for copies in self._copies.values())

    def set_state(self, worker: int, state: str) -> None:
        """Sets the state of a worker in its report, with the present time, and calls `watch`."""
        seconds = time.perf_counter() - self.began_s
        self._reports[worker] = replace(self._reports[worker], state=state, seconds=seconds)
        self._watch(self._reports)

    def skip_idle(self) -> None:
        """Marks the workers without batches as not needed, as they send nothing."""
        for report in self._reports:
            if not report.batches:
                self.set_state(report.worker, "not needed")

    def take(self, worker: int, answer: Answer) -> None:
        """Takes a worker's answer: it is late, refused, used, or compared with answers for the same batches."""
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
        """Raises RankFailed if the sum would not be determined even by the answers of all workers that still compute."""
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
        """The sum, once it is determined, and the report of each worker."""
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


Message = Answer | str | None  # of a worker: what it computed, why it ends, or that its pipe has ended


class CodedAggregator:
    """Worker processes that aggregate round after round. A context manager: no worker is left when the block ends.

    A worker sums its batches and sends the sum once a round. The round ends when the sums that have arrived determine the whole
    sum. Sums of integers equal the serial sum bit for bit. Answers for the same batches that arrive before the end are
    compared; if they differ, this process computes the batches, and the report names the workers that were wrong.

    Args:
        work: picklable; called with a batch's number and the round's arguments; returns an array, always of one shape and type.
        codes: gradient codes, all for the same number of workers; each round uses one of them.
        timeout_s: seconds without any arrival after which a round fails.
        delay_s: called with (worker, round); returns the seconds that the worker waits first, to rehearse stragglers.
        watch: called with the reports of all workers whenever one of them changes.

    Source: BCC (arXiv:1710.09990); cyclic repetition: Tandon et al., Gradient Coding (arXiv:1612.03301).
    """

    def __init__(
        self,
        work: Work,
        codes: Sequence[GradientCode],
        *,
        timeout_s: float = 300.0,
        delay_s: Delay | None = None,
        watch: Watch = lambda _reports: None,
    ) -> None:
        self._count = len(codes[0].code_WB)
        assert all(len(code.code_WB) == self._count for code in codes)
        self._job = AggregationJob(work, tuple(codes), delay_s)
        self._timeout_s, self._watch = timeout_s, watch
        self._workers: list[_Worker] = []
        self._messages: SimpleQueue[tuple[int, Message]] = SimpleQueue()  # (worker, what it sent)
        self._lost: dict[int, str] = {}  # how each lost worker ended
        self._pickled: dict[str, tuple[Array, bytes]] = {}  # by name the newest version of an argument
        self._number, self._last_arrival_s = 0, 0.0

    def __enter__(self) -> Self:
        try:
            for worker in range(self._count):
                rank_info = RankInfo(worker, self._count, "", 0, self._timeout_s, worker, self._count, launched=True)
                self._workers.append(_Worker(*start_process(rank_info, run_worker, self._job), worker, self._messages))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_error: object) -> None:
        for worker in self._workers:
            worker.end()

    @property
    def lost(self) -> Mapping[int, str]:
        """The workers whose processes have ended, and the reason of each in words."""
        return dict(self._lost)

    @property
    def pids(self) -> dict[int, int]:
        """The process id of each worker that was not lost."""
        return {number: worker.process.pid for number, worker in enumerate(self._workers) if number not in self._lost}

    def aggregate(self, like: Array, arguments: Arguments | None = None, code: int = 0) -> AggregationResult:
        """Performs one round: sums work(batch, arguments) over all batches.

        Args:
            like: an array with the sum's shape and type.
            arguments: arrays for all workers, by name; an array that is the same object as in the last round is not sent again.
            code: index of the code of this round.

        Raises:
            RankFailed: if the workers that are left do not determine the sum, or nothing arrives for timeout_s.
        """
        self._number += 1
        given = arguments or {}
        told = Round(self._number, code, self._pickle(given))
        for each in self._workers:
            each.rounds.put(told)
        current = AggregationRound(self._number, self._job.codes[code], like, self._watch, self._computed(given, code))
        for worker, reason in self._lost.items():
            current.set_state(worker, reason)
        current.skip_idle()
        current.check_recoverable()
        while not current.determined:
            worker, message = self._next_message(current.began_s)
            if isinstance(message, Answer):
                self._last_arrival_s = time.perf_counter()
                current.take(worker, message)
            elif worker not in self._lost:
                self._lost[worker] = self._workers[worker].how_ended() if message is None else f"failed: {message}"
                current.lose(worker, self._lost[worker])
                current.check_recoverable()
        return current.result()

    def _pickle(self, arguments: Arguments) -> Mapping[str, bytes]:
        """Pickles the arguments that are new. Returns all by name, those that are not new as the same objects as before."""
        for name, array in arguments.items():
            if name not in self._pickled or array is not self._pickled[name][0]:
                self._pickled[name] = array, pickle.dumps(array, pickle.HIGHEST_PROTOCOL)
        return {name: self._pickled[name][1] for name in arguments}

    def _computed(self, arguments: Arguments, code: int) -> Callable[[int], Array]:
        """Returns a function that computes here what a worker should send in a round, for `AggregationRound`."""

        def compute(worker: int) -> Array:
            total = weighted_sum(self._job.work, self._job.codes[code], worker, arguments, lambda: False)
            assert total is not None
            return total

        return compute

    def _next_message(self, began_s: float) -> tuple[int, Message]:
        """The next (worker, message), of whatever round."""
        left_s = max(began_s, self._last_arrival_s) + self._timeout_s - time.perf_counter()
        try:
            return self._messages.get(timeout=max(0.0, left_s))
        except Empty:
            raise RankFailed(f"aggregation: nothing came from the workers for {self._timeout_s:g} s") from None


class _Worker:
    """A worker's process and the threads that serve its pipe; the pipe is closed when they have ended.

    Args:
        process, connection: of `start_process`.
        number: the worker's.
        messages: where (number, message) goes, at the pipe's end with None.

    Attributes:
        rounds: what the worker is told of.
    """

    def __init__(self, process: Any, connection: Connection, number: int, messages: SimpleQueue[tuple[int, Message]]) -> None:
        self.process, self.rounds = process, Newest[Round[bytes] | None]()
        for serve, args in ((send_rounds, (connection, self.rounds)), (_receive, (connection, number, messages))):
            threading.Thread(target=serve, args=args, daemon=True, name=f"aurora-worker-{number}").start()

    def how_ended(self) -> str:
        """Waits for the end of the process, and says how it did."""
        self.process.join()
        code = self.process.exitcode
        return f"killed by signal {-code}" if code < 0 else f"died with exit code {code}"

    def end(self) -> None:
        """Ends the process, and with it the threads."""
        self.rounds.put(None)
        if self.process.is_alive():
            self.process.kill()
        self.process.join()


def _receive(connection: Connection, worker: int, messages: SimpleQueue[tuple[int, Message]]) -> None:
    """Puts what a worker sends into a queue, and None when its pipe ends."""
    try:
        while True:
            messages.put((worker, connection.recv()))
    except (EOFError, OSError):
        messages.put((worker, None))
