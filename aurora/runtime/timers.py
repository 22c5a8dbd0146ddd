"""Timers of phases: by the host's clock, or by events on a GPU stream, for which the host does not wait."""

import time

import torch


class HostTimer:
    """Timer by the host's clock; the run began at `began_s` of time.perf_counter."""

    def __init__(self, began_s: float) -> None:
        self._began_s = began_s

    def mark(self) -> object:
        """Marks the present moment. Returns the mark, to be given to `seconds`."""
        return time.perf_counter() - self._began_s

    def seconds(self, mark: object) -> float:
        """Returns when the mark was made, in seconds since the run began."""
        assert isinstance(mark, float)
        return mark


class StreamTimer:
    """Timer by events on the current stream of the thread that marks; the run began at `began_s` of time.perf_counter."""

    def __init__(self, began_s: float) -> None:
        self._began_s = began_s
        self._first: torch.cuda.Event | None = None
        self._first_s = 0.0

    def mark(self) -> object:
        """Marks the present end of the current stream. Returns the mark, to be given to `seconds`."""
        if self._first is None:  # only now is the model worker's own stream current
            self._first = self._event()
            self._first.synchronize()
            self._first_s = time.perf_counter() - self._began_s
        return self._event()

    def seconds(self, mark: object) -> float:
        """Returns when the stream reached the mark, in seconds since the run began; waits for the work before it."""
        assert isinstance(mark, torch.cuda.Event)
        assert self._first is not None
        mark.synchronize()
        return self._first_s + float(self._first.elapsed_time(mark)) / 1e3

    @staticmethod
    def _event() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


Timer = HostTimer | StreamTimer
