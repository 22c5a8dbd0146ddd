"""Heartbeats: which ranks of a process group hang. The connections of a process that hangs stay open, so nothing else tells."""

import threading
from contextlib import suppress
from typing import Any

BEAT_S = 0.5  # between two signs of life
SILENT = 5  # looks in which a rank gives no sign of life before it counts as hung


class Heartbeats:
    """Signs of life of all ranks, in a store, until `stop`.

    A thread of its own gives this rank's and looks at the others', because the store may hang as well.

    Args:
        store: a torch.distributed Store that all ranks reach; it is cloned, because another thread may wait in it for long.
        rank, ranks: this rank, and how many there are.
    """

    def __init__(self, store: Any, rank: int, ranks: int) -> None:
        self._store, self._rank = store.clone(), rank
        self._keys = [f"aurora/heartbeat/{other}" for other in range(ranks)]
        for key in self._keys:
            self._store.add(key, 0)  # a look waits for keys that are not there
        self._seen_R, self._missed_R = [b""] * ranks, [0] * ranks
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="aurora-heartbeats")
        self._thread.start()

    def beat(self) -> None:
        """Gives a sign of life."""
        self._store.add(self._keys[self._rank], 1)

    def look(self) -> None:
        """Notes who has given a sign of life since the last call."""
        seen_R = self._store.multi_get(self._keys)
        pairs = zip(seen_R, self._seen_R, self._missed_R, strict=True)
        self._missed_R = [missed + 1 if seen == before else 0 for seen, before, missed in pairs]
        self._seen_R = seen_R

    def stop(self) -> None:
        """Gives no more signs of life."""
        self._stopped.set()
        self._thread.join(BEAT_S)  # longer if the store hangs

    @property
    def silent(self) -> list[int]:
        """The other ranks that have given no sign of life in the last SILENT looks."""
        return [rank for rank, missed in enumerate(self._missed_R) if missed >= SILENT and rank != self._rank]

    def _run(self) -> None:
        """Beats and looks until it is stopped or the store is gone."""
        with suppress(RuntimeError):
            while not self._stopped.is_set():
                self.beat()
                self.look()
                self._stopped.wait(BEAT_S)
