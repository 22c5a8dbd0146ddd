"""Coded aggregation: a sum over batches from redundant workers; a slow worker is not waited for if others hold its batches.

The master is `CodedAggregator`; a worker's process runs `_serve_rounds`. They talk through a store, which holds the number of
the newest round, its argument, and a queue of results. Every message carries a proof that its sender knows the run's secret, so
that whoever else reaches the store changes no sum. Copies that come are compared; where they differ, the master computes.
Source: BCC (arXiv:1710.09990).
"""

import datetime
import hashlib
import io
import json
import logging
import multiprocessing.connection
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NoReturn, Self

import numpy as np
from numpy.typing import NDArray

from aurora.errors import BadInput, RankFailed
from aurora.planner.gradient_codes import GradientCode, load_of, make_code
from aurora.runtime.distributed.launcher import RankInfo, describe_error, end_processes, hosted_store, start_process
from aurora.runtime.distributed.secret import SECRET, new_secret, proof, proves, secret_from_environment
from aurora.types import AggregationResult, WorkerReport

Array = NDArray[Any]
Work = Callable[[int, Array | None], Array]  # (batch, the round's argument) -> its result
Delay = Callable[[int, int], float]  # (worker, round) -> seconds that it waits first: rehearses stragglers
Watch = Callable[[Sequence[WorkerReport]], None]
Message = tuple[dict[str, Any], Array | None]  # head, and the worker's sum
HEAD = {"run": str, "round": int, "worker": int, "error": str, "seconds": float}  # of a worker's message, and their types
LOG = logging.getLogger("aurora.aggregation")

