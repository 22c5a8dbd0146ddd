"""Which ranks are lost when a collective fails: gloo's error messages name an address, not a rank."""

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from aurora.errors import RankFailed

EXIT_S = 2.0  # within which a dying process is seen to have exited


class PeerProcesses:
    """Host and process id of every rank, exchanged once over a torch.distributed Store under `key`."""

    def __init__(self, store: Any, key: str, rank: int, ranks: int) -> None:
        """Publishes this rank's process."""
        self._store, self._key, self._rank, self._ranks = store, key, rank, ranks
        self._host = socket.gethostname()
        store.set(f"{key}/process/{rank}", f"{self._host} {os.getpid()}")
        self._process_R: dict[int, tuple[str, int]] = {}

    def read_all(self) -> bool:
        """Reads what the other ranks published. Returns False if a rank has published nothing."""
        if not self._store.check([f"{self._key}/process/{rank}" for rank in range(self._ranks)]):
            return False
        for rank in range(self._ranks):
            host, pid = self._store.get(f"{self._key}/process/{rank}").decode().rsplit(" ", 1)
            self._process_R[rank] = (host, int(pid))
        return True

    @property
    def on_one_host(self) -> bool:
        """Whether all ranks run on this host."""
        return all(host == self._host for host, _ in self._process_R.values())

    def lost(self) -> list[int]:
        """Returns the other ranks of this host whose process has exited."""
        return [
            rank
            for rank, (host, pid) in self._process_R.items()
            if host == self._host and rank != self._rank and not is_running(pid)
        ]


def is_running(pid: int) -> bool:
    """Returns whether a process of this host runs. A zombie does not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


@contextmanager
def naming_lost_ranks(processes: PeerProcesses | None) -> Iterator[None]:
    """Context manager that turns an error into a RankFailed that names the lost ranks, if `processes` knows them."""
    try:
        yield
    except (RuntimeError, RankFailed) as error:
        until = time.monotonic() + EXIT_S
        while processes is not None and not (lost := processes.lost()) and time.monotonic() < until:
            time.sleep(0.05)
        if processes is None or not lost:
            raise
        gone = ", ".join(map(str, lost))
        raise RankFailed(f"expert-parallel rank {gone} is gone: {str(error).strip().splitlines()[0]}") from error
