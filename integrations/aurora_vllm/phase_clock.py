"""Times phases of a forward pass without waiting for the GPU."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

Mark = Any  # host seconds, or an event on the GPU's stream


@dataclass(frozen=True)
class Span:
    """The time between two marks of one PhaseClock."""

    start: Mark
    end: Mark

    @property
    def seconds(self) -> float:
        """How long it took. On a GPU this waits for the second mark."""
        if isinstance(self.end, float):
            return float(self.end - self.start)
        self.end.synchronize()
        return float(self.start.elapsed_time(self.end)) / 1e3


class PhaseClock:
    """Marks points of this rank's work: host time on a CPU, events of the current stream on a GPU.

    Args:
        on_gpu: whether the work runs on a GPU.
    """

    def __init__(self, on_gpu: bool) -> None:
        self._on_gpu = on_gpu

    def mark(self) -> Mark | None:
        """Returns a mark; None while a CUDA graph is captured, because its replays would not pass here."""
        if not self._on_gpu:
            return time.perf_counter()
        if torch.cuda.is_current_stream_capturing():
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def span(start: Mark | None, end: Mark | None) -> Span | None:
    """Returns the Span between two marks; None if one of them is None."""
    return None if start is None or end is None else Span(start, end)
