"""Who is gone, when a collective fails: error messages of gloo name an address, not a rank."""

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from aurora.errors import RankFailed

SETTLE_S = 2.0  # in which a dying process is seen to be gone


class LivePeers:
    """Host and process of every rank, told once over a store."""

    def __init__(self, store: Any, key: str, rank: int, ranks: int) -> None:
        self._store, self._key, self._rank, self._ranks = store, key, rank, ranks
        self._host = socket.gethostname()
        store.set(f"{key}/process/{rank}", f"{self._host} {os.getpid()}")
        self._processes: dict[int, tuple[str, int]] = {}

    def meet(self) -> bool:
        """Read what the others told; False where some told nothing."""
        if not self._store.check([f"{self._key}/process/{rank}" for rank in range(self._ranks)]):
            return False
        for rank in range(self._ranks):
            host, process = self._store.get(f"{self._key}/process/{rank}").decode().rsplit(" ", 1)
            self._processes[rank] = (host, int(process))
        return True

    @property
    def together(self) -> bool:
        """Whether all ranks are on this host."""
        return all(host == self._host for host, _ in self._processes.values())

    def gone(self) -> list[int]:
        """Ranks on this host whose process is no more."""
        return [
            rank
            for rank, (host, process) in self._processes.items()
            if host == self._host and rank != self._rank and not alive(process)
        ]


def alive(process: int) -> bool:
    """Whether a process of this host runs; one that has ended and is not waited for yet does not."""
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


@contextmanager
def naming_the_dead(roster: LivePeers | None) -> Iterator[None]:
    """A RuntimeError inside becomes a RankFailed that names the ranks that are gone, where some are."""
    try:
        yield
    except (RuntimeError, RankFailed) as error:
        until = time.monotonic() + SETTLE_S
        while roster is not None and not (gone := roster.gone()) and time.monotonic() < until:
            time.sleep(0.05)
        if roster is None or not gone:
            raise
        who = ", ".join(map(str, gone))
        raise RankFailed(f"expert-parallel rank {who} is gone: {str(error).strip().splitlines()[0]}") from error
