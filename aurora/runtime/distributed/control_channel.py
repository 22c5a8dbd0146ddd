"""Control channel between a rank and its supervisor: the messages, and the rank's end of it.

Messages travel over a pipe that only the rank and the process that started it hold. The supervisor sends `EpochStart`, `Stop`
and `Finish`; a rank sends `MemberState`, `Heartbeat`, `Progress` and `MemberResult`. Both send `StoreValue`: the rendezvous of
an epoch's process groups travels this way, too, so that no store listens.
"""

import faulthandler
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from aurora.errors import AuroraError
from aurora.runtime.distributed.epoch_gpu import RankGpu
from aurora.runtime.distributed.epoch_groups import EpochGroups, connect_groups
from aurora.runtime.distributed.epoch_store import EpochStore
from aurora.runtime.distributed.launcher import RankInfo, describe_error
from aurora.runtime.distributed.signed_messages import StoreValue

HEARTBEAT_S = 0.1
LATE_S = 60.0  # since its start, after which a rank that is not ready for its first epoch says where it is
OURS = str(Path(__file__).parents[2])  # the folder of aurora's files


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
        ready: set when the rank first waits for an epoch.
        stopped: set while the last epoch is over and the next has not begun.
        busy_since: function that returns when the present computation began, by time.monotonic, or None while this rank waits
            for others; the supervisor kills a rank that computes for longer than the time-out.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self.ready, self.stopped = threading.Event(), threading.Event()
        self._changed = threading.Condition()
        self._next: EpochStart | Finish | None = None
        self._epoch, self._values = 0, dict[str, bytes]()  # the last epoch's number, and its rendezvous
        self._abort: Callable[[], None] = lambda: None
        self.busy_since: Callable[[], float | None] = lambda: None
        threading.Thread(target=self._receive_messages, daemon=True, name="aurora-control").start()
        threading.Thread(target=self._send_heartbeats, daemon=True, name="aurora-heartbeat").start()

    def await_epoch(self, state: Any, lost: str | None = None) -> EpochStart | Finish:
        """Sends this rank's MemberState (`state`, `lost`), then waits for the next epoch or the end of all work."""
        self.ready.set()
        self._send(MemberState(state, lost))
        with self._changed:
            self._changed.wait_for(lambda: self._next is not None)
            answer, self._next = self._next, None
        assert answer is not None
        return answer

    def join_epoch(
        self, epoch: EpochStart, rank_info: RankInfo, groups: int, gpu: RankGpu | None = None, urgent: Collection[int] = ()
    ) -> EpochGroups:
        """Makes process groups of an epoch's members; a collective call. See `connect_groups`."""
        rank, timeout_s = epoch.members.index(rank_info.rank), rank_info.timeout_s
        publish, await_value = partial(self._publish, epoch.number), partial(self._await_value, epoch.number, timeout_s)
        return connect_groups(
            lambda: EpochStore(publish, await_value), epoch.number, rank, len(epoch.members), groups, timeout_s, self.stopped,
            rank_info.host or None, gpu, urgent,
        )  # fmt: skip

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

    def _publish(self, epoch: int, key: str, value: bytes) -> None:
        """Gives the members of an epoch a value of its rendezvous."""
        with self._changed:
            self._values[key] = value
        self._send(StoreValue(epoch, key, value.hex()))

    def _await_value(self, epoch: int, timeout_s: float, key: str) -> bytes:
        """Waits for a value of an epoch's rendezvous. Raises RuntimeError if the epoch is over first, or timeout_s are."""

        def over() -> bool:
            return self.stopped.is_set() or self._epoch != epoch

        with self._changed:
            if not self._changed.wait_for(lambda: key in self._values or over(), timeout_s):
                raise RuntimeError(f"nothing came within {timeout_s:g} s")
            if over():
                raise RuntimeError("the epoch is over")
            return self._values[key]

    def _send(self, message: object) -> None:
        with self._sending:
            self._connection.send(message)

    def _receive_messages(self) -> None:
        while True:
            try:
                message = self._connection.recv()
            except (EOFError, OSError):
                os._exit(1)  # the supervisor is gone
            match message:
                case Stop():
                    self.stopped.set()
                    self._abort()
                    with self._changed:
                        self._changed.notify_all()
                case StoreValue():
                    with self._changed:
                        self._values[message.key] = bytes.fromhex(message.value)
                        self._changed.notify_all()
                case EpochStart() | Finish():
                    with self._changed:
                        self.stopped.clear()
                        self._abort, self._next, self._values = (lambda: None), message, {}
                        self._epoch = message.number if isinstance(message, EpochStart) else 0
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
    late = rank_info.rank, control.ready, threading.get_ident()
    threading.Thread(target=_tell_if_late, args=late, daemon=True, name="aurora-late").start()
    try:
        target(rank_info, control, *args)
    except AuroraError as error:
        control.send_result(error)
    except BaseException as error:
        control.send_result(MemberCrashed(describe_error(error)))


def _tell_if_late(rank: int, ready: threading.Event, thread: int) -> None:
    """Says on stderr where a rank's main thread is, if it is not ready LATE_S after its start; AURORA_DEBUG: all threads."""
    if ready.wait(LATE_S):
        return
    print(f"aurora: rank {rank} is not ready {LATE_S:g} s after its start; it is in {_whereabouts(thread)}", file=sys.stderr)
    if os.environ.get("AURORA_DEBUG"):
        faulthandler.dump_traceback(all_threads=True)


def _whereabouts(thread: int) -> str:
    """The innermost function of aurora that a thread of this process is in, and what that has called."""
    stack = traceback.extract_stack(sys._current_frames()[thread])
    ours = next((frame for frame in reversed(stack) if frame.filename.startswith(OURS)), stack[0])
    where = [f"{each.name} ({os.path.basename(each.filename)}:{each.lineno})" for each in (ours, stack[-1])]
    return where[0] if where[0] == where[1] else ", which has called ".join(where)


def _silence_gloo() -> None:
    """Discards what gloo writes on descriptor 2 (every lost connection, which is expected here). Python keeps its stderr."""
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
    with open(os.devnull, "w") as silent:
        os.dup2(silent.fileno(), 2)
