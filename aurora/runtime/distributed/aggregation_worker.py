"""Worker side of a coded aggregation: sums the batches that the code gives it, round after round, until the master ends."""

import datetime
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from aurora.errors import BadInput
from aurora.planner.gradient_codes import GradientCode
from aurora.runtime.distributed.launcher import RankInfo, describe_error
from aurora.runtime.distributed.store_messages import pack_message, unpack_message

Array = NDArray[Any]
Work = Callable[[int, Array | None], Array]  # (batch, the round's argument) -> its result
Delay = Callable[[int, int], float]  # (worker, round) -> seconds that it waits first: rehearses stragglers

RESULTS_KEY = "aggregation/results"
FOREVER = datetime.timedelta(days=30)


def round_key(number: int) -> str:
    """Returns the store key whose value says that round `number` has begun (b"go") or that all rounds are over (b"end")."""
    return f"aggregation/round/{number}"


def argument_key(number: int) -> str:
    """Returns the store key of the message with the code and the argument of round `number`."""
    return f"aggregation/argument/{number}"


@dataclass(frozen=True)
class AggregationJob:
    """What workers compute, given to them at their start.

    Args:
        work: called with (batch, the round's argument); returns the batch's result.
        codes: which workers hold which batches; each round names one code by its index.
        delay_s: called with (worker, round); returns the seconds that the worker waits first, to rehearse stragglers. None: no
            delay.
    """

    work: Work
    codes: tuple[GradientCode, ...]
    delay_s: Delay | None


def run_worker(connection: Connection, rank_info: RankInfo, job: AggregationJob) -> None:
    """Main function of a worker's process: runs `serve_rounds`, and sends an unexpected error to the master.

    Args:
        connection: pipe to the master.
        rank_info: the worker's number, how many workers there are, and the store of their rendezvous with the master.
        job: what to compute.
    """
    try:
        serve_rounds(rank_info, job)
    except BaseException as error:
        connection.send(describe_error(error))


def serve_rounds(rank_info: RankInfo, job: AggregationJob) -> NoReturn:
    """Serves round after round, always the newest. Ends the process when the master says so or is gone.

    Args:
        rank_info, job: as in `run_worker`.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore(rank_info.host, rank_info.port, is_master=False, timeout=FOREVER)
    newest, worker, number = _NewestRound(rank_info), rank_info.rank, 0
    while True:
        number = newest.after(number)
        head, argument = unpack_message(store, store.get(argument_key(number)), delete=False)
        code = job.codes[head["code"]]
        delay_s = job.delay_s(worker, number) if job.delay_s else 0.0
        if delay_s and newest.after(number, delay_s) > number:
            continue
        began_s = time.perf_counter()
        total, error = None, ""
        try:
            total = _weighted_sum(job.work, code, worker, argument, newest, number)
        except Exception as failure:
            lines = str(failure).strip().splitlines()
            error = f"{type(failure).__name__}: {lines[0] if lines else 'no message'}"
        if newest.number == number and code.code_WB[worker].any():
            head = {"round": number, "worker": worker, "error": error, "seconds": time.perf_counter() - began_s}
            message = pack_message(store, f"aggregation/result/{number}/{worker}", head, total)
            store.queue_push(RESULTS_KEY, message)


def _weighted_sum(
    work: Work, code: GradientCode, worker: int, argument: Array | None, newest: "_NewestRound", number: int
) -> Array | None:
    """Sums the worker's batches by the code's weights; None if it holds none. Stops early when a later round begins."""
    total: Array | None = None
    for batch in np.flatnonzero(code.code_WB[worker]).tolist():
        result = work(batch, argument)
        if code.needed is not None:
            result = result * code.code_WB[worker, batch]
        if total is not None and total.shape != result.shape:
            raise BadInput(f"batch {batch}: expected shape {total.shape} like the batch before, found {result.shape}")
        total = np.array(result) if total is None else total + result
        if newest.number > number:
            break
    return total


class _NewestRound:
    """Follows the store's rounds in a thread, which also ends this process when the aggregation ends."""

    def __init__(self, rank_info: RankInfo) -> None:
        self.number = 0
        self._changed = threading.Condition()
        threading.Thread(target=self._follow, args=(rank_info,), daemon=True, name="aurora-rounds").start()

    def after(self, number: int, timeout_s: float | None = None) -> int:
        """Waits for a round after `number`, at most timeout_s. Returns the newest."""
        with self._changed:
            self._changed.wait_for(lambda: self.number > number, timeout_s)
            return self.number

    def _follow(self, rank_info: RankInfo) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        try:
            store = TCPStore(rank_info.host, rank_info.port, is_master=False, timeout=FOREVER)
            while store.get(round_key(self.number + 1)) != b"end":
                with self._changed:
                    self.number += 1
                    self._changed.notify_all()
        finally:
            os._exit(0)  # the master has what it wanted, or is gone
