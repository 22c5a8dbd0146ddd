"""Timers of phases: by the host's clock, or by events on a GPU stream, for which the host does not wait."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch


class Timer(Protocol):
    """Makes marks in the sequence of this thread's work, and tells later when that work reached them."""

    def mark(self) -> Any:
        """Marks the present end of the work. Returns the mark."""

    def reached(self, mark: Any) -> bool:
        """Returns whether the work has reached the mark; does not wait."""

    def seconds(self, mark: Any) -> float:
        """Returns when the work reached the mark, in seconds since the run began. Waits for it."""

    def elapsed_s(self, start: Any, end: Any) -> float:
        """Returns the seconds between two marks that have been reached."""


class HostTimer:
    """Timer by the host's clock; the run began at `began_s` of time.perf_counter."""

    def __init__(self, began_s: float) -> None:
        self._began_s = began_s

    def mark(self) -> float:
        """Marks the present moment; see `Timer.mark`."""
        return time.perf_counter() - self._began_s

    def reached(self, mark: float) -> bool:
        """Returns True: the host is past its marks."""
        return True

    def seconds(self, mark: float) -> float:
        """Returns when the mark was made; see `Timer.seconds`."""
        return mark

    def elapsed_s(self, start: float, end: float) -> float:
        """Returns the seconds between two marks."""
        return end - start


class Event(Protocol):
    """Event on a GPU stream, as torch.cuda.Event with enable_timing is one."""

    def record(self) -> None:
        """Puts the event at the present end of the current stream."""

    def query(self) -> bool:
        """Returns whether the stream has reached the event."""

    def synchronize(self) -> None:
        """Waits until the stream has reached the event."""

    def elapsed_time(self, end_event: Any) -> float:
        """Returns the milliseconds from this event to another one, both reached."""


class StreamMark(NamedTuple):
    """Mark of a StreamTimer."""

    event: Event
    made_s: float  # when the host recorded the event, since the run began


class StreamTimer:
    """Timer by events on the current stream of the thread that marks.

    Events tell how much time passes between them, in a GPU clock that drifts from the host's. So each time is counted from the
    mark that was read before, and lies between the host's recording of its event and the host's reading. Marks are read about
    in the sequence in which they were made.

    Args:
        began_s: when the run began, by `clock`.
        new_event: makes an event.
        clock: the host's clock, in seconds.
    """

    def __init__(
        self,
        began_s: float,
        new_event: Callable[[], Event] = lambda: torch.cuda.Event(enable_timing=True),  # type: ignore[no-untyped-call]
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._began_s, self._new_event, self._clock = began_s, new_event, clock
        self._read = self.mark()  # the mark that was read last, and its time
        self._read.event.synchronize()
        self._read_s = self._now_s()

    def mark(self) -> StreamMark:
        """Marks the present end of the current stream; see `Timer.mark`."""
        mark = StreamMark(self._new_event(), self._now_s())
        mark.event.record()
        return mark

    def reached(self, mark: StreamMark) -> bool:
        """Returns whether the stream has reached the mark; see `Timer.reached`."""
        return mark.event.query()

    def seconds(self, mark: StreamMark) -> float:
        """Returns when the stream reached the mark; see `Timer.seconds`."""
        mark.event.synchronize()
        later_s = self._read_s + self.elapsed_s(self._read, mark)
        self._read, self._read_s = mark, min(max(later_s, mark.made_s), self._now_s())
        return self._read_s

    def elapsed_s(self, start: StreamMark, end: StreamMark) -> float:
        """Returns the seconds between two marks by their events; see `Timer.elapsed_s`."""
        return start.event.elapsed_time(end.event) / 1e3

    def _now_s(self) -> float:
        """Seconds since the run began."""
        return self._clock() - self._began_s
