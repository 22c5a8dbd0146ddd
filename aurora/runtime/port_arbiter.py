"""Port arbiter: arbitrates compute and network access between models that share a rank (threads of one process).

`aurora.runtime.arbiter_process` arbitrates between models in separate processes; `aurora.simulator.interpreter`
simulates arbitration.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch

from aurora.algorithms.arbitration import ComputeQueue, ComputeRequest, PortSlices, piece
from aurora.errors import RankFailed
from aurora.moe.transport import ExchangeStep
from aurora.types import SlicePolicy

GatherNumber = Callable[[float], Sequence[float]]


class PortArbiter(Protocol):
    """Interface that grants one model the GPU and the network port of its rank. Used by one thread at a time.

    One model computes at a time: the most urgent first, and first come, first served among equals. A computation that was
    overtaken MOST_OVERTAKEN times precedes all others, so that no model starves. Exchanges get the port by the rules of
    `aurora.algorithms.arbitration`, which exclude deadlocks between ranks.
    """

    @property
    def exclusive(self) -> bool:
        """True if no other model shares this rank."""

    @property
    def joins(self) -> bool:
        """True if this model must call `join` before each exchange, and leaves the rotation of time slices after it."""

    def start_compute(self, level: int = 0) -> None:
        """Waits for the GPU, and holds it until `stop_compute`.

        Args:
            level: urgency of the work, see `Program.compute_level`; on a GPU, work above level 0 runs beside other work.
        """

    def yield_to_priority(self, on_yield: Callable[[], None]) -> bool:
        """Preemption point: if work of a higher level waits, calls `on_yield`, lets it run, and returns True; else False."""

    def stop_compute(self) -> None:
        """Releases the GPU."""

    def exchange(self, hold_port: bool = False) -> AbstractContextManager[None]:
        """Context manager that holds the port; with `hold_port`, this model keeps it until the end of its next exchange."""

    def leave(self) -> None:
        """Ends this model's exchanges; its time slices are skipped from now on."""

    def pause(self) -> None:
        """Removes this model, which is idle, from the rotation of time slices until `join`."""

    def join(self, gather: GatherNumber, first: bool, slices: int | None = None) -> None:
        """Adds this model to the rotation of time slices again. A collective call of the model's ranks.

        Args:
            gather: all-gathers one number per rank, and returns the list by rank.
            first: True on rank 0, which chooses the slice at which the model begins; see `aurora.algorithms.arbitration`.
            slices: number of slices after which the model is removed again; None: it stays until `pause` or `leave`.
        """

    def abort(self, error: BaseException) -> None:
        """Stops arbitration after this model failed with `error`: all models of this run that wait on it raise RankFailed."""


def thread_port_arbiters(
    models: int | Sequence[SlicePolicy], submitted: Callable[[], torch.cuda.Event | None] | None = None
) -> list[PortArbiter]:
    """Returns one port arbiter per model, for models that share one rank as threads of this process.

    Args:
        models: the models' policies, or the number of models, all with the default policy. Time slices of the port follow
            `has_next_slice`; models that have left are skipped.
        submitted: returns a CUDA event behind the caller's submitted GPU work. The next model's work or exchange is queued
            behind that event, so that no host thread waits for the GPU. None: there is no GPU, and exchanges of interactive and
            batch models may run at the same time.
    """
    policies_M = (SlicePolicy(),) * models if isinstance(models, int) else models
    rank = _RankState(policies_M, submitted)
    return [_ThreadPortArbiter(rank, model) for model in range(len(policies_M))]