RESULTS_KEY = "aggregation/results"
FOREVER = datetime.timedelta(days=30)
PIECE_BYTES = 4 << 20  # a TCPStore refuses values of 8 MiB
POLL_S = 0.001
LIVENESS_S = 0.05  # between two looks at whether workers live
ROUNDING = 0.05  # how far a decoded count may be from a whole number


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
    """Sums work(batch, None) over all batches by `workers` processes, each batch held by at least `redundancy` of them.

    A worker sums its batches and sends once. This process stops when what has arrived determines the sum, and ends the other
    workers. Integers are the serial sum bit for bit. Copies of the same batches that have come until then are compared; where
    they differ, this process computes these batches, and the report names the workers that were wrong.

    Args:
        work: picklable; called with a batch's number, returns an array with the shape and type of `like`.
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
        work, [code], like, timeout_s=timeout_s, agreeing=agreeing, delay_s=delay_s, watch=watch, rank_info=rank_info
    ) as aggregator:  # fmt: skip
        return aggregator.aggregate()


class CodedAggregator:
    """Worker processes that aggregate round after round. A context manager: no worker is left when the block ends.

    Args:
        codes: gradient codes, all for the same number of workers; each round uses one of them.
        work, like, timeout_s, agreeing, delay_s, watch, rank_info: as in `coded_sum`. Under torchrun the ranks know the run's
            secret from the environment variable AURORA_SECRET; without it, their messages prove nothing.
    """

    def __init__(
        self,
        work: Work,
        codes: Sequence[GradientCode],
        like: Array,
        *,
        timeout_s: float = 300.0,
        agreeing: int = 1,
        delay_s: Delay | None = None,
        watch: Watch = lambda _reports: None,
        rank_info: RankInfo | None = None,
    ) -> None:
        self._workers, self._like = len(codes[0].code_WB), like
        if rank_info is not None and rank_info.ranks != self._workers:
            raise BadInput(f"`workers`: expected the {rank_info.ranks} ranks of this run, found {self._workers}")
        assert all(len(code.code_WB) == self._workers for code in codes)
        if agreeing > 1 and any(code.needed is not None for code in codes):
            raise BadInput(f"`agreeing`: expected 1 with a scheme whose messages are no copies of each other, found {agreeing}")
        secret = new_secret() if rank_info is None else secret_from_environment() or b""
        self._job, self._agreeing = _Job(work, tuple(codes), delay_s, secret), agreeing
        self._timeout_s, self._watch, self._rank_info = timeout_s, watch, rank_info
        self._store: Any = None
        self._hosted = ExitStack()
        self._children: dict[int, tuple[Any, Any]] = {}
        self._lost: dict[int, str] = {}  # how each lost worker ended
        self._run = secrets.token_hex(8)  # tells this aggregation's messages from those of another with the same secret
        self._number, self._refused, self._last_arrival_s = 0, 0, 0.0

    def __enter__(self) -> Self:
        try:
            for rank_info in self._open_store():
                self._children[rank_info.rank] = start_process(rank_info, _run_worker, self._job)
        except BaseException:
            self._close()
            raise
        return self

    def _open_store(self) -> list[RankInfo]:
        """Connects to the store, hosting it unless torchrun does. Returns the workers to start here."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        rank_info, workers = self._rank_info, self._workers
        if rank_info is None:
            host, port = self._hosted.enter_context(hosted_store(0))
            self._store = TCPStore(host, port, is_master=False, timeout=FOREVER)
            return [RankInfo(w, workers, host, port, self._timeout_s, w, workers, launched=True) for w in range(workers)]
        if rank_info.rank:
            _serve_rounds(rank_info, self._job)
        agent_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun hosts it for all ranks
        self._store = TCPStore(rank_info.host, rank_info.port, is_master=not agent_store, wait_for_workers=False)
        return [rank_info]

    def __exit__(self, *_error: object) -> None:
        self._close()

    def _close(self) -> None:
        if self._store is not None:
            self._store.set(_round_key(self._number + 1), b"end")
        end_processes(self._children.values())
        self._store = None
        self._hosted.close()

    def aggregate(self, argument: Array | None = None, code: int = 0) -> AggregationResult:
        """Performs one round: sums work(batch, argument) over all batches.

        Args:
            argument: sent to all workers; None: nothing is sent.
            code: index of the code of this round.

        Raises:
            RankFailed: as in `coded_sum`.
        """
        self._number += 1
        key, head = _argument_key(self._number), {"run": self._run, "round": self._number, "code": code}
        self._store.set(key, _packed(self._store, self._job.secret, key, head, argument))
        self._store.set(_round_key(self._number), b"go")
        current = _Round(
            self._number, self._job.codes[code], self._like, self._watch, self._agreeing, self._computed(argument, code)
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

    def _computed(self, argument: Array | None, code: int) -> Callable[[int], Array]:
        """Returns a function that computes here what a worker should send in a round, for `_Round`."""

        def compute(worker: int) -> Array:
            total = _weighted_sum(self._job.work, self._job.codes[code], worker, argument, lambda: False)
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
            head, total = _unpacked(self._store, self._job.secret, self._store.queue_pop(RESULTS_KEY), delete=True)
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


@dataclass
class _Copies:
    """What workers have sent that hold the same batches: (result, its senders) for each different result."""

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


class _Round:
    """One round at the master: what has arrived, and whether it determines the sum.

    compute: returns what a worker should send.
    """

    def __init__(
        self, number: int, code: GradientCode, like: Array, watch: Watch, agreeing: int, compute: Callable[[int], Array]
    ) -> None:
        self.began_s = time.perf_counter()
        self._number, self._code, self._like, self._watch = number, code, like, watch
        self._agreeing, self._compute = agreeing, compute
        batches_W = [tuple(np.flatnonzero(code_B).tolist()) for code_B in code.code_WB]
        self._reports = [WorkerReport(worker, batches) for worker, batches in enumerate(batches_W)]
        self._arrived: list[int] = []
        self._sums: dict[int, Array] = {}  # by worker, where messages are no copies of each other
        self._copies = {} if code.needed is not None else {batches: _Copies() for batches in sorted({*batches_W} - {()})}
        self._weights: Any = None
        self._compute_s, self._late = 0.0, 0

    @property
    def determined(self) -> bool:
        """Whether what has arrived determines the sum."""
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

    def take(self, head: dict[str, Any], message: Array | None) -> None:
        """Handles a message from a worker: counted as late, refused, used, or compared with those of the same batches."""
        worker = head["worker"]
        if head["round"] != self._number or self._reports[worker].state != "working":
            self._late += 1
            return
        if refusal := self._refusal(head, message):
            self.set_state(worker, refusal)
            self.check_recoverable()
            return
        assert message is not None
        self._compute_s = max(self._compute_s, head["seconds"])
        self._arrived.append(worker)
        if self._code.needed is not None:
            self._sums[worker] = message
            self.set_state(worker, "used")
            self._weights = self._code.weights(self._arrived)
            return
        batches = self._reports[worker].batches
        copies = self._copies[batches]
        self.set_state(worker, "not needed" if copies.versions else "used")
        copies.add(worker, message)
        if len(copies.versions) > 1:
            self._settle(batches)
        elif len(copies.versions[0][1]) >= self._agreeing:
            copies.settled = True
        else:
            self.check_recoverable()

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
        """Raises RankFailed where the sum cannot be determined even if all that still work send theirs.

        Batches that have come, and that nobody is left to agree on, are computed here.
        """
        working = {report.batches for report in self._reports if report.state == "working"}
        for batches, copies in self._copies.items():
            if copies.versions and not copies.settled and batches not in working:
                self._settle(batches)
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

    def _refusal(self, head: dict[str, Any], message: Array | None) -> str:
        """Why a message cannot be used; empty where it can."""
        if head["error"]:
            return f"failed: {head['error']}"
        dtype = self._like.dtype if self._code.needed is None else np.dtype(np.float64)
        if message is None or message.shape != self._like.shape or message.dtype != dtype:
            found = "nothing" if message is None else f"{message.dtype} {message.shape}"
            return f"refused: expected {dtype} {self._like.shape}, found {found}"
        if message.dtype.kind == "f" and not np.isfinite(message).all():
            return "refused: expected finite numbers, found NaN or infinity"
        return ""


def _same(a: Array, b: Array) -> bool:
    """Whether two results are the same: integers exactly, other numbers but for rounding."""
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


@dataclass(frozen=True)
class _Job:
    """What workers are started with; each round names one of the codes by its index."""

    work: Work
    codes: tuple[GradientCode, ...]
    delay_s: Delay | None
    secret: bytes  # empty: messages prove nothing


def _run_worker(connection: Connection, rank_info: RankInfo, job: _Job) -> None:
    """Main function of a worker's process: serves rounds, and sends an unexpected error to the master."""
    try:
        _serve_rounds(rank_info, job)
    except BaseException as error:
        connection.send(describe_error(error))


def _serve_rounds(rank_info: RankInfo, job: _Job) -> NoReturn:
    """Serves the newest round, again and again. The process ends when the master says so or is gone."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore(rank_info.host, rank_info.port, is_master=False, timeout=FOREVER)
    newest, worker, number = _NewestRound(rank_info), rank_info.rank, 0
    while True:
        number = newest.after(number)
        try:
            head, argument = _unpacked(store, job.secret, store.get(_argument_key(number)), delete=False)
        except BadInput as refused:
            raise BadInput(f"aggregation: what rank 0 asks for {refused}; expected the same {SECRET} on all ranks") from None
        run = head["run"]
        code = job.codes[head["code"]]
        delay_s = job.delay_s(worker, number) if job.delay_s else 0.0
        if delay_s and newest.after(number, delay_s) > number:
            continue
        began_s = time.perf_counter()
        total, error = None, ""
        try:
            total = _weighted_sum(job.work, code, worker, argument, partial(newest.is_after, number))
        except Exception as failure:
            lines = str(failure).strip().splitlines()
            error = f"{type(failure).__name__}: {lines[0] if lines else 'no message'}"
        if newest.number == number and code.code_WB[worker].any():
            seconds = time.perf_counter() - began_s
            head = {"run": run, "round": number, "worker": worker, "error": error, "seconds": seconds}
            message = _packed(store, job.secret, f"aggregation/result/{number}/{worker}", head, total)
            store.queue_push(RESULTS_KEY, message)


def _weighted_sum(
    work: Work, code: GradientCode, worker: int, argument: Array | None, over: Callable[[], bool]
) -> Array | None:
    """Sums the worker's batches by the code's weights; None if it holds none. Stops early when the round is `over`."""
    total: Array | None = None
    for batch in np.flatnonzero(code.code_WB[worker]).tolist():
        result = work(batch, argument)
        if code.needed is not None:
            result = result * code.code_WB[worker, batch]
        if total is not None and total.shape != result.shape:
            raise BadInput(f"batch {batch}: expected shape {total.shape} like the batch before, found {result.shape}")
        total = np.array(result) if total is None else total + result
        if over():
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

    def is_after(self, number: int) -> bool:
        """Returns whether the newest round comes after `number`."""
        return self.number > number

    def _follow(self, rank_info: RankInfo) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        try:
            store = TCPStore(rank_info.host, rank_info.port, is_master=False, timeout=FOREVER)
            while store.get(_round_key(self.number + 1)) != b"end":
                with self._changed:
                    self.number += 1
                    self._changed.notify_all()
        finally:
            os._exit(0)  # the master has what it wanted, or is gone


def _round_key(number: int) -> str:
    """The store's key that says that a round has begun (b"go"), or that there is none any more (b"end")."""
    return f"aggregation/round/{number}"


def _argument_key(number: int) -> str:
    """The store's key of the message with a round's code and argument."""
    return f"aggregation/argument/{number}"


def _packed(store: Any, secret: bytes, key: str, head: dict[str, Any], array: Array | None) -> bytes:
    """A value of the store: a proof, head as JSON, array as npy; without the array if a large one's pieces lie under `key`."""
    body = io.BytesIO()
    if array is not None:
        np.save(body, array, allow_pickle=False)
    sent = body.getbuffer()
    pieces = -(-len(sent) // PIECE_BYTES) if len(sent) > PIECE_BYTES else 0
    for piece in range(pieces):
        store.set(f"{key}/{piece}", bytes(sent[piece * PIECE_BYTES : (piece + 1) * PIECE_BYTES]))
    digest = hashlib.sha256(sent).hexdigest()
    line = json.dumps({**head, "key": key, "pieces": pieces, "empty": array is None, "digest": digest}).encode()
    return proof(secret, line).encode() + b"\n" + line + b"\n" + (b"" if pieces else bytes(sent))


def _unpacked(store: Any, secret: bytes, message: bytes, delete: bool) -> Message:
    """Head and array of a message that `_packed` made; nothing is unpickled. With `delete`, an array's pieces are removed.

    Raises BadInput if the message is none of this run's members.
    """
    proved, _, rest = message.partition(b"\n")
    line, _, body = rest.partition(b"\n")
    if not proves(secret, proved, line):
        raise BadInput("comes from no member of the run")
    try:
        head = json.loads(line)
        keys = [f"{head['key']}/{piece}" for piece in range(head["pieces"])]
        if keys:
            if not store.check(keys):  # `get` would wait for them
                raise BadInput("was read before")
            body = b"".join(store.get(key) for key in keys)
            for key in keys if delete else ():
                store.delete_key(key)
        if hashlib.sha256(body).hexdigest() != head["digest"]:
            raise BadInput("was changed on its way")
        return head, None if head["empty"] else np.lib.format.read_array(io.BytesIO(body), allow_pickle=False)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise BadInput(f"cannot be read: {error}") from None
