"""Processes of supervised ranks: started in the background, listened to by a thread each, killed when they are lost."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from queue import Empty, SimpleQueue
from typing import Any

from aurora.runtime.distributed.control_channel import MemberResult, MemberState
from aurora.runtime.distributed.launcher import RankInfo, start_process

EXIT_S = 0.3  # to learn how a process ended: the other ranks wait meanwhile


class OwnTime:
    """Seconds of this process without its pauses (Ctrl-Z, a stopped container), which are no silence of other processes."""

    def __init__(self) -> None:
        self._paused_s, self._checked_s = 0.0, time.monotonic()

    def __call__(self) -> float:
        return time.monotonic() - self._paused_s

    def check(self, expected_s: float) -> None:
        """Counts as a pause what has passed since the last call beyond `expected_s`."""
        now_s = time.monotonic()
        self._paused_s += max(0.0, now_s - self._checked_s - expected_s)
        self._checked_s = now_s


@dataclass(eq=False)
class RankProcess:
    """One rank's process and the supervisor's end of its control channel."""

    rank: int  # the rank's number
    process: Any  # its multiprocessing process
    connection: Connection  # the supervisor's end of the pipe
    clock: Callable[[], float]  # returns seconds
    last_heard_s: float  # when its last message came, by `clock`
    state: MemberState | None = None  # what the rank sent, while it waits for an epoch; else None
    serving: bool = False  # whether it is in the current epoch
    stop_sent: bool = False  # whether Stop has been sent to it in this epoch
    result: MemberResult | None = None  # its last message; None until that has come
    writing_since_s: float | None = None  # since when a message waits for the rank to read it, by `clock`
    _outbox: SimpleQueue[Any] = field(default_factory=SimpleQueue)  # pickled messages; None: no more

    def send(self, message: object) -> None:
        """Sends a message, without waiting for the rank to read it.

        If the process is dying, the message is dropped; `messages` then reports the connection's end.
        """
        self._outbox.put(ForkingPickler.dumps(message))

    def write_messages(self) -> None:
        """Writes to the pipe what `send` was given, until `stop_writing`. It waits where the rank does not read."""
        with suppress(OSError):
            while (pickled := self._outbox.get()) is not None:
                self.writing_since_s = self.clock()
                self.connection.send_bytes(pickled)
                self.writing_since_s = None

    def stop_writing(self) -> None:
        """Ends `write_messages` after what was sent before."""
        self._outbox.put(None)

    def hangs(self, hang_s: float) -> str | None:
        """Returns how the rank hangs, for error messages, if it has not sent or not read for `hang_s` seconds; else None."""
        now_s = self.clock()
        if now_s - self.last_heard_s > hang_s:
            return f"said nothing for {hang_s:g} s"
        if (since_s := self.writing_since_s) is not None and now_s - since_s > hang_s:
            return f"read nothing for {hang_s:g} s"
        return None

    def exit_reason(self) -> str:
        """Waits at most EXIT_S seconds for the process to end, and returns how it ended, for error messages."""
        self.process.join(EXIT_S)
        code = self.process.exitcode
        if code is None:
            return "its process ended"
        return f"killed by signal {-code}" if code < 0 else f"exit code {code}"


class RankProcesses:
    """Starts the picklable `main(connection, rank_info, *args)` for ranks of one machine and collects their messages.

    Processes are started and joined in a background thread, so that serving ranks do not wait for ranks that come or go.
    """

    def __init__(
        self, main: Callable[..., None], args: tuple[Any, ...], ranks: int, store: tuple[str, int], timeout_s: float
    ) -> None:
        self._main, self._args, self._ranks, self._timeout_s = main, args, ranks, timeout_s
        self._host, self._port = store
        self.clock = OwnTime()
        self._running: dict[int, RankProcess] = {}
        self._starting: dict[int, Future[tuple[Any, Connection]]] = {}
        self._inbox: SimpleQueue[tuple[RankProcess, Any]] = SimpleQueue()  # None: its connection has ended
        self._background = ThreadPoolExecutor(1, thread_name_prefix="aurora-processes")

    @property
    def starting(self) -> int:
        """Number of processes that `start` has begun and `adopt_started` has not yet returned."""
        return len(self._starting)

    def start(self, rank: int) -> None:
        """Starts a rank's process in the background; `adopt_started` returns it when it runs."""
        rank_info = RankInfo(
            rank, self._ranks, self._host, self._port, self._timeout_s, rank, self._ranks, launched=True
        )  # fmt: skip
        self._starting[rank] = self._background.submit(start_process, rank_info, self._main, *self._args)

    def adopt_started(self, wait: bool = False) -> Iterator[tuple[int, RankProcess | OSError]]:
        """Yields (rank, process, or the error of its start) of ranks started since the last call; `wait` waits for all."""
        for rank, started in list(self._starting.items()):
            if not wait and not started.done():
                continue
            del self._starting[rank]
            try:
                process, connection = started.result()
            except OSError as error:  # it died before it had its arguments
                yield rank, error
                continue
            loaded_s = self.clock() + self._timeout_s  # silence before this is loading its models
            self._running[rank] = found = RankProcess(rank, process, connection, self.clock, loaded_s)
            threading.Thread(target=self._talk, args=(found,), daemon=True, name=f"aurora-from-rank-{rank}").start()
            yield rank, found

    def messages(self, timeout_s: float) -> Iterator[tuple[int, Any]]:
        """Yields (rank, message) of all messages that have come; waits up to timeout_s seconds for the first.

        The message None means that the rank's connection has ended.
        """
        with suppress(Empty):
            for _ in range(max(1, self._inbox.qsize())):
                sender, message = self._inbox.get(timeout=timeout_s)
                if self._running.get(sender.rank) is sender:
                    yield sender.rank, message

    def kill(self, rank: int) -> None:
        """Kills a rank's process. Its further messages are dropped."""
        found = self._running.pop(rank)
        found.process.kill()
        self._background.submit(found.process.join)

    def close(self) -> None:
        """Kills all processes, also those that are still starting. None is left on return."""
        for _ in self.adopt_started(wait=True):
            pass
        for rank in list(self._running):
            self.kill(rank)
        self._background.shutdown()

    def _talk(self, member: RankProcess) -> None:
        """Reads a rank's messages, and writes to it in another thread, until its connection ends.

        Every rank has its own two threads: one that stops in the middle of a message, its own or ours, keeps no other waiting.
        """
        writer = threading.Thread(target=member.write_messages, daemon=True, name=f"aurora-to-rank-{member.rank}")
        writer.start()
        with suppress(EOFError, OSError):
            while True:
                self._inbox.put((member, member.connection.recv()))
        self._inbox.put((member, None))
        member.stop_writing()
        writer.join()
        member.connection.close()
