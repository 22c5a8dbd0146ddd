"""When a phase starts and ends: by the host's clock, or where a GPU's stream gets to, for which the host does not wait."""

import time
from typing import Protocol

import torch


class Timer(Protocol):
    """mark() notes now; seconds(mark) is when that was, since the run began, once the work before it is done."""

    def mark(self) -> object: ...

    def seconds(self, mark: object) -> float: ...


class HostTimer:
    """began_s: of time.perf_counter."""

    def __init__(self, began_s: float) -> None:
        self._began_s = began_s

    def mark(self) -> object:
        return time.perf_counter() - self._began_s

    def seconds(self, mark: object) -> float:
        assert isinstance(mark, float)
        return mark


class StreamTimer:
    """Events on the stream that is current where `mark` is called, the same for all marks."""

    def __init__(self, began_s: float) -> None:
        self._began_s = began_s
        self._first: torch.cuda.Event | None = None
        self._first_s = 0.0

    def mark(self) -> object:
        if self._first is None:  # on the lane's own stream, which is current only now
            self._first = self._event()
            self._first.synchronize()
            self._first_s = time.perf_counter() - self._began_s
        return self._event()

    def seconds(self, mark: object) -> float:
        assert isinstance(mark, torch.cuda.Event)
        assert self._first is not None
        mark.synchronize()
        return self._first_s + float(self._first.elapsed_time(mark)) / 1e3

    @staticmethod
    def _event() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event
