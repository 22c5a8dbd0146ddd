"""Who computes and who communicates on one rank when several models share it: threads of one process.

`aurora.runtime.process_port_arbiter` has the turnstile of models in processes of their own.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from aurora.errors import RankFailed
from aurora.types import is_turn


class PortArbiter(Protocol):
    """One model's way to the GPU and the port of its rank; used by one thread at a time.

    One model at a time computes, first come first served. Exchanges of the models come one after the other on a port, in the
    same sequence on every rank, so ranks never wait for each other in a circle.
    """

    @property
    def alone(self) -> bool:
        """Whether no other model is there."""

    def start_compute(self, brief: bool = False) -> None:
        """brief: before whoever waits with more work, and on a GPU beside it."""

    def part(self, stopped: Callable[[], None]) -> bool:
        """Between two parts of work that is not brief: whether brief work waited, which then went first. stopped: called before
        it does."""

    def stop_compute(self) -> None: ...

    def exchange(self, hold_port: bool = False) -> AbstractContextManager[None]:
        """Inside, the port is this model's; keeps: and until the end of its next exchange, which must come."""

    def leave(self) -> None:
        """No more exchanges of this model."""

    def abort(self, error: BaseException) -> None:
        """This model has failed: it gives back what it holds, and others of its run that wait get RankFailed."""


class Handover(Protocol):
    """Work that was handed to a GPU; wait() makes what the caller hands over from now on come after it (a CUDA event)."""

    def wait(self) -> None: ...


def in_threads(models: int, handed: Callable[[], Handover | None] = lambda: None) -> list[PortArbiter]:
    """A turnstile for each model of this process: turns at the port alternate (a's first, b's first, a's second, ...; a model
    that is through is skipped). handed: what the caller has handed to the GPU, so that no host waits for it where turns change.
    """
    shared = _Shared(models, handed)
    return [_ThreadPortArbiter(shared, model) for model in range(models)]


class _Shared:
    def __init__(self, models: int, handed: Callable[[], Handover | None]) -> None:
        self.handed = handed
        self.computed: Handover | None = None
        self.changed = threading.Condition()
        self.computing = False
        self.tickets = 0
        self.waiting: set[tuple[bool, int]] = set()  # not brief, ticket: the smallest is next
        self.time_slice = [0.0] * models  # at the port, that are over
        self.broken: BaseException | None = None

    def wait(self, condition: Callable[[], bool]) -> None:
        self.changed.wait_for(lambda: self.broken is not None or condition())
        if self.broken is not None:
            raise RankFailed(f"stopped, because the other model on this rank failed: {self.broken}")


class _ThreadPortArbiter:
    def __init__(self, shared: _Shared, model: int) -> None:
        self._shared, self._model = shared, model
        self._ticket = (True, -1)

    @property
    def alone(self) -> bool:
        return len(self._shared.time_slice) == 1

    def start_compute(self, brief: bool = False) -> None:
        shared = self._shared
        with shared.changed:
            self._ticket, shared.tickets = (not brief, shared.tickets), shared.tickets + 1
            self._take()
            if shared.computed is not None and not brief:
                shared.computed.wait()

    def part(self, stopped: Callable[[], None]) -> bool:
        shared = self._shared
        with shared.changed:
            if all(more for more, _ in shared.waiting):
                return False
            stopped()
            shared.computing = False
            shared.changed.notify_all()
            self._take()
            return True

    def stop_compute(self) -> None:
        shared = self._shared
        with shared.changed:
            if self._ticket[0]:
                shared.computed = shared.handed()
            shared.computing = False
            shared.changed.notify_all()

    def _take(self) -> None:
        shared = self._shared
        shared.waiting.add(self._ticket)
        shared.wait(lambda: not shared.computing and min(shared.waiting) == self._ticket)
        shared.waiting.remove(self._ticket)
        shared.computing = True

    @contextmanager
    def exchange(self, hold_port: bool = False) -> Iterator[None]:
        with self._shared.changed:
            self._shared.wait(self._is_turn)
        yield
        if not hold_port:
            self._count(1)

    def leave(self) -> None:
        self._count(float("inf"))

    def abort(self, error: BaseException) -> None:
        with self._shared.changed:
            self._shared.broken = self._shared.broken or error
            self._shared.changed.notify_all()

    def _count(self, time_slice: float) -> None:
        with self._shared.changed:
            self._shared.time_slice[self._model] += time_slice
            self._shared.changed.notify_all()

    def _is_turn(self) -> bool:
        return is_turn(self._shared.time_slice, self._model)
