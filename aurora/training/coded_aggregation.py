"""Coded aggregation: a sum over batches, computed by redundant workers. It does not wait for stragglers that others replace.

The master is `CodedAggregator`; it keeps the answers of a round in an `AggregationRound`. A worker runs `serve_rounds`: it
computes its batches in the newest round, and sends their sum. A pipe to each worker carries rounds, with the arguments that the
worker does not have yet, and answers. Two threads of the master serve each pipe. So a worker that neither reads nor sends
delays nobody, and gets the newest round when it reads again.
Source: BCC (arXiv:1710.09990).
"""

import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Generic, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from aurora.algorithms.gradient_codes import GradientCode
from aurora.elastic.processes import RankLoss, RankProcess, RankProcesses
from aurora.errors import BadInput, RankFailed, first_line
from aurora.runtime.distributed.launcher import RankInfo, describe_error

Array = NDArray[Any]
Arguments = Mapping[str, Array]
Work = Callable[[int, Arguments], Array]  # (batch, the round's arguments) -> its result
Delay = Callable[[int, int], float]  # (worker, round) -> seconds that it waits first: rehearses stragglers
T = TypeVar("T")


@dataclass(frozen=True)
class AggregationJob:
    """Arguments with which workers are started: the computation of a batch, the code, and delays for tests."""

    work: Work
    code: GradientCode
    delay_s: Delay | None


@dataclass(frozen=True)
class Round(Generic[T]):
    """Message from master to worker: a round has begun.

    Attributes:
        number: the round's number.
        arguments: arguments of the computation, by name: arrays at a worker, pickled arrays at the master.
    """

    number: int
    arguments: Mapping[str, T]


def run_worker(connection: Connection, rank_info: RankInfo, job: AggregationJob) -> None:
    """Main function of a worker process: runs `serve_rounds`, and sends an unexpected error to the master."""
    try:
        serve_rounds(connection, rank_info.rank, job)
    except BaseException as error:
        with suppress(OSError):  # the master is gone
            connection.send(describe_error(error))


def serve_rounds(connection: Connection, worker: int, job: AggregationJob) -> None:
    """Computes and sends this worker's sum for each newest round, until the process is killed.

    If a newer round begins before the sum is computed, the worker abandons it, and continues with the newest round.

    Args:
        connection: pipe to the master.
        worker: the worker's number.
        job: the work and the code.

    Raises:
        EOFError: once the master has closed the pipe.
    """
    received: dict[str, Array] = {}
    while True:
        newest = _receive_round(connection, received)
        delay_s = job.delay_s(worker, newest.number) if job.delay_s else 0.0
        if connection.poll(delay_s):
            continue
        total, error = None, ""
        try:
            total = partial_sum(job.work, job.code, worker, newest.arguments, connection.poll)
        except Exception as failure:
            error = f"{type(failure).__name__}: {first_line(failure)}"
        if not connection.poll() and job.code.holds_WB[worker].any():
            connection.send(Answer(newest.number, total, error))


def partial_sum(work: Work, code: GradientCode, worker: int, arguments: Arguments, over: Callable[[], bool]) -> Array | None:
    """Returns the sum of a worker's batch results; None if it has no batches.

    Args:
        work: computes a batch.
        code: assigns batches to workers.
        worker: the worker's number.
        arguments: arguments of the round.
        over: returns True once the round is over; the sum is then incomplete, and must not be sent.

    Raises:
        BadInput: if batch results have different shapes.
    """
    total: Array | None = None
    for batch in np.flatnonzero(code.holds_WB[worker]).tolist():
        result = work(batch, arguments)
        if total is not None and total.shape != result.shape:
            raise BadInput(f"batch {batch}: expected shape {total.shape} like the batch before, found {result.shape}")
        total = np.array(result) if total is None else total + result
        if over():
            break
    return total


def _receive_round(connection: Connection, received: dict[str, Array]) -> Round[Array]:
    """Receives one round from `_Workers`; `received` keeps arguments, by name, for later rounds."""
    number, names, new = connection.recv()
    for name in new:
        received[name] = connection.recv()
    return Round(number, {name: received[name] for name in names})


Watch = Callable[[Sequence[str]], None]
WORKING, USED, NOT_NEEDED, NOT_WAITED_FOR = "working", "used", "not needed", "not waited for"
NORMAL = (WORKING, USED, NOT_NEEDED, NOT_WAITED_FOR)  # states of workers that say nothing bad


