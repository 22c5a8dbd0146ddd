"""Coded aggregation: a sum over batches from redundant workers; a slow worker is not waited for if others hold its batches.

The master is `CodedAggregator`; a worker runs `serve_rounds`. They talk through a store: each worker has a queue of rounds that
it is told of, and all have one of results; a round's arguments lie beside them. Every message carries a proof that its sender
knows the run's secret, so that whoever else reaches the store changes no sum. Copies that come are compared; where they differ,
the master computes.
Source: BCC (arXiv:1710.09990).
"""

import logging
import multiprocessing
import multiprocessing.connection
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Self

from aurora.errors import BadInput, RankFailed
from aurora.planner.gradient_codes import GradientCode
from aurora.runtime.distributed.aggregation_messages import (
    END,
    RESULTS_KEY,
    Message,
    argument_key,
    pack_message,
    rounds_key,
    unpack_message,
)
from aurora.runtime.distributed.aggregation_round import AggregationRound, Array, Watch
from aurora.runtime.distributed.aggregation_worker import (
    AggregationJob,
    Arguments,
    Delay,
    Work,
    connect_store,
    run_worker,
    weighted_sum,
)
from aurora.runtime.distributed.launcher import RankInfo, end_processes, hosted_store, start_process
from aurora.runtime.distributed.secret import new_secret
from aurora.types import AggregationResult

HEAD = {"run": str, "round": int, "worker": int, "error": str, "seconds": float}  # of a worker's message, and their types
LOG = logging.getLogger("aurora.aggregation")

POLL_S = 0.001
LIVENESS_S = 0.05  # between two looks at whether workers live


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
        port: port of the store; 0: any free one.

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
        port: int = 0,
    ) -> None:
        self._workers = len(codes[0].code_WB)
        assert all(len(code.code_WB) == self._workers for code in codes)
        self._job = AggregationJob(work, tuple(codes), delay_s, new_secret())
        self._timeout_s, self._watch, self._port = timeout_s, watch, port
        self._store: Any = None
        self._hosted = ExitStack()
        self._children: dict[int, tuple[Any, Any]] = {}
        self._lost: dict[int, str] = {}  # how each lost worker ended
        self._published: dict[str, tuple[int, Array]] = {}  # by name the newest version of an argument
        self._run = secrets.token_hex(8)  # tells this aggregation's messages from those of another with the same secret
        self._number, self._refused, self._last_arrival_s = 0, 0, 0.0

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._close()
            raise
        return self

    def _start(self) -> None:
        """Hosts the store, connects to it, and starts the workers."""
        host, port = self._hosted.enter_context(hosted_store(self._port))
        workers = self._workers
        ranks = [RankInfo(w, workers, host, port, self._timeout_s, w, workers, launched=True) for w in range(workers)]
        self._store = connect_store(ranks[0])
        for rank_info in ranks:
            self._children[rank_info.rank] = start_process(rank_info, run_worker, self._job)

    def __exit__(self, *_error: object) -> None:
        self._close()

    def _close(self) -> None:
        for worker in range(self._workers) if self._store is not None else ():
            self._store.queue_push(rounds_key(worker), END)
        end_processes(self._children.values())
        self._store = None
        self._hosted.close()

    @property
    def lost(self) -> Mapping[int, str]:
        """The workers whose processes have ended, and how each did."""
        return dict(self._lost)

    @property
    def pids(self) -> dict[int, int]:
        """The process id of each worker that was started here and not lost."""
        return {worker: child.pid for worker, (child, _) in self._children.items() if worker not in self._lost}

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
        self._newly_lost()
        given = arguments or {}
        head = {"run": self._run, "round": self._number, "code": code, "arguments": self._publish(given)}
        told = pack_message(self._store, self._job.secret, "", head, None)
        for worker in range(self._workers):
            if worker not in self._lost:
                self._store.queue_push(rounds_key(worker), told)
        current = AggregationRound(self._number, self._job.codes[code], like, self._watch, self._computed(given, code))
        for worker, reason in self._lost.items():
            current.set_state(worker, reason)
        current.skip_idle()
        while not current.determined:
            message = self._next_message(current.began_s)
            if message is not None:
                current.take(*message)
            else:
                for worker, reason in self._newly_lost().items():
                    current.lose(worker, reason)
                current.check_recoverable()
        return replace(current.result(), refused=self._refused)

    def _publish(self, arguments: Arguments) -> Mapping[str, int]:
        """Puts arguments that are new into the store. Returns the versions by name."""
        for name, array in arguments.items():
            version, published = self._published.get(name, (0, None))
            if array is not published:
                key, head = argument_key(name, version + 1), {"version": version + 1}
                self._store.set(key, pack_message(self._store, self._job.secret, key, head, array))
                self._published[name] = version + 1, array
        return {name: self._published[name][0] for name in arguments}

    def _computed(self, arguments: Arguments, code: int) -> Callable[[int], Array]:
        """Returns a function that computes here what a worker should send in a round, for `AggregationRound`."""

        def compute(worker: int) -> Array:
            total = weighted_sum(self._job.work, self._job.codes[code], worker, arguments, lambda: False)
            assert total is not None
            return total

        return compute

    def _next_message(self, began_s: float) -> Message | None:
        """A worker's next message, of whatever round; None when it is time to look whether workers live.

        A message that no worker sent, or that cannot be read, is dropped.
        """
        until_s = time.perf_counter() + LIVENESS_S
        while not self._store.queue_len(RESULTS_KEY):
            now_s = time.perf_counter()
            if now_s > until_s:
                if now_s - max(began_s, self._last_arrival_s) > self._timeout_s:
                    raise RankFailed(f"aggregation: nothing came from the workers for {self._timeout_s:g} s")
                return None
            time.sleep(POLL_S)
        try:
            head, total = unpack_message(self._store, self._job.secret, self._store.queue_pop(RESULTS_KEY), delete=True)
            if {name: type(head.get(name)) for name in HEAD} != HEAD or head["run"] != self._run:
                raise BadInput("is not one of this run")
            if not 0 <= head["worker"] < self._workers:
                raise BadInput(f"is of worker {head['worker']} of {self._workers}")
        except BadInput as error:
            self._refused += 1
            if self._refused == 1:
                LOG.warning("aggregation: a message in the store %s; it is dropped, and so are others like it", error)
            return None
        self._last_arrival_s = time.perf_counter()
        return head, total

    def _newly_lost(self) -> dict[int, str]:
        """Workers whose processes have ended since the last look, and how."""
        alive = [worker for worker in self._children if worker not in self._lost]
        ready = multiprocessing.connection.wait([self._children[worker][1] for worker in alive], timeout=0)
        found = {}
        for worker in alive:
            child, connection = self._children[worker]
            if connection not in ready:
                continue
            try:
                found[worker] = f"failed: {connection.recv()}"
            except EOFError:
                child.join()
                code = child.exitcode
                found[worker] = f"killed by signal {-code}" if code < 0 else f"died with exit code {code}"
        self._lost |= found
        return found
