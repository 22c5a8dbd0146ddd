"""Control channel between a rank and the coordinator of its run: its messages, and the rank's end.

At the lighthouse the members agree on who takes part in an epoch. The coordinator tells each of them its work: a rank that has
joined an epoch sends `Joined`, and gets `EpochStart` when all members have joined. Messages travel over a pipe that only the
rank and the process that started it hold.
"""

import math
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from aurora.elastic.lighthouse import HEARTBEAT_TIMEOUT_S
from aurora.elastic.member import Epoch, Member
from aurora.errors import AuroraError, RankFailed
from aurora.runtime.distributed.launcher import RankInfo, describe_error


@dataclass(frozen=True)
class EpochStart:
    """Coordinator to rank: its work in an epoch.

    Args:
        epoch: the epoch's number, on which the members agreed.
        number: how many epochs the coordinator has started, this one included.
        members: the ranks that take part, ascending; a member's rank in the epoch's process groups is its index here.
        assignment: what the coordinator assigned to this rank.
    """

    epoch: int
    number: int
    members: tuple[int, ...]
    assignment: Any


@dataclass(frozen=True)
class Stop:
    """Coordinator to rank: an epoch is over."""

    epoch: int


@dataclass(frozen=True)
class Finish:
    """Coordinator to rank: all work is done. The rank answers with its MemberResult."""


@dataclass(frozen=True)
class Waits:
    """Rank to coordinator: the rank is in no epoch and waits for the next.

    Args:
        lost: why it left its last epoch by itself; None: it was stopped, or is new.
    """

    lost: str | None = None


@dataclass(frozen=True)
class Joined:
    """Rank to coordinator: the rank has joined an epoch.

    Args:
        epoch: the epoch's number.
        members: the ranks that take part.
        state: the rank's state, by which the coordinator assigns work, such as HeldExperts.
    """

    epoch: int
    members: tuple[int, ...]
    state: Any


@dataclass(frozen=True)
class Progress:
    """Rank to coordinator: progress of its work in an epoch, such as new tokens."""

    epoch: int
    value: Any


@dataclass(frozen=True)
class MemberResult:
    """Rank to coordinator, as its last message: its result, or the AuroraError or MemberCrashed that ended it."""

    value: Any


@dataclass(frozen=True)
class MemberCrashed:
    """Value of a MemberResult: an unexpected error ended the rank; the others go on."""

    reason: str


class ControlChannel:
    """A rank's end of its control channel. The process exits when the coordinator is gone.

    Args:
        connection: pipe to the coordinator.
        member: takes part in the epochs of the run.

    Attributes:
        member: as given.
        epoch: the epoch that the rank has joined last.
    """

    def __init__(self, connection: Connection, member: Member) -> None:
        self.member = member
        self.epoch = Epoch(0, (), {}, 0)
        self._connection, self._sending = connection, threading.Lock()
        self._changed = threading.Condition()
        self._start: EpochStart | None = None  # what came last
        self._finish = threading.Event()  # set when all work is done
        threading.Thread(target=self._receive_messages, daemon=True, name="aurora-control").start()

    @property
    def stopped(self) -> threading.Event:
        """Set while the last epoch is over and the next has not begun."""
        return self.member.stopped

    def await_epoch(self, state: Any, lost: str | None = None) -> EpochStart | None:
        """Waits for the next epoch. Returns this rank's work in it; None: all work is done.

        Args:
            state: this rank's state, which the coordinator gets.
            lost: why it left its last epoch by itself; None: it was stopped, or is new.

        Raises:
            RankFailed: if another process is a member in this rank's name.
        """
        while not self._finish.is_set():
            try:
                epoch = self.epoch = self.member.join(timeout_s=math.inf, seen=partial(self._send, Waits(lost)))
            except RankFailed:
                if self._finish.is_set():
                    break
                raise
            self._send(Joined(epoch.number, tuple(map(rank_of, epoch.members)), state))
            self.member.on_stop(self._notify)
            with self._changed:
                self._changed.wait_for(lambda: self._finish.is_set() or self.stopped.is_set() or self._started is not None)
                if not self.stopped.is_set() and (start := self._started) is not None:
                    return start
            lost = None
        return None

    def send_progress(self, value: Any) -> None:
        """Sends a value to the coordinator during an epoch."""
        self._send(Progress(self.epoch.number, value))

    def send_result(self, value: Any) -> None:
        """Sends this rank's result, or the AuroraError or MemberCrashed that ended it. It is the last message."""
        self._send(MemberResult(value))

    @property
    def _started(self) -> EpochStart | None:
        """Work of this rank in the epoch that it has joined, once it has been told."""
        return self._start if self._start is not None and self._start.epoch == self.epoch.number else None

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _send(self, message: object) -> None:
        with self._sending:
            self._connection.send(message)

    def _receive_messages(self) -> None:
        while True:
            try:
                message = self._connection.recv()
            except (EOFError, OSError):
                os._exit(1)  # the coordinator is gone
            match message:
                case EpochStart():
                    self._start = message
                case Stop(epoch):
                    self.member.stop(epoch)
                case Finish():
                    self._finish.set()
                    self.member.close()
            self._notify()


def member_name(rank: int) -> str:
    """Returns the name that a rank has as a member; names of ranks sort as their numbers."""
    return f"{rank:06d}"


def rank_of(name: str) -> int:
    """Returns the rank of a member, from its name."""
    return int(name)


def run_member(
    connection: Connection,
    rank_info: RankInfo,
    target: Callable[..., None],
    args: tuple[Any, ...],
    hang_s: float,
    absent_s: float,
) -> None:
    """Runs `target(rank_info, control, *args)` as a rank's main function, and sends the error that ends it.

    Args:
        connection: pipe to the coordinator.
        rank_info: the rank; its host and port are those of the lighthouse.
        target, args: function that the rank runs, and its further arguments.
        hang_s: seconds without a sign of life after which a member is lost.
        absent_s: seconds after the last arrival for which the first epoch waits for ranks that have not arrived.
    """
    silence_native_code()
    try:
        lighthouse, patience_s = (rank_info.host, rank_info.port), hang_s - HEARTBEAT_TIMEOUT_S
        member = Member(
            lighthouse, member_name(rank_info.rank), timeout_s=rank_info.timeout_s, expected=rank_info.ranks,
            absent_s=absent_s, patience_s=patience_s,
        )  # fmt: skip
        control = ControlChannel(connection, member)
    except AuroraError as error:
        connection.send(MemberResult(error))
        return
    try:
        target(rank_info, control, *args)
    except AuroraError as error:
        control.send_result(error)
    except BaseException as error:
        control.send_result(MemberCrashed(describe_error(error)))


def silence_native_code() -> None:
    """Discards messages that gloo and torchft write to descriptor 2, unless AURORA_DEBUG is set. Python keeps its stderr."""
    if os.environ.get("AURORA_DEBUG"):
        return
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
    with open(os.devnull, "w") as silent:
        os.dup2(silent.fileno(), 2)
