"""Who computes and who communicates on one rank when several models share it: threads of one process.

`aurora.execute.colocated` has the turnstile of models in processes of their own.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from aurora.errors import RankFailed


class Turnstile(Protocol):
    """One model's way to the GPU and the port of its rank; used by one thread at a time.

    One model at a time computes, first come first served. Exchanges of the models come one after the other on a port, in the
    same sequence on every rank, so ranks never wait for each other in a circle.
    """

    def start_compute(self) -> None: ...

    def stop_compute(self) -> None: ...

    def exchange(self) -> AbstractContextManager[None]:
        """Inside, the port is this model's."""

    def leave(self) -> None:
        """No more exchanges of this model."""

    def abort(self, error: BaseException) -> None:
        """This model has failed: it gives back what it holds, and others of its run that wait get RankFailed."""


class Handed(Protocol):
    """Work that was handed to a GPU; wait() makes what the caller hands over from now on come after it (a CUDA event)."""

    def wait(self) -> None: ...


def in_threads(models: int, handed: Callable[[], Handed | None] = lambda: None) -> list[Turnstile]:
    """A turnstile for each model of this process: exchanges alternate (a's first, b's first, a's second, ...; a model that is
    through is skipped). handed: what the caller has handed to the GPU, so that no host waits for it where turns change."""
    shared = _Shared(models, handed)
    return [_OfThread(shared, model) for model in range(models)]


class _Shared:
    def __init__(self, models: int, handed: Callable[[], Handed | None]) -> None:
        self.handed = handed
        self.computed: Handed | None = None
        self.changed = threading.Condition()
        self.tickets = 0
        self.serving = 0
        self.exchanges = [0.0] * models
        self.broken: BaseException | None = None

    def wait(self, condition: Callable[[], bool]) -> None:
        self.changed.wait_for(lambda: self.broken is not None or condition())
        if self.broken is not None:
            raise RankFailed(f"stopped, because the other model on this rank failed: {self.broken}")


class _OfThread:
    def __init__(self, shared: _Shared, model: int) -> None:
        self._shared, self._model = shared, model

    def start_compute(self) -> None:
        shared = self._shared
        with shared.changed:
            ticket, shared.tickets = shared.tickets, shared.tickets + 1
            shared.wait(lambda: shared.serving == ticket)
            if shared.computed is not None:
                shared.computed.wait()

    def stop_compute(self) -> None:
        with self._shared.changed:
            self._shared.computed = self._shared.handed()
            self._shared.serving += 1
            self._shared.changed.notify_all()

    @contextmanager
    def exchange(self) -> Iterator[None]:
        with self._shared.changed:
            self._shared.wait(self._is_turn)
        yield
        self._count(1)

    def leave(self) -> None:
        self._count(float("inf"))

    def abort(self, error: BaseException) -> None:
        with self._shared.changed:
            self._shared.broken = self._shared.broken or error
            self._shared.changed.notify_all()

    def _count(self, exchanges: float) -> None:
        with self._shared.changed:
            self._shared.exchanges[self._model] += exchanges
            self._shared.changed.notify_all()

    def _is_turn(self) -> bool:
        mine = self._shared.exchanges[self._model]
        return all(
            done >= mine + (other < self._model) for other, done in enumerate(self._shared.exchanges) if other != self._model
        )