class _RankState:
    """State that the arbiters of one rank share."""

    def __init__(self, policies_M: Sequence[SlicePolicy], submitted: Callable[[], torch.cuda.Event | None] | None) -> None:
        self.submitted = submitted or (lambda: None)
        self.last_compute: torch.cuda.Event | None = None
        self.last_exchange: torch.cuda.Event | None = None
        self.changed = threading.Condition()
        self.gpu = ComputeQueue()
        self.models, self.slices = len(policies_M), PortSlices(policies_M, overlapping=submitted is None)
        self.failure: BaseException | None = None

    def wait_for(self, condition: Callable[[], bool]) -> None:
        self.changed.wait_for(lambda: self.failure is not None or condition())
        if self.failure is not None:
            raise RankFailed(f"stopped, because another model on this rank failed: {self.failure}")


class _ThreadPortArbiter:
    def __init__(self, rank: _RankState, model: int) -> None:
        self._rank, self._model = rank, model
        self._level = 0

    @property
    def exclusive(self) -> bool:
        return self._rank.models == 1

    @property
    def joins(self) -> bool:
        return self._rank.slices.joins_M[self._model]

    def start_compute(self, level: int = 0) -> None:
        rank, self._level = self._rank, level
        with rank.changed:
            self._begin(rank.gpu.ask(level))
            if rank.last_compute is not None and not level:
                rank.last_compute.wait()

    def yield_to_priority(self, on_yield: Callable[[], None]) -> bool:
        rank = self._rank
        with rank.changed:
            if not rank.gpu.priority_waits:
                return False
            on_yield()
            request = rank.gpu.give_way()
            rank.changed.notify_all()
            self._begin(request)
            return True

    def stop_compute(self) -> None:
        rank = self._rank
        with rank.changed:
            if not self._level:
                rank.last_compute = rank.submitted()
            rank.gpu.end()
            rank.changed.notify_all()

    def _begin(self, request: ComputeRequest) -> None:
        rank = self._rank
        rank.wait_for(lambda: rank.gpu.first is request)
        rank.gpu.begin(request)

    @contextmanager
    def exchange(self, hold_port: bool = False) -> Iterator[None]:
        rank, model = self._rank, self._model
        with rank.changed:
            rank.slices.ask(model)
            rank.wait_for(lambda: rank.slices.may_begin(model))
            rank.slices.begin(model)
        if rank.last_exchange is not None:
            rank.last_exchange.wait()
        yield
        rank.last_exchange = rank.submitted()
        with rank.changed:
            rank.slices.end(model, hold_port)
            rank.changed.notify_all()

    def leave(self) -> None:
        with self._rank.changed:
            self._rank.slices.leave(self._model)
            self._rank.changed.notify_all()

    pause = leave

    def join(self, gather: GatherNumber, first: bool, slices: int | None = None) -> None:
        rank, model, base = self._rank, self._model, 0.0
        if rank.slices.single(model):
            return
        gather(0.0)  # all are ready
        with rank.changed:
            rank.slices.stop(model, 1)
        gather(0.0)  # the ports of all have stopped
        with rank.changed:
            if first:
                rank.slices.join(model, base := rank.slices.draw(model), slices)
        base = gather(base)[0]
        with rank.changed:
            if not first:
                rank.slices.join(model, base, slices)
            rank.slices.stop(model, -1)
            rank.changed.notify_all()

    def abort(self, error: BaseException) -> None:
        with self._rank.changed:
            self._rank.failure = self._rank.failure or error
            self._rank.changed.notify_all()


def in_slices(arbiter: PortArbiter, pieces: int, exchange: ExchangeStep) -> ExchangeStep:
    """Returns a function(sends, recvs) that performs one exchange of a batch model in several time slices.

    Interactive models can use the port between two of these slices.

    Args:
        arbiter: grants the model this rank's port.
        pieces: number of time slices over which the exchange is spread, the same on all ranks.
        exchange: performs one piece.
    """

    def perform(sends: Sequence[torch.Tensor], recvs: Sequence[torch.Tensor]) -> None:
        for number in range(pieces):
            out, into = ([rows[piece(len(rows), number, pieces)] for rows in tensors] for tensors in (sends, recvs))
            with arbiter.exchange():
                exchange(out, into)

    return perform
