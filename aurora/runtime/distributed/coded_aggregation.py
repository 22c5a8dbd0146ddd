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
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Self

import numpy as np

from aurora.errors import BadInput, RankFailed
from aurora.planner.gradient_codes import GradientCode, load_of, make_code
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
    FOREVER,
    AggregationJob,
    Arguments,
    Delay,
    Work,
    connect_store,
    run_worker,
    serve_rounds,
    weighted_sum,
)
from aurora.runtime.distributed.launcher import RankInfo, end_processes, hosted_store, start_process
from aurora.runtime.distributed.secret import new_secret, secret_from_environment
from aurora.types import AggregationResult

HEAD = {"run": str, "round": int, "worker": int, "error": str, "seconds": float}  # of a worker's message, and their types
LOG = logging.getLogger("aurora.aggregation")

POLL_S = 0.001
LIVENESS_S = 0.05  # between two looks at whether workers live


def coded_sum(
    work: Work,
    batches: int,
    workers: int,
    redundancy: int,
    scheme: str,
    *,
    like: Array,
    rng: np.random.Generator,
    timeout_s: float = 300.0,
    agreeing: int = 1,
    delay_s: Delay | None = None,
    watch: Watch = lambda _reports: None,
    rank_info: RankInfo | None = None,
) -> AggregationResult:
    """Sums work(batch, {}) over all batches by `workers` processes, each batch held by at least `redundancy` of them.

    A worker sums its batches and sends once. This process stops when what has arrived determines the sum, and ends the other
    workers. Integers are the serial sum bit for bit. Copies of the same batches that have come until then are compared; where
    they differ, this process computes these batches, and the report names the workers that were wrong.

    Args:
        work: picklable; called with a batch's number and no arguments, returns an array with the shape and type of `like`.
        batches, workers: number of batches, and of processes to start.
        redundancy: how many workers hold each batch at least.
        scheme: name of the gradient code, which decides which workers hold which batches.
        like: an array with the sum's shape and type.
        rng: random generator of the code.
        timeout_s: seconds without any arrival after which the aggregation fails.
        agreeing: how many workers must have sent the same for each batch; 1: the first copy counts, unless another differs
            before the sum is known. Where too few workers are left to agree, this process computes.
        delay_s: called with (worker, round); returns the seconds that the worker waits first, to rehearse stragglers.
        watch: called with the reports of all workers whenever one of them changes.
        rank_info: only under torchrun, where every rank calls this function: rank 0 aggregates; the other ranks are the
            workers, and their processes end with the aggregation.

    Raises:
        BadInput: if sizes or scheme do not fit.
        InfeasiblePlan: if the workers cannot hold all batches.
        RankFailed: if the workers that are left do not determine the sum, or nothing arrives for timeout_s.

    Source: BCC (arXiv:1710.09990); cyclic repetition: Tandon et al., Gradient Coding (arXiv:1612.03301).
    """
    load = load_of(scheme, workers, batches, redundancy)
    if agreeing > redundancy:
        raise BadInput(f"`agreeing`: expected at most the {redundancy} workers that hold each batch, found {agreeing}")
    code = make_code(scheme, workers, batches, load, rng)
    with CodedAggregator(
        work, [code], timeout_s=timeout_s, agreeing=agreeing, delay_s=delay_s, watch=watch, rank_info=rank_info
    ) as aggregator:  # fmt: skip
        return aggregator.aggregate(like)


class CodedAggregator:
    """Worker processes that aggregate round after round. A context manager: no worker is left when the block ends.

    Args:
        work: picklable; called with a batch's number and the round's arguments.
        codes: gradient codes, all for the same number of workers; each round uses one of them.
        timeout_s, agreeing, delay_s, watch, rank_info: as in `coded_sum`. Under torchrun the ranks know the run's secret from
            the environment variable AURORA_SECRET; without it, their messages prove nothing.
        threads: whether workers are threads of this process.
        port: port of the store; 0: any free one.
    """

    def __init__(
        self,
        work: Work,
        codes: Sequence[GradientCode],
        *,
        timeout_s: float = 300.0,
        agreeing: int = 1,
        delay_s: Delay | None = None,
        watch: Watch = lambda _reports: None,
        rank_info: RankInfo | None = None,
        threads: bool = False,
        port: int = 0,
    ) -> None:
        self._workers = len(codes[0].code_WB)
        if rank_info is not None and rank_info.ranks != self._workers:
            raise BadInput(f"`workers`: expected the {rank_info.ranks} ranks of this run, found {self._workers}")
        assert all(len(code.code_WB) == self._workers for code in codes)
        if agreeing > 1 and any(code.needed is not None for code in codes):
            raise BadInput(f"`agreeing`: expected 1 with a scheme whose messages are no copies of each other, found {agreeing}")
        secret = new_secret() if rank_info is None else secret_from_environment() or b""
        self._job, self._agreeing = AggregationJob(work, tuple(codes), delay_s, secret), agreeing
        self._timeout_s, self._watch, self._rank_info, self._threads, self._port = timeout_s, watch, rank_info, threads, port
        self._store: Any = None
        self._hosted = ExitStack()
        self._children: dict[int, tuple[Any, Any]] = {}
        self._lost: dict[int, str] = {}  # how each lost worker ended
        self._published: dict[str, tuple[int, Array]] = {}  # by name the newest version of an argument
        self._run = secrets.token_hex(8)  # tells this aggregation's messages from those of another with the same secret
        self._number, self._refused, self._last_arrival_s = 0, 0, 0.0

    def __enter__(self) -> Self:
        try:
            if self._threads:
                self._start_threads()
            else:
                for rank_info in self._open_store():
                    self._children[rank_info.rank] = start_process(rank_info, run_worker, self._job)
        except BaseException:
            self._close()
            raise
        return self

    def _start_threads(self) -> None:
        """Starts workers that are threads."""
        from aurora.runtime.distributed.thread_store import ThreadStore

        self._store = store = ThreadStore()
        store.set_timeout(FOREVER)
        for worker in range(self._workers):
            args = (lambda: store, worker, self._job, lambda: None)
            threading.Thread(target=serve_rounds, args=args, daemon=True, name=f"aurora-rank-{worker}").start()

    def _open_store(self) -> list[RankInfo]:
        """Connects to the store, hosting it unless torchrun does. Returns the workers to start here."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        rank_info, workers = self._rank_info, self._workers
        if rank_info is None:
            host, port = self._hosted.enter_context(hosted_store(self._port))
            self._store = TCPStore(host, port, is_master=False, timeout=FOREVER)
            return [RankInfo(w, workers, host, port, self._timeout_s, w, workers, launched=True) for w in range(workers)]
        if rank_info.rank:
            serve_rounds(lambda: connect_store(rank_info), rank_info.rank, self._job, lambda: os._exit(0))
        agent_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun hosts it for all ranks
        self._store = TCPStore(rank_info.host, rank_info.port, is_master=not agent_store, wait_for_workers=False)
        return [rank_info]

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
            RankFailed: as in `coded_sum`.
        """
        self._number += 1
        self._newly_lost()
        given = arguments or {}
        head = {"run": self._run, "round": self._number, "code": code, "arguments": self._publish(given)}
        told = pack_message(self._store, self._job.secret, "", head, None)
        for worker in range(self._workers):
            if worker not in self._lost:
                self._store.queue_push(rounds_key(worker), told)
        current = AggregationRound(
            self._number, self._job.codes[code], like, self._watch, self._agreeing, self._computed(given, code)
        )
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
