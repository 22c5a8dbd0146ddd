"""Port arbiter: arbitrates compute and network access between models that share a rank (threads of one process).

`aurora.runtime.process_port_arbiter` has the one for models that run in separate processes, and
`aurora.simulator.port_arbiter` the simulated one.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from aurora.errors import RankFailed
from aurora.types import has_next_slice


class PortArbiter(Protocol):
    """One model's access to the GPU and the port of its rank. Used by one thread at a time.

    One model at a time computes, first come first served. Exchanges of the models take the port one after the other, in the
    same sequence on every rank, so that ranks cannot deadlock.
    """

    @property
    def exclusive(self) -> bool:
        """Whether no other model shares this rank."""

    def start_compute(self, high_priority: bool = False) -> None:
        """Waits for the GPU and keeps it until `stop_compute`; high-priority work goes first, on a GPU beside other work."""

    def yield_to_priority(self, on_yield: Callable[[], None]) -> bool:
        """Preemption point: lets waiting high-priority work run, after `on_yield`. Returns whether any ran."""

    def stop_compute(self) -> None:
        """Releases the GPU."""

    def exchange(self, hold_port: bool = False) -> AbstractContextManager[None]:
        """Context manager that grants this model the port; with `hold_port` through its next exchange, which must follow."""

    def leave(self) -> None:
        """Ends this model's exchanges; its time slices are skipped from now on."""

    def abort(self, error: BaseException) -> None:
        """Stops arbitration for this run's models because this model failed with `error`; waiting models get RankFailed."""


class SubmittedWork(Protocol):
    """Work that has been submitted to a GPU stream, such as a CUDA event."""

    def wait(self) -> None:
        """Makes the GPU run this work before any work that the caller submits from now on."""


def thread_port_arbiters(models: int, submitted: Callable[[], SubmittedWork | None] = lambda: None) -> list[PortArbiter]:
    """Makes port arbiters, one per model, for models that share one rank as threads of this process.

    Time slices of the port alternate between the models (see `has_next_slice`); a model that has left is skipped. `submitted`
    returns what the caller has submitted to the GPU, so that the next model's work or exchange is ordered after it and no host
    thread waits for the GPU.
    """
    rank = _RankState(models, submitted)
    return [_ThreadPortArbiter(rank, model) for model in range(models)]


class _RankState:
    """What the arbiters of one rank share."""

    def __init__(self, models: int, submitted: Callable[[], SubmittedWork | None]) -> None:
        self.submitted = submitted
        self.last_compute: SubmittedWork | None = None
        self.last_exchange: SubmittedWork | None = None
        self.changed = threading.Condition()
        self.computing = False
        self.tickets = 0
        self.waiting: set[tuple[bool, int]] = set()  # (not high-priority, ticket): the smallest is next
        self.slices_done_M = [0.0] * models
        self.failure: BaseException | None = None

    def wait_for(self, condition: Callable[[], bool]) -> None:
        self.changed.wait_for(lambda: self.failure is not None or condition())
        if self.failure is not None:
            raise RankFailed(f"stopped, because the other model on this rank failed: {self.failure}")


class _ThreadPortArbiter:
    def __init__(self, rank: _RankState, model: int) -> None:
        self._rank, self._model = rank, model
        self._ticket = (True, -1)

    @property
    def exclusive(self) -> bool:
        return len(self._rank.slices_done_M) == 1

    def start_compute(self, high_priority: bool = False) -> None:
        rank = self._rank
        with rank.changed:
            self._ticket, rank.tickets = (not high_priority, rank.tickets), rank.tickets + 1
            self._acquire()
            if rank.last_compute is not None and not high_priority:
                rank.last_compute.wait()

    def yield_to_priority(self, on_yield: Callable[[], None]) -> bool:
        rank = self._rank
        with rank.changed:
            if all(low_priority for low_priority, _ in rank.waiting):
                return False
            on_yield()
            rank.computing = False
            rank.changed.notify_all()
            self._acquire()
            return True

    def stop_compute(self) -> None:
        rank = self._rank
        with rank.changed:
            low_priority, _ = self._ticket
            if low_priority:
                rank.last_compute = rank.submitted()
            rank.computing = False
            rank.changed.notify_all()

    def _acquire(self) -> None:
        rank = self._rank
        rank.waiting.add(self._ticket)
        rank.wait_for(lambda: not rank.computing and min(rank.waiting) == self._ticket)
        rank.waiting.remove(self._ticket)
        rank.computing = True

    @contextmanager
    def exchange(self, hold_port: bool = False) -> Iterator[None]:
        with self._rank.changed:
            self._rank.wait_for(self._has_next_slice)
        if self._rank.last_exchange is not None:
            self._rank.last_exchange.wait()
        yield
        self._rank.last_exchange = self._rank.submitted()
        if not hold_port:
            self._finish_slices(1)

    def leave(self) -> None:
        self._finish_slices(float("inf"))

    def abort(self, error: BaseException) -> None:
        with self._rank.changed:
            self._rank.failure = self._rank.failure or error
            self._rank.changed.notify_all()

    def _finish_slices(self, count: float) -> None:
        with self._rank.changed:
            self._rank.slices_done_M[self._model] += count
            self._rank.changed.notify_all()

    def _has_next_slice(self) -> bool:
        return has_next_slice(self._rank.slices_done_M, self._model)
