"""Control channel between a rank and its supervisor: the messages, and the rank's end of it.

Messages travel over a pipe that only these two processes hold. The supervisor sends `EpochStart`, `Stop` and `Finish`; a rank
sends `MemberState`, `Heartbeat`, `Progress` and `MemberResult`.
"""

import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from aurora.errors import AuroraError
from aurora.runtime.distributed.launcher import RankInfo, describe_error

HEARTBEAT_S = 0.1


@dataclass(frozen=True)
class EpochStart:
    """Supervisor to rank: an epoch begins.

    Args:
        number: the epoch's number, from 1.
        members: the ranks that take part, ascending; a member's rank in the epoch's process groups is its index here.
        assignment: what the coordinator assigned to this rank.
    """

    number: int
    members: tuple[int, ...]
    assignment: Any


@dataclass(frozen=True)
class Stop:
    """Supervisor to rank: the epoch is over. The rank answers with its MemberState."""


@dataclass(frozen=True)
class Finish:
    """Supervisor to rank: all work is done. The rank answers with its MemberResult."""


@dataclass(frozen=True)
class Heartbeat:
    """Rank to supervisor, every HEARTBEAT_S: seconds that it has been computing; zero while it waits for other ranks."""

    busy_s: float


@dataclass(frozen=True)
class MemberState:
    """Rank to supervisor: the rank takes part in no epoch and waits for the next one."""

    value: Any  # what the rank holds, for the coordinator
    lost: str | None = None  # why the rank left its last epoch by itself; None: it was stopped


@dataclass(frozen=True)
class Progress:
    """Rank to supervisor, during an epoch: a value for the coordinator, such as new tokens."""

    value: Any


@dataclass(frozen=True)
class MemberResult:
    """Rank to supervisor, as its last message: its result, or the AuroraError or MemberCrashed that ended it."""

    value: Any


@dataclass(frozen=True)
class MemberCrashed:
    """Value of a MemberResult: an unexpected error ended the rank; the others go on."""

    reason: str


class ControlChannel:
    """A rank's end of its control channel.

    Two threads serve it: one receives the supervisor's messages, one sends heartbeats. The process exits when the supervisor is
    gone.

    Attributes:
        stopped: set while the last epoch is over and the next has not begun.
        busy_since: function that returns when the present computation began, by time.monotonic, or None while this rank waits
            for others; the supervisor kills a rank that computes for longer than the time-out.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self.stopped = threading.Event()
        self._changed = threading.Condition()
        self._next: EpochStart | Finish | None = None
        self._abort: Callable[[], None] = lambda: None
        self.busy_since: Callable[[], float | None] = lambda: None
        threading.Thread(target=self._receive_messages, daemon=True, name="aurora-control").start()
        threading.Thread(target=self._send_heartbeats, daemon=True, name="aurora-heartbeat").start()

    def await_epoch(self, state: Any, lost: str | None = None) -> EpochStart | Finish:
        """Sends this rank's MemberState (`state`, `lost`), then waits for the next epoch or the end of all work."""
        self._send(MemberState(state, lost))
        with self._changed:
            self._changed.wait_for(lambda: self._next is not None)
            answer, self._next = self._next, None
        assert answer is not None
        return answer

    def on_stop(self, abort: Callable[[], None]) -> None:
        """Calls `abort` when the current epoch is over; at once if it is over already."""
        self._abort = abort
        if self.stopped.is_set():
            abort()

    def send_progress(self, value: Any) -> None:
        """Sends a value to the coordinator during an epoch."""
        self._send(Progress(value))

    def send_result(self, value: Any) -> None:
        """Sends this rank's result, or the AuroraError or MemberCrashed that ended it. It is the last message."""
        self._send(MemberResult(value))

    def _send(self, message: object) -> None:
        with self._sending:
            self._connection.send(message)

    def _receive_messages(self) -> None:
        while True:
            try:
                message = self._connection.recv()
            except (EOFError, OSError):
                os._exit(1)  # the supervisor is gone
            if isinstance(message, Stop):
                self.stopped.set()
                self._abort()
                continue
            with self._changed:
                self.stopped.clear()
                self._abort = lambda: None
                self._next = message
                self._changed.notify_all()

    def _send_heartbeats(self) -> None:
        while True:
            since = self.busy_since()
            try:
                self._send(Heartbeat(0.0 if since is None else time.monotonic() - since))
            except OSError:
                os._exit(1)
            time.sleep(HEARTBEAT_S)


def run_member(connection: Connection, rank_info: RankInfo, target: Callable[..., None], args: tuple[Any, ...]) -> None:
    """Runs `target(rank_info, control, *args)` as a supervised rank's main function, and sends the error that ends it."""
    if not os.environ.get("AURORA_DEBUG"):
        _silence_gloo()
    control = ControlChannel(connection)
    try:
        target(rank_info, control, *args)
    except AuroraError as error:
        control.send_result(error)
    except BaseException as error:
        control.send_result(MemberCrashed(describe_error(error)))


def _silence_gloo() -> None:
    """Discards what gloo writes on descriptor 2 (every lost connection, which is expected here). Python keeps its stderr."""
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
    with open(os.devnull, "w") as silent:
        os.dup2(silent.fileno(), 2)