@dataclass(frozen=True)
class Answer:
    """Answer of a worker in a round.

    Attributes:
        round: the round's number.
        total: sum of the worker's batches; None if it failed.
        error: reason of the failure; empty if there was none.
    """

    round: int
    total: Array | None
    error: str = ""


@dataclass(frozen=True)
class AggregationResult:
    """Result of one aggregation round.

    Attributes:
        total: the sum over all batches, in the shape of one batch's result.
        arrived: the workers whose messages arrived before the sum was known, in the sequence of arrival.
        states: state of each worker: "used"; "not needed" (no batches, or another worker sent the same sum before); "not waited
            for"; or a description of its failure.
        seconds: seconds of the whole round.
    """

    total: Array
    arrived: tuple[int, ...]
    states: tuple[str, ...]
    seconds: float


class AggregationRound:
    """State of one round at the master: collects the workers' answers until they determine the sum.

    Args:
        number: the round's number.
        code: assigns batches to workers.
        like: an array with the sum's shape and type.
        watch: called with the states of all workers whenever one of them changes.
    """

    def __init__(self, number: int, code: GradientCode, like: Array, watch: Watch) -> None:
        self.began_s = time.perf_counter()
        self._number, self._code, self._like, self._watch = number, code, like, watch
        self._batches_W = [tuple(np.flatnonzero(holds_B).tolist()) for holds_B in code.holds_WB]
        self._states = [WORKING if batches else NOT_NEEDED for batches in self._batches_W]
        self._arrived: list[int] = []
        self._sums: dict[int, Array] = {}  # by worker, the sums that are used

    @property
    def determined(self) -> bool:
        """True if the answers so far determine the sum."""
        return self._code.covered(list(self._sums))

    def set_state(self, worker: int, state: str) -> None:
        """Sets the state of a worker, and calls `watch`."""
        self._states[worker] = state
        self._watch(self._states)

    def take(self, worker: int, answer: Answer) -> None:
        """Processes a worker's answer: uses it, ignores it as late or as a copy of a used one, or records its failure."""
        if answer.round != self._number or self._states[worker] != WORKING:
            return
        total = answer.total
        if total is None or (refusal := self._refusal(total)):
            self.lose(worker, f"failed: {answer.error}" if total is None else refusal)
            return
        self._arrived.append(worker)
        if self._batches_W[worker] in [self._batches_W[used] for used in self._sums]:
            self.set_state(worker, NOT_NEEDED)
            return
        self.set_state(worker, USED)
        self._sums[worker] = total

    def lose(self, worker: int, reason: str) -> None:
        """Records that a worker sends no sum. Raises RankFailed if the total cannot be determined without it."""
        if self._states[worker] == WORKING:
            self.set_state(worker, reason)
        self.check_recoverable()

    def check_recoverable(self) -> None:
        """Raises RankFailed if the sum would not be determined even by the answers of all workers that still compute."""
        possible = [*self._sums, *(worker for worker, state in enumerate(self._states) if state == WORKING)]
        if self._code.covered(possible):
            return
        missing = np.flatnonzero(~self._code.holds_WB[np.array(possible, dtype=np.int64)].any(axis=0)).tolist()
        subject = f"batches {', '.join(map(str, missing))} are"
        reasons = "; ".join(f"worker {worker} {state}" for worker, state in enumerate(self._states) if state not in NORMAL)
        raise RankFailed(f"aggregation: {subject} held by no worker that is left: {reasons}")

    def result(self) -> AggregationResult:
        """Returns the sum, which must be determined, and the state of each worker."""
        total = np.zeros_like(self._like)
        for worker in sorted(self._sums, key=self._batches_W.__getitem__):  # so that no bit depends on who was first
            total += self._sums[worker]
        states = tuple(NOT_WAITED_FOR if state == WORKING else state for state in self._states)
        return AggregationResult(total, tuple(self._arrived), states, time.perf_counter() - self.began_s)

    def _refusal(self, total: Array) -> str:
        """Why a worker's sum cannot be used; empty where it can."""
        if total.shape != self._like.shape or total.dtype != self._like.dtype:
            return f"refused: expected {self._like.dtype} {self._like.shape}, found {total.dtype} {total.shape}"
        if total.dtype.kind == "f" and not np.isfinite(total).all():
            return "refused: expected finite numbers, found NaN or infinity"
        return ""


