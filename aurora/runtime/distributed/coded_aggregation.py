"""A sum over batches, collected from redundant workers: nobody waits for those that stall or die."""

import datetime
import multiprocessing.connection
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from aurora.errors import BadInput, RankFailed
from aurora.planner.replication.gradient_codes import GradientCode, load_of, make_code
from aurora.runtime.distributed.launcher import RankInfo, hosted_store, start, what_happened
from aurora.runtime.distributed.store_messages import put, taken
from aurora.types import AggregationResult, WorkerReport

Array = NDArray[Any]
Work = Callable[[int, Array | None], Array]  # a batch's number, the round's argument -> its result
Delay = Callable[[int, int], float]  # a worker, a round -> seconds
Watch = Callable[[Sequence[WorkerReport]], None]

RESULTS = "collect/results"
POLL_S = 0.001
FOREVER = datetime.timedelta(days=30)
ROUNDING = 0.05  # how far a decoded count may be from a whole number


def collect(
    work: Callable[[int], Array],
    batches: int,
    workers: int,
    redundancy: int,
    scheme: str,
    *,
    like: Array,
    rng: np.random.Generator,
    timeout_s: float = 300.0,
    delay_s: Delay | None = None,
    watch: Watch = lambda _shares: None,
    seat: RankInfo | None = None,
) -> AggregationResult:
    """The sum of work(batch) over all batches, every one of them held by at least `redundancy` of `workers` processes.

    `work` is picklable and gives arrays of `like`'s shape and type. A worker sums its batches and sends once; this process
    keeps first copies, stops when it has every batch, and ends the others: integers are the serial sum bit for bit.
    timeout_s: how long nothing may come. delay_s: a rehearsal's stragglers. seat: under torchrun every rank calls this; rank
    0 collects, and the others are workers whose processes end with the collection. Raises as make_code and load_of do, and
    RankFailed where those that are left no longer hold every batch.
    """
    code = make_code(scheme, workers, batches, load_of(scheme, workers, batches, redundancy), rng)
    with Workers(_Alone(work), [code], like, timeout_s=timeout_s, delay_s=delay_s, watch=watch, seat=seat) as pool:
        return pool.collect()


@dataclass(frozen=True)
class _Alone:
    work: Callable[[int], Array]

    def __call__(self, batch: int, argument: Array | None) -> Array:
        return self.work(batch)


@dataclass(frozen=True)
class _AggregationJob:
    work: Work
    codes: tuple[GradientCode, ...]
    exact: bool
    delay_s: Delay | None


