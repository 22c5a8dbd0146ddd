"""Coded aggregation: a sum over batches, computed by redundant workers. It does not wait for stragglers that others replace.

The master is `CodedAggregator`; it keeps the answers of a round in an `AggregationRound`. A worker runs `serve_rounds`: it sums
its batches, sends the sum, and takes the newest round. A pipe to each worker carries rounds, with the arguments that the worker
does not have yet, and answers. A thread of the master serves each pipe, so a worker that neither reads nor sends delays nobody.
Source: BCC (arXiv:1710.09990).
"""

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from aurora.algorithms.gradient_codes import GradientCode
from aurora.elastic.processes import exit_reason
from aurora.errors import BadInput, RankFailed, first_line
from aurora.runtime.distributed.launcher import RankInfo, end_processes, start_process

Array = NDArray[Any]
Arguments = Mapping[str, Array]
Work = Callable[[int, Arguments], Array]  # (batch, the round's arguments) -> its result
Delay = Callable[[int, int], float]  # (worker, round) -> seconds that it waits first: rehearses stragglers
WORKING, USED, NOT_NEEDED, NOT_WAITED_FOR = "working", "used", "not needed", "not waited for"
NORMAL = {USED, NOT_NEEDED, NOT_WAITED_FOR}  # states of workers at the end of a round that need no remark


@dataclass(frozen=True)
class AggregationJob:
    """Arguments with which workers are started: the computation of a batch, the code, and delays for tests."""

    work: Work
    code: GradientCode
    delay_s: Delay | None


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


def serve_rounds(connection: Connection, rank_info: RankInfo, job: AggregationJob) -> None:
    """Main function of a worker process: computes and sends its sum for each round that it takes, until it is killed."""
    received: dict[str, Array] = {}
    while True:
        number, names, new = connection.recv()
        received |= new
        total, error = None, ""
        try:
            time.sleep(job.delay_s(rank_info.rank, number) if job.delay_s else 0.0)
            total = partial_sum(job.work, job.code, rank_info.rank, {name: received[name] for name in names})
        except Exception as failure:
            error = f"{type(failure).__name__}: {first_line(failure)}"
        connection.send(Answer(number, total, error))


def partial_sum(work: Work, code: GradientCode, worker: int, arguments: Arguments) -> Array | None:
    """Returns the sum of a worker's batch results; None if it has no batches.

    Args:
        work: computes a batch.
        code: assigns batches to workers.
        worker: the worker's number.
        arguments: arguments of the round.

    Raises:
        BadInput: if batch results have different shapes.
    """
    total: Array | None = None
    for batch in np.flatnonzero(code.holds_WB[worker]).tolist():
        result = work(batch, arguments)
        if total is not None and total.shape != result.shape:
            raise BadInput(f"batch {batch}: expected shape {total.shape} like the batch before, found {result.shape}")
        total = np.array(result) if total is None else total + result
    return total


@dataclass(frozen=True)
class AggregationResult:
    """Result of one aggregation round.

    Attributes:
        total: the sum over all batches, in the shape of one batch's result.
        states: state of each worker: "used"; "not needed" (no batches, or another worker sent the same sum before); "not waited
            for"; or a description of its failure.
    """

    total: Array
    states: tuple[str, ...]


class AggregationRound:
    """State of one round at the master: collects the workers' answers until they determine the sum.

    Args:
        number: the round's number.
        code: assigns batches to workers.
        like: an array with the sum's shape and type.
    """

    def __init__(self, number: int, code: GradientCode, like: Array) -> None:
        self._number, self._code, self._like = number, code, like
        self._batches_W = [tuple(np.flatnonzero(holds_B).tolist()) for holds_B in code.holds_WB]
        self._states = [WORKING if batches else NOT_NEEDED for batches in self._batches_W]
        self._sums: dict[int, Array] = {}  # by worker, the sums that are used

    @property
    def determined(self) -> bool:
        """True if the answers so far determine the sum."""
        return self._code.covered(list(self._sums))

    def set_state(self, worker: int, state: str) -> None:
        """Sets the state of a worker."""
        self._states[worker] = state

    def take(self, worker: int, answer: Answer) -> None:
        """Processes a worker's answer: uses it, ignores it as late or as a copy of a used one, or records its failure."""
        if answer.round != self._number or self._states[worker] != WORKING:
            return
        total = answer.total
        if total is None or (refusal := self._refusal(total)):
            self.lose(worker, f"failed: {answer.error}" if total is None else refusal)
            return
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
        reasons = "; ".join(
            f"worker {worker} {state}" for worker, state in enumerate(self._states) if state not in (WORKING, *NORMAL)
        )
        raise RankFailed(f"aggregation: {subject} held by no worker that is left: {reasons}")

    def result(self) -> AggregationResult:
        """Returns the sum, which must be determined, and the state of each worker."""
        total = np.zeros_like(self._like)
        for worker in sorted(self._sums, key=self._batches_W.__getitem__):  # so that no bit depends on who was first
            total += self._sums[worker]
        states = tuple(NOT_WAITED_FOR if state == WORKING else state for state in self._states)
        return AggregationResult(total, states)

    def _refusal(self, total: Array) -> str:
        """Why a worker's sum cannot be used; empty where it can."""
        if total.shape != self._like.shape or total.dtype != self._like.dtype:
            return f"refused: expected {self._like.dtype} {self._like.shape}, found {total.dtype} {total.shape}"
        if total.dtype.kind == "f" and not np.isfinite(total).all():
            return "refused: expected finite numbers, found NaN or infinity"
        return ""


