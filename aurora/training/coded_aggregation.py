"""Coded aggregation: a sum over batches from redundant workers; a slow worker is not waited for if others hold its batches.

The master is `CodedAggregator`; a worker runs `serve_rounds`. A pipe to each worker carries the rounds, with the arguments that
it does not have yet, and its answers. Two threads of the master serve a pipe, so that a worker that neither reads nor sends
delays nobody; it gets the newest round when it reads again. Copies that come are compared; where they differ, the master
computes.
Source: BCC (arXiv:1710.09990).
"""

import pickle
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from typing import Any, Self

from aurora.errors import RankFailed
from aurora.planner.gradient_codes import GradientCode
from aurora.runtime.distributed.launcher import RankInfo, start_process
from aurora.training.aggregation_round import AggregationRound, Answer, Array, Watch
from aurora.training.aggregation_worker import (
    AggregationJob,
    Arguments,
    Delay,
    Newest,
    Round,
    Work,
    run_worker,
    send_rounds,
    weighted_sum,
)
from aurora.types import AggregationResult

Message = Answer | str | None  # of a worker: what it computed, why it ends, or that its pipe has ended


class CodedAggregator:
    """Worker processes that aggregate round after round. A context manager: no worker is left when the block ends.

    A worker sums its batches and sends once a round, which ends when what has arrived determines the sum. Integers are the
    serial sum bit for bit. Copies of the same batches that have come until then are compared; where they differ, this process
    computes these batches, and the report names the workers that were wrong.

    Args:
        work: picklable; called with a batch's number and the round's arguments, returns an array of one shape and type.
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
        """The workers whose processes have ended, and how each did."""
        return dict(self._lost)

    @property
    def pids(self) -> dict[int, int]:
        """The process id of each worker that was not lost."""
        return {number: worker.process.pid for number, worker in enumerate(self._workers) if number not in self._lost}

    def aggregate(self, like: Array, arguments: Arguments | None = None, code: int = 0) -> AggregationResult:
        """Performs one round: sums work(batch, arguments) over all batches.

        Args:
            like: an array with the sum's shape and type.
            arguments: by name what is sent to all workers; an array that is the same object as in the round before is not sent
                again.
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