class Workers:
    """Processes that answer round after round, until the block ends; none is left then.

    Arguments as for `collect`, with the codes, of as many workers each, that say who holds what: one of them in each round.
    """

    def __init__(
        self,
        work: Work,
        codes: Sequence[GradientCode],
        like: Array,
        *,
        timeout_s: float = 300.0,
        delay_s: Delay | None = None,
        watch: Watch = lambda _shares: None,
        seat: RankInfo | None = None,
    ) -> None:
        self._code, self._like = codes[0], like
        if seat is not None and seat.ranks != len(self._code.code_WB):
            raise BadInput(f"`workers`: expected the {seat.ranks} ranks of this run, found {len(self._code.code_WB)}")
        assert all(len(code.code_WB) == len(self._code.code_WB) for code in codes)
        self._job = _AggregationJob(work, tuple(codes), np.issubdtype(like.dtype, np.integer), delay_s)
        self._timeout_s, self._watch, self._seat = timeout_s, watch, seat
        self._store: Any = None
        self._hosted = ExitStack()
        self._children: dict[int, tuple[Any, Any]] = {}
        self._lost: dict[int, str] = {}
        self._round, self._heard = 0, 0.0

    def __enter__(self) -> Self:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        workers, seat = len(self._code.code_WB), self._seat
        if seat is None:
            host, port = self._hosted.enter_context(hosted_store(0))
            self._store = TCPStore(host, port, is_master=False, timeout=FOREVER)
            seats = [RankInfo(w, workers, host, port, self._timeout_s, w, workers, launched=True) for w in range(workers)]
        else:
            if seat.rank:
                _serve(seat, self._job)
            hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # by torchrun, for all ranks
            self._store = TCPStore(seat.host, seat.port, is_master=not hosted, wait_for_workers=False)
            seats = [seat]
        try:
            for at in seats:
                self._children[at.rank] = start(at, _answer, self._job)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end()

    def _end(self) -> None:
        self._store.set(f"collect/round/{self._round + 1}", b"end")
        for child, connection in self._children.values():
            if child.is_alive():
                child.kill()
            child.join()
            connection.close()
        self._store = None
        self._hosted.close()

    def collect(self, argument: Array | None = None, code: int = 0) -> AggregationResult:
        """One round by code number `code`: every worker's sum of work(batch, argument), decoded as soon as that can be done."""
        self._round += 1
        self._code = self._job.codes[code]
        number, workers, key = self._round, len(self._code.code_WB), f"collect/argument/{self._round}"
        self._store.set(key, put(self._store, key, {"code": code}, argument))
        self._store.set(f"collect/round/{number}", b"go")
        began = time.perf_counter()
        shares = [WorkerReport(w, tuple(np.flatnonzero(self._code.code_WB[w]).tolist())) for w in range(workers)]
        arrived: list[int] = []
        messages: dict[int, Array] = {}
        compute_s, late = 0.0, 0

        def now(worker: int, state: str) -> None:
            shares[worker] = replace(shares[worker], state=state, seconds=time.perf_counter() - began)
            self._watch(shares)

        for worker, why in self._lost.items():
            now(worker, why)
        for share in shares:
            if not share.batches:
                now(share.worker, "not needed")
        weights = None
        held_B = np.zeros(self._code.code_WB.shape[1], dtype=np.bool_)
        while weights is None:
            heard = self._next(began)
            if heard is None:
                for worker, why in self._deaths().items():
                    if shares[worker].state == "working":
                        now(worker, why)
                self._check_possible(shares, arrived)
                continue
            head, message = heard
            worker = head["worker"]
            if head["round"] != number or shares[worker].state != "working":
                late += 1
                continue
            if why := self._wrong(head, message):
                now(worker, why)
                self._check_possible(shares, arrived)
                continue
            assert message is not None
            compute_s = max(compute_s, head["seconds"])
            new = self._code.needed is not None or bool((self._code.holds_WB[worker] & ~held_B).any())
            held_B |= self._code.holds_WB[worker]
            arrived.append(worker)
            if new:
                messages[worker] = message
            now(worker, "used" if new else "not needed")
            weights = self._code.weights(arrived)
        total = self._decoded([(messages[w], weight) for w, weight in zip(arrived, weights.tolist(), strict=True) if weight])
        seconds = time.perf_counter() - began
        shares = [replace(s, state="not waited for") if s.state == "working" else s for s in shares]
        self._watch(shares)
        return AggregationResult(total, tuple(arrived), tuple(shares), seconds, compute_s, late)

    def _next(self, began: float) -> tuple[dict[str, Any], Array | None] | None:
        """The next message; None when it is time to look after the workers."""
        until = time.perf_counter() + 50 * POLL_S
        while not self._store.queue_len(RESULTS):
            if time.perf_counter() > until:
                if time.perf_counter() - max(began, self._heard) > self._timeout_s:
                    raise RankFailed(f"collect: nothing came from the workers for {self._timeout_s:g} s")
                return None
            time.sleep(POLL_S)
        self._heard = time.perf_counter()
        return taken(self._store, self._store.queue_pop(RESULTS), delete=True)

    def _deaths(self) -> dict[int, str]:
        """Who has died since the last look, and how."""
        alive = [worker for worker in self._children if worker not in self._lost]
        ready = multiprocessing.connection.wait([self._children[worker][1] for worker in alive], timeout=0)
        found = {}
        for worker in alive:
            child, connection = self._children[worker]
            if connection not in ready:
                continue
            try:
                why = f"failed: {connection.recv()}"
            except EOFError:
                child.join()
                why = f"killed by signal {-child.exitcode}" if child.exitcode < 0 else f"died with exit code {child.exitcode}"
            found[worker] = why
        self._lost |= found
        return found

    def _wrong(self, head: dict[str, Any], message: Array | None) -> str:
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

    def _check_possible(self, shares: Sequence[WorkerReport], arrived: list[int]) -> None:
        lost = [s for s in shares if s.batches and s.seconds is not None and s.worker not in arrived]
        rest = [s.worker for s in shares if s.state == "working"]
        if lost and self._code.weights(arrived + rest) is None:
            missing = np.flatnonzero(~self._code.holds_WB[np.array(arrived + rest, dtype=np.int64)].any(axis=0)).tolist()
            what = f"batches {', '.join(map(str, missing))} are" if missing else "the sum is"
            why = "; ".join(f"worker {s.worker} {s.state}" for s in lost)
            raise RankFailed(f"collect: {what} held by nobody who is left: {why}")

    def _decoded(self, parts: list[tuple[Array, float]]) -> Array:
        """The weighted sum, in the order of workers' arrival; counts are rounded where a code made them reals."""
        if self._code.needed is None:
            total = np.zeros_like(self._like)
            for message, _ in parts:
                total += message
            return total
        decoded = np.zeros(self._like.shape)
        largest = 0.0
        for message, weight in parts:
            decoded += message * weight
            largest = max(largest, abs(weight) * float(np.abs(message).max(initial=0.0)))
        if not self._job.exact:
            return decoded.astype(self._like.dtype)
        counts = np.rint(decoded)
        off = max(float(np.abs(decoded - counts).max(initial=0.0)), largest * len(parts) * np.finfo(np.float64).eps)
        if off > ROUNDING:
            raise RankFailed(f"collect: decoded counts are up to {off:.2g} from whole numbers, expected {ROUNDING} at most")
        return counts.astype(self._like.dtype)


