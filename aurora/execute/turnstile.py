"""Who computes and who communicates on one rank, when two models share it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from aurora.errors import RankFailed


class Turnstile:
    """One model at a time computes, first come first served; exchanges of the models alternate on the port.

    The alternation is the same on every rank (a's first, b's first, a's second, ...; a model that is through is skipped),
    so ranks never wait for each other in a circle.
    """

    def __init__(self, models: int) -> None:
        self._changed = threading.Condition()
        self._tickets = 0
        self._serving = 0
        self._exchanges = [0.0] * models
        self._broken: BaseException | None = None

    def start_compute(self) -> None:
        with self._changed:
            ticket, self._tickets = self._tickets, self._tickets + 1
            self._wait(lambda: self._serving == ticket)

    def stop_compute(self) -> None:
        with self._changed:
            self._serving += 1
            self._changed.notify_all()

    @contextmanager
    def exchange(self, model: int) -> Iterator[None]:
        with self._changed:
            self._wait(lambda: self._is_turn(model))
        yield
        with self._changed:
            self._exchanges[model] += 1
            self._changed.notify_all()

    def leave(self, model: int) -> None:
        """`model` has no more exchanges."""
        with self._changed:
            self._exchanges[model] = float("inf")
            self._changed.notify_all()

    def abort(self, error: BaseException) -> None:
        """Whoever waits, now or later, gets RankFailed."""
        with self._changed:
            self._broken = self._broken or error
            self._changed.notify_all()

    def _is_turn(self, model: int) -> bool:
        mine = self._exchanges[model]
        return all(done >= mine + (other < model) for other, done in enumerate(self._exchanges) if other != model)

    def _wait(self, condition: object) -> None:
        assert callable(condition)
        self._changed.wait_for(lambda: self._broken is not None or condition())
        if self._broken is not None:
            raise RankFailed(f"stopped, because the other model on this rank failed: {self._broken}")
