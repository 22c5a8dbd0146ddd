"""A heartbeat that goes stale when what it watches is stuck or gone."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LOG = logging.getLogger("vllm.aurora")
BEAT_S = 2.0
STUCK_S = 5.0  # a step that takes longer is stuck; with BEAT_S below the 10 s within which that is to be seen


class HeartbeatThread:
    """Beats in a thread of its own, unless a step takes longer than STUCK_S. One line says when it ceases to beat.

    Args:
        beat: called every BEAT_S while all is well.
        alive: returns whether what is watched still runs.
        tells: whether that line is said here.
        clock: returns seconds.
    """

    def __init__(
        self,
        beat: Callable[[], None],
        alive: Callable[[], bool] = lambda: True,
        tells: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._beat, self._alive, self._tells, self._clock = beat, alive, tells, clock
        self._began_s: float | None = None  # when the present step began
        self._beats = True
        threading.Thread(target=self._run, daemon=True, name="aurora-heartbeat").start()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Context manager of one step of what is watched."""
        self._began_s = self._clock()
        try:
            yield
        finally:
            self._began_s = None

    @property
    def well(self) -> bool:
        """Whether what is watched runs and is not stuck."""
        began_s = self._began_s
        return self._alive() and (began_s is None or self._clock() - began_s < STUCK_S)

    def look(self) -> None:
        """Beats if all is well; else says so, if it was well until now."""
        before, self._beats = self._beats, self.well
        if self._beats:
            self._beat()
        elif before and self._tells:
            LOG.warning("aurora: what moves experts is stuck or gone; vLLM serves on, and experts may stay where they are")

    def _run(self) -> None:
        while True:
            self.look()
            time.sleep(BEAT_S)