class CodedAggregator:
    """Sums over batches in rounds, with redundant worker processes. A context manager: all workers have ended at its end.

    In each round a worker sums its batches and sends the sum. The round ends when the received sums determine the whole sum.
    Sums of integers equal the serial sum bit for bit.

    Args:
        work: picklable; called with a batch's number and the round's arguments; returns an array, always of one shape and type.
        code: assigns batches to workers.
        timeout_s: seconds without any arrival after which a round fails.
        delay_s: called with (worker, round); returns seconds by which the worker is delayed, to simulate stragglers.

    Attributes:
        lost: {worker: reason as text} of the workers whose processes have ended, or did not start.

    Source: BCC (arXiv:1710.09990).
    """

    def __init__(self, work: Work, code: GradientCode, *, timeout_s: float = 300.0, delay_s: Delay | None = None) -> None:
        self._job, self._workers, self._timeout_s = AggregationJob(work, code, delay_s), len(code.holds_WB), timeout_s
        self._processes: dict[int, tuple[Any, Connection]] = {}  # by worker
        self._threads = ThreadPoolExecutor(self._workers, thread_name_prefix="aurora-worker")
        self._inbox = SimpleQueue[tuple[int, Answer | str]]()  # (worker, its answer or how its process ended)
        self._begun = threading.Condition()  # notified of a new round, and of the end
        self._number, self._arguments, self._closed = 0, dict[str, Array](), False
        self.lost: dict[int, str] = {}

    def __enter__(self) -> Self:
        try:
            for worker in range(self._workers):
                info = RankInfo(worker, self._workers, "", 0, self._timeout_s, worker, self._workers, launched=True)
                try:
                    self._processes[worker] = start_process(info, serve_rounds, self._job)
                except Exception as error:  # such as too many processes or open files
                    self.lost[worker] = f"did not start: {first_line(error)}"
                else:
                    self._threads.submit(self._talk, worker)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_error: object) -> None:
        with self._begun:
            self._closed = True
            self._begun.notify_all()
        for process, _ in self._processes.values():
            process.kill()
        self._threads.shutdown()
        end_processes(self._processes.values())

    @property
    def pids(self) -> dict[int, int]:
        """{worker: process id} of the workers that were not lost."""
        return {worker: process.pid for worker, (process, _) in self._processes.items() if worker not in self.lost}

    def aggregate(self, like: Array, arguments: Arguments | None = None) -> AggregationResult:
        """Runs one round: returns the sum of work(batch, arguments) over all batches, and the workers' states.

        Args:
            like: an array with the sum's shape and type.
            arguments: arrays for all workers, by name, which must not be changed later; an array that is the same object as in
                an earlier round is not sent again.

        Raises:
            RankFailed: if the remaining workers cannot determine the sum, or nothing arrives for timeout_s.
        """
        with self._begun:
            self._number, self._arguments = self._number + 1, dict(arguments or {})
            self._begun.notify_all()
        current = AggregationRound(self._number, self._job.code, like)
        for worker, reason in self.lost.items():
            current.set_state(worker, reason)
        current.check_recoverable()
        while not current.determined:
            try:
                worker, event = self._inbox.get(timeout=self._timeout_s)
            except Empty:
                raise RankFailed(f"aggregation: nothing came from the workers for {self._timeout_s:g} s") from None
            if isinstance(event, Answer):
                current.take(worker, event)
            else:
                self.lost[worker] = event
                current.lose(worker, event)
        return current.result()

    def _talk(self, worker: int) -> None:
        """Sends the newest round to a worker, and waits for its answer, until its process or the aggregation ends."""
        process, connection = self._processes[worker]
        number, sent = 0, dict[str, Array]()
        with suppress(EOFError, OSError):
            while True:
                with self._begun:
                    while self._number == number and not self._closed:
                        self._begun.wait()
                    if self._closed:
                        return
                    number, arguments = self._number, self._arguments
                new = {name: array for name, array in arguments.items() if sent.get(name) is not array}
                sent |= new
                connection.send((number, tuple(arguments), new))
                self._inbox.put((worker, connection.recv()))
        self._inbox.put((worker, exit_reason(process)))
