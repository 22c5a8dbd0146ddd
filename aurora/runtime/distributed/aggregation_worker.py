"""Worker of a coded aggregation: computes its batches in the newest round, and sends their sum."""

import datetime
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aurora.errors import BadInput
from aurora.planner.gradient_codes import GradientCode
from aurora.runtime.distributed.aggregation_messages import (
    END,
    RESULTS_KEY,
    argument_key,
    pack_message,
    rounds_key,
    unpack_message,
)
from aurora.runtime.distributed.launcher import RankInfo, describe_error

Array = NDArray[Any]
Arguments = Mapping[str, Array]
Work = Callable[[int, Arguments], Array]  # (batch, the round's arguments) -> its result
Delay = Callable[[int, int], float]  # (worker, round) -> seconds that it waits first: rehearses stragglers

FOREVER = datetime.timedelta(days=30)


@dataclass(frozen=True)
class AggregationJob:
    """What workers are started with; each round names one of the codes by its index."""

    work: Work
    codes: tuple[GradientCode, ...]
    delay_s: Delay | None
    secret: bytes


def run_worker(connection: Connection, rank_info: RankInfo, job: AggregationJob) -> None:
    """Main function of a worker's process: serves rounds, and sends an unexpected error to the master."""
    try:
        serve_rounds(partial(connect_store, rank_info), rank_info.rank, job, partial(os._exit, 0))
    except BaseException as error:
        connection.send(describe_error(error))


def connect_store(rank_info: RankInfo) -> Any:
    """Returns a connection to the store of the rendezvous that waits for ever."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore(rank_info.host, rank_info.port, is_master=False, timeout=FOREVER)


def serve_rounds(connect: Callable[[], Any], worker: int, job: AggregationJob, on_end: Callable[[], object]) -> None:
    """Serves the newest round, again and again, until the master says that there is none any more.

    A round that ends while the worker computes, or waits, or is stopped, gets nothing from it. Then it takes the newest one,
    with the arguments of that.

    Args:
        connect: returns a connection to the store.
        worker: its number.
        job: what it is to do.
        on_end: called in another thread when the master says so, or is gone.

    Raises:
        BadInput: if another than the master has told of a round.
    """
    store, newest, read = connect(), _NewestRound(connect(), worker, on_end), dict[str, tuple[int, Array]]()
    seen, message = newest.after(0)
    while message != END:
        try:
            head, _ = unpack_message(store, job.secret, message)
        except BadInput as refused:
            raise BadInput(f"aggregation: what rank 0 asks for {refused}") from None
        arguments = _arguments(store, job.secret, head["arguments"], read)
        delay_s = job.delay_s(worker, head["round"]) if job.delay_s else 0.0
        if arguments is not None and not (delay_s and newest.after(seen, delay_s)[0] > seen):
            code, began_s, total, error = job.codes[head["code"]], time.perf_counter(), None, ""
            try:
                total = weighted_sum(job.work, code, worker, arguments, partial(newest.is_after, seen))
            except Exception as failure:
                lines = str(failure).strip().splitlines()
                error = f"{type(failure).__name__}: {lines[0] if lines else 'no message'}"
            if not newest.is_after(seen) and code.code_WB[worker].any():
                seconds = time.perf_counter() - began_s
                said = {"run": head["run"], "round": head["round"], "worker": worker, "error": error, "seconds": seconds}
                key = f"aggregation/result/{head['round']}/{worker}"
                store.queue_push(RESULTS_KEY, pack_message(store, job.secret, key, said, total))
        seen, message = newest.after(seen)


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


def _arguments(
    store: Any, secret: bytes, version_of: Mapping[str, int], read: dict[str, tuple[int, Array]]
) -> Arguments | None:
    """A round's arguments, of which those that were read before are in `read`; None if newer ones have replaced them."""
    for name, version in version_of.items():
        if read.get(name, (0, None))[0] != version:
            try:
                head, array = unpack_message(store, secret, store.get(argument_key(name, version)))
            except BadInput:  # half of it is of the newer one
                return None
            if head["version"] != version or array is None:
                return None
            read[name] = version, array
    return {name: read[name][1] for name in version_of}


class _NewestRound:
    """Hears of the rounds in a thread, while the worker computes."""

    def __init__(self, store: Any, worker: int, on_end: Callable[[], object]) -> None:
        self._store, self._worker, self._on_end = store, worker, on_end
        self._newest = 0, b""  # how many were told of, and the last
        self._changed = threading.Condition()
        threading.Thread(target=self._follow, daemon=True, name="aurora-rounds").start()

    def after(self, seen: int, timeout_s: float | None = None) -> tuple[int, bytes]:
        """Waits for a round after the first `seen`, at most timeout_s. Returns how many were told of, and the last of them."""
        with self._changed:
            self._changed.wait_for(lambda: self._newest[0] > seen, timeout_s)
            return self._newest

    def is_after(self, seen: int) -> bool:
        """Returns whether a round came after the first `seen`."""
        return self._newest[0] > seen

    def _follow(self) -> None:
        message = b""
        try:
            while message != END:
                message = bytes(self._store.queue_pop(rounds_key(self._worker)))
                with self._changed:
                    self._newest = self._newest[0] + 1, message
                    self._changed.notify_all()
        finally:
            self._on_end()
