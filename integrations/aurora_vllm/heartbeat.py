"""A heartbeat that goes stale when what it watches is stuck or gone."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

BEAT_S = 2.0
STUCK_S = 5.0  # a step that takes longer is stuck; with BEAT_S below the 10 s within which that is to be seen


class HeartbeatThread:
    """Beats in a thread of its own, unless a step takes longer than STUCK_S.

    Args:
        beat: called every BEAT_S while all is well.
        alive: returns whether what is watched still runs.
    """

    def __init__(self, beat: Callable[[], None], alive: Callable[[], bool] = lambda: True) -> None:
        self._beat, self._alive = beat, alive
        self._began_s: float | None = None  # when the present step began
        threading.Thread(target=self._run, daemon=True, name="aurora-heartbeat").start()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Context manager of one step of what is watched."""
        self._began_s = time.monotonic()
        try:
            yield
        finally:
            self._began_s = None

    @property
    def well(self) -> bool:
        """Whether what is watched runs and is not stuck."""
        began_s = self._began_s
        return self._alive() and (began_s is None or time.monotonic() - began_s < STUCK_S)

    def _run(self) -> None:
        while True:
            if self.well:
                self._beat()
            time.sleep(BEAT_S)
