"""Changes of the serving ranks, as requests that they interrupt see them."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Protocol

STEP_FAILED = "a step failed"  # and no rank is lost
PATIENCE_S = 600.0  # for which requests wait at most until ranks serve again


class Stream(Protocol):
    """Open answer stream of a client."""

    @property
    def resumable(self) -> bool:
        """True if it can continue after a fault."""
        ...


class ServingChanges:
    """Counts completed changes of the serving ranks, so that an interrupted request can wait for the change that follows.

    Args:
        detected_s: longest time, in seconds, from a fault to its detection.

    Attributes:
        number: number of completed changes.
        why: why the last change began.
        serving: event that is set while the remaining ranks serve, and clear during a change.
        ended: True if no rank will serve again.
        streams: the open streams.
        resumed: how often streams went on after a fault.
        losses: how often each rank was lost.
        starts: how often each rank's server was started.
    """

    def __init__(self, detected_s: float) -> None:
        self._detected_s = detected_s
        self.number, self.serving, self.ended = 0, asyncio.Event(), False
        self.why, self.streams = "", set[Stream]()
        self.resumed, self.losses, self.starts = 0, Counter[int](), Counter[int]()

    def begin(self, why: str) -> None:
        """Begins a change."""
        self.why = why
        self.serving.clear()

    def complete(self) -> None:
        """Completes the change: requests that it interrupted are sent again."""
        self.number += 1
        self.serving.set()

    async def after(self, number: int) -> bool:
        """Waits until ranks serve again after a change with a number above `number`. Returns False if there is none in time."""
        began = time.monotonic()
        while not self.ended and (waited_s := time.monotonic() - began) < PATIENCE_S:
            if self.serving.is_set() and (self.number > number or waited_s > self._detected_s):
                return self.number > number
            await asyncio.sleep(0.05)
        return False