def _answer(connection: Connection, seat: RankInfo, job: _AggregationJob) -> None:
    try:
        _serve(seat, job)
    except BaseException as error:
        connection.send(what_happened(error))


def _serve(seat: RankInfo, job: _AggregationJob) -> None:
    """A worker's life: the newest round again and again. It ends with the process, as told by the master or by its loss."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore(seat.host, seat.port, is_master=False, timeout=FOREVER)
    newest = _Newest(seat)
    number = 0
    while True:
        number = newest.after(number)
        told, argument = taken(store, store.get(f"collect/argument/{number}"), delete=False)
        code = job.codes[told["code"]]
        delay_s = job.delay_s(seat.rank, number) if job.delay_s else 0.0
        if delay_s and newest.after(number, delay_s) > number:
            continue
        began = time.perf_counter()
        total, error = None, ""
        try:
            for batch in np.flatnonzero(code.code_WB[seat.rank]).tolist():
                result = job.work(batch, argument)
                if code.needed is not None:
                    result = result * code.code_WB[seat.rank, batch]
                if total is not None and total.shape != result.shape:
                    raise BadInput(f"batch {batch}: expected shape {total.shape} like the batch before, found {result.shape}")
                total = np.array(result) if total is None else total + result
                if newest.number > number:
                    break
        except Exception as failure:
            reason = str(failure).strip().splitlines()
            total, error = None, f"{type(failure).__name__}: {reason[0] if reason else 'no message'}"
        if newest.number == number and code.code_WB[seat.rank].any():
            head = {"round": number, "worker": seat.rank, "error": error, "seconds": time.perf_counter() - began}
            store.queue_push(RESULTS, put(store, f"collect/result/{number}/{seat.rank}", head, total))


class _Newest:
    """The newest round's number, kept by a thread that also ends this process when the collection does."""

    def __init__(self, seat: RankInfo) -> None:
        self.number = 0
        self._changed = threading.Condition()
        threading.Thread(target=self._follow, args=(seat,), daemon=True).start()

    def after(self, number: int, at_most_s: float | None = None) -> int:
        """Waits for a round after `number`, or so long; gives the newest."""
        with self._changed:
            self._changed.wait_for(lambda: self.number > number, at_most_s)
            return self.number

    def _follow(self, seat: RankInfo) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        try:
            store = TCPStore(seat.host, seat.port, is_master=False, timeout=FOREVER)
            while store.get(f"collect/round/{self.number + 1}") != b"end":
                with self._changed:
                    self.number += 1
                    self._changed.notify_all()
        finally:
            os._exit(0)  # the master has what it wanted, or is gone
