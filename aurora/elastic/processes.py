"""Processes of ranks: starts them in the background, receives their messages (one thread per rank), and kills lost ones."""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from typing import Any

from aurora.errors import first_line
from aurora.runtime.distributed.launcher import RankInfo, start_process

EXIT_S = 0.3  # to learn how a process ended


def exit_reason(process: Any) -> str:
    """Returns how a multiprocessing process ended, for error messages; waits for its end, EXIT_S at most."""
    process.join(EXIT_S)
    code = process.exitcode
    if code is None:
        return "its process ended"
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"


@dataclass(frozen=True)
class RankLoss:
    """Event of a rank: it did not start, or its process has ended. `reason`: a phrase for error messages."""

    reason: str


@dataclass(eq=False)
class RankProcess:
    """Handle of a rank whose process has been started, and the pipe to it; also the event of its start."""

    rank: int
    process: Any  # its multiprocessing process
    connection: Connection

    @property
    def pid(self) -> int:
        """The id of its process."""
        return int(self.process.pid)


class RankProcesses:
    """Runs the picklable `main(connection, rank_info, *args)` in a process per rank of this host, and collects their events.

    Processes are started and joined in a background thread, so that working ranks do not wait for ranks that come or go.

    Args:
        main, args: function that each rank's process runs, and its further arguments.
        ranks: number of ranks.
        lighthouse: host and port of the lighthouse, passed on in RankInfo.
        timeout_s: seconds that a rank waits for a peer.

    Attributes:
        inbox: (rank, its RankProcess or None if its start failed, event) tuples; see `events`.
        running: handles of the started ranks, by rank; ranks are removed by `kill`, lost ones too.
        starting: ranks that are starting; a rank may be listed twice.
    """

    def __init__(
        self,
        main: Callable[..., None],
        args: tuple[Any, ...],
        ranks: int,
        lighthouse: tuple[str, int],
        timeout_s: float,
    ) -> None:
        self._main, self._args, self._ranks, self._timeout_s = main, args, ranks, timeout_s
        self._host, self._port = lighthouse
        self.inbox: SimpleQueue[tuple[int, RankProcess | None, Any]] = SimpleQueue()
        self.running: dict[int, RankProcess] = {}
        self.starting: list[int] = []
        self._background = ThreadPoolExecutor(1, thread_name_prefix="aurora-processes")

    def start(self, rank: int) -> None:
        """Starts a rank's process in the background."""
        rank_info = RankInfo(rank, self._ranks, self._host, self._port, self._timeout_s, rank, self._ranks, launched=True)
        self.starting.append(rank)
        self._background.submit(self._start_process, rank_info)

    def events(self, timeout_s: float) -> Iterator[tuple[int, Any]]:
        """Yields (rank, event) for all received events; waits up to timeout_s seconds for the first.

        An event is one of: the rank's RankProcess, when its process has started; a message from the rank; at last a RankLoss.
        """
        with suppress(Empty):
            for _ in range(max(1, self.inbox.qsize())):
                rank, sender, event = self.inbox.get(timeout=timeout_s)
                if isinstance(event, RankProcess) or sender is None:
                    self.starting.remove(rank)
                if isinstance(event, RankProcess):
                    self.running[rank] = event
                if sender is None or self.running.get(rank) is sender:
                    yield rank, event

    def kill(self, rank: int) -> None:
        """Kills a rank's process, if it runs. Its further events are dropped."""
        if (rank_process := self.running.pop(rank, None)) is not None:
            rank_process.process.kill()
            self._background.submit(rank_process.process.join)

    def close(self) -> None:
        """Kills all processes, also ones that are still starting, and waits for their end."""
        self._background.submit(int).result()  # it comes after all that are starting
        for _ in self.events(0.0):
            pass
        for rank in list(self.running):
            self.kill(rank)
        self._background.shutdown()

    def _start_process(self, rank_info: RankInfo) -> None:
        """Starts a process, and reads its messages until its connection ends."""
        rank = rank_info.rank
        try:
            process, connection = start_process(rank_info, self._main, *self._args)
        except Exception as error:  # such as too many processes or open files
            self.inbox.put((rank, None, RankLoss(f"did not start: {first_line(error)}")))
            return
        rank_process = RankProcess(rank, process, connection)
        self.inbox.put((rank, rank_process, rank_process))
        threading.Thread(target=self._listen, args=(rank_process,), daemon=True, name=f"aurora-from-rank-{rank}").start()

    def _listen(self, member: RankProcess) -> None:
        """Reads a rank's messages until its connection ends. A rank that stops in the middle of one keeps no other waiting."""
        with suppress(EOFError, OSError):
            while True:
                self.inbox.put((member.rank, member, member.connection.recv()))
        self.inbox.put((member.rank, member, RankLoss(exit_reason(member.process))))
        member.connection.close()


def silence_native_code() -> None:
    """Discards what native code (gloo, torchft) writes to stderr, unless AURORA_DEBUG is set; sys.stderr still works."""
    if os.environ.get("AURORA_DEBUG"):
        return
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
    with open(os.devnull, "w") as silent:
        os.dup2(silent.fileno(), 2)
