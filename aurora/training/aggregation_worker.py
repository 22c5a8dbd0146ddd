"""Worker of a coded aggregation: computes its batches in the newest round, and sends their sum."""

import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from aurora.errors import BadInput
from aurora.planner.gradient_codes import GradientCode
from aurora.runtime.distributed.launcher import RankInfo, describe_error
from aurora.training.aggregation_round import Answer

Array = NDArray[Any]
Arguments = Mapping[str, Array]
Work = Callable[[int, Arguments], Array]  # (batch, the round's arguments) -> its result
Delay = Callable[[int, int], float]  # (worker, round) -> seconds that it waits first: rehearses stragglers
T = TypeVar("T")


@dataclass(frozen=True)
class AggregationJob:
    """Job that workers are started with; each round names one of the codes by its index."""

    work: Work
    codes: tuple[GradientCode, ...]
    delay_s: Delay | None


@dataclass(frozen=True)
class Round(Generic[T]):
    """A round that workers are told of.

    Attributes:
        number: its number.
        code: the index of its code.
        arguments: by name: arrays at a worker, pickled ones at the master.
    """

    number: int
    code: int
    arguments: Mapping[str, T]


class Newest(Generic[T]):
    """The newest of the values that one thread puts and another waits for; those between are skipped."""

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
        """Waits for a value after the first `seen`, at most timeout_s. Returns how many were put, and the last of them."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_after(seen), timeout_s)
            return self._values, self._newest

    def is_after(self, seen: int) -> bool:
        """Returns whether a value came after the first `seen`."""
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

    A round that ends while the worker computes, or waits, or is stopped, gets nothing from it. Then it takes the newest one,
    with the arguments of that.

    Args:
        connection: to the master; the process ends when the master is gone.
        worker: its number.
        job: what it is to do.
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
        code: says which batches the worker computes.
        worker: its number.
        arguments: the round's.
        over: returns whether the round is over; then the sum is not completed.

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
    """Sends a worker the newest round, again and again, with the arguments that it does not have, until that is None."""
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