class _Workers(RankProcesses):
    """Worker processes, each of which is sent the newest round, with the arguments that it does not have."""

    def tell(self, message: Round[bytes]) -> None:
        """Tells all workers of a round; those that have not read of earlier rounds hear of this one alone."""
        for worker in self.running.values():
            worker.outbox.replace(message)

    def write_to(self, member: RankProcess) -> None:
        connection, sent = member.connection, dict[str, bytes]()

        def send(message: Round[bytes]) -> None:
            new = {name: packed for name, packed in message.arguments.items() if sent.get(name) is not packed}
            connection.send((message.number, tuple(message.arguments), tuple(new)))
            for packed in new.values():
                connection.send_bytes(packed)
            sent.update(new)

        member.outbox.write(send)


class CodedAggregator:
    """Sums over batches in rounds, with redundant worker processes. A context manager: all workers have ended at its end.

    In each round a worker sums its batches and sends the sum. The round ends when the received sums determine the whole sum.
    Sums of integers equal the serial sum bit for bit.

    Args:
        work: picklable; called with a batch's number and the round's arguments; returns an array, always of one shape and type.
        code: assigns batches to workers.
        timeout_s: seconds without any arrival after which a round fails.
        delay_s: called with (worker, round); returns seconds by which the worker is delayed, to simulate stragglers.
        watch: called with the states of all workers whenever one of them changes.

    Source: BCC (arXiv:1710.09990).
    """

    def __init__(
        self,
        work: Work,
        code: GradientCode,
        *,
        timeout_s: float = 300.0,
        delay_s: Delay | None = None,
        watch: Watch = lambda _states: None,
    ) -> None:
        self._job = AggregationJob(work, code, delay_s)
        self._timeout_s, self._watch = timeout_s, watch
        self._workers = _Workers(run_worker, (self._job,), len(code.holds_WB), ("", 0), timeout_s)
        self._lost: dict[int, str] = {}  # how each lost worker ended
        self._pickled: dict[str, tuple[Array, bytes]] = {}  # by name the newest version of an argument
        self._number, self._last_arrival_s = 0, 0.0

    def __enter__(self) -> Self:
        try:
            for worker in range(len(self._job.code.holds_WB)):
                self._workers.start(worker)
            while self._workers.starting:
                self._handle_events(self._timeout_s)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_error: object) -> None:
        self._workers.close()

    @property
    def lost(self) -> Mapping[int, str]:
        """{worker: reason as text} of the workers whose processes have ended."""
        return dict(self._lost)

    @property
    def pids(self) -> dict[int, int]:
        """{worker: process id} of the workers that were not lost."""
        return {worker: process.pid for worker, process in self._workers.running.items()}

    def aggregate(self, like: Array, arguments: Arguments | None = None) -> AggregationResult:
        """Runs one round: returns the sum of work(batch, arguments) over all batches, and the workers' states.

        Args:
            like: an array with the sum's shape and type.
            arguments: arrays for all workers, by name; an array that is the same object as in the last round is not sent again.

        Raises:
            RankFailed: if the remaining workers cannot determine the sum, or nothing arrives for timeout_s.
        """
        self._number += 1
        self._workers.tell(Round(self._number, self._pickle(arguments or {})))
        current = AggregationRound(self._number, self._job.code, like, self._watch)
        for worker, reason in self._lost.items():
            current.set_state(worker, reason)
        current.check_recoverable()
        while not current.determined:
            left_s = max(current.began_s, self._last_arrival_s) + self._timeout_s - time.perf_counter()
            if left_s <= 0:
                raise RankFailed(f"aggregation: nothing came from the workers for {self._timeout_s:g} s")
            self._handle_events(left_s, current)
        return current.result()

    def _handle_events(self, timeout_s: float, current: AggregationRound | None = None) -> None:
        """Handles what comes from workers within timeout_s, until the round, if there is one, has its sum."""
        for worker, event in self._workers.events(timeout_s):
            if isinstance(event, Answer):
                self._last_arrival_s = time.perf_counter()
                if current is not None:
                    current.take(worker, event)
            elif not isinstance(event, RankProcess):
                self._lost[worker] = event.reason if isinstance(event, RankLoss) else f"failed: {event}"
                self._workers.kill(worker)
                if current is not None:
                    current.lose(worker, self._lost[worker])
            if current is not None and current.determined:
                return

    def _pickle(self, arguments: Arguments) -> Mapping[str, bytes]:
        """Pickles the arguments that are new. Returns all by name, those that are not new as the same objects as before."""
        for name, array in arguments.items():
            if name not in self._pickled or array is not self._pickled[name][0]:
                self._pickled[name] = array, pickle.dumps(array, pickle.HIGHEST_PROTOCOL)
        return {name: self._pickled[name][1] for name in arguments}
