"""Control channel between a rank and the coordinator of its run: its messages, and the rank's end.

The members agree at the lighthouse on the membership of an epoch. The coordinator assigns each member its work: a rank that has
joined an epoch sends `Joined`, and receives `EpochStart` when all members have joined. Messages travel over a pipe that only
the rank and the process that started it hold.
"""

import math
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from aurora.elastic.epoch_groups import Epoch
from aurora.elastic.lighthouse import HEARTBEAT_TIMEOUT_S
from aurora.elastic.member import Member
from aurora.errors import AuroraError, RankFailed
from aurora.runtime.distributed.launcher import RankInfo, describe_error


@dataclass(frozen=True)
class EpochStart:
    """Message from coordinator to rank: the rank's work in an epoch.

    Args:
        epoch: the epoch's number, on which the members agreed.
        number: number of epochs that the coordinator has started, including this one.
        members: the ranks of the epoch, ascending; a member's rank in the epoch's process groups is its index here.
        assignment: this rank's work, from `Coordinator.assign`.
    """

    epoch: int
    number: int
    members: tuple[int, ...]
    assignment: Any


@dataclass(frozen=True)
class Stop:
    """Message from coordinator to rank: leave the epoch, because it is over."""

    epoch: int


@dataclass(frozen=True)
class Finish:
    """Message from coordinator to rank: all work is done. The rank replies with its MemberResult."""


@dataclass(frozen=True)
class Waits:
    """Message from rank to coordinator: the rank is in no epoch, and waits for the next one.

    Args:
        lost: the error because of which it left its last epoch; None: the epoch was stopped, or the rank is new.
    """

    lost: str | None = None


@dataclass(frozen=True)
class Joined:
    """Message from rank to coordinator: the rank has joined an epoch.

    Args:
        epoch: the epoch's number.
        members: the ranks of the epoch.
        state: the rank's state, such as HeldExperts, from which the coordinator assigns work.
    """

    epoch: int
    members: tuple[int, ...]
    state: Any


@dataclass(frozen=True)
class Progress:
    """Message from rank to coordinator: progress of its work in an epoch, such as new tokens."""

    epoch: int
    value: Any


@dataclass(frozen=True)
class MemberResult:
    """Last message from rank to coordinator: its result, or the AuroraError or MemberCrashed that ended it."""

    value: Any


@dataclass(frozen=True)
class MemberCrashed:
    """Value of a MemberResult: an unexpected error ended this rank; the other ranks continue."""

    reason: str


CONTROL_MESSAGES = (EpochStart, Finish, Joined, MemberCrashed, MemberResult, Progress, Stop, Waits)


class ControlChannel:
    """Connection of a rank to its coordinator. If the coordinator's end closes, the rank's process exits.

    Args:
        connection: pipe to the coordinator.
        member: the rank's Member, which joins the epochs of the run.

    Attributes:
        member: as given.
        epoch: the epoch that the rank has joined last.
    """

    def __init__(self, connection: Connection, member: Member) -> None:
        self.member = member
        self.epoch = Epoch(0, (), {}, 0)
        self._connection, self._sending = connection, threading.Lock()
        self._starts = SimpleQueue[EpochStart | None]()  # None: the epoch is over
        self._finish = threading.Event()  # set when all work is done
        threading.Thread(target=self._receive_messages, daemon=True, name="aurora-control").start()

    @property
    def stopped(self) -> threading.Event:
        """Event that is set from the end of an epoch to the start of the next one."""
        return self.member.stopped

    def await_epoch(self, state: Any, lost: str | None = None) -> EpochStart | None:
        """Waits for the next epoch. Returns this rank's work in it, or None if all work is done.

        Args:
            state: this rank's state, sent to the coordinator.
            lost: the error because of which it left its last epoch; None: the epoch was stopped, or the rank is new.

        Raises:
            RankFailed: if another process is a member under this rank's name.
        """
        while not self._finish.is_set():
            try:
                epoch = self.epoch = self.member.join(timeout_s=math.inf, seen=partial(self._send, Waits(lost)))
            except RankFailed:
                if self._finish.is_set():
                    break
                raise
            self._send(Joined(epoch.number, tuple(map(int, epoch.members)), state))
            self.member.on_stop(partial(self._starts.put, None))
            while not self.stopped.is_set():
                start = self._starts.get()
                if start is not None and start.epoch == epoch.number and not self.stopped.is_set():
                    return start
            lost = None
        return None

    def send_progress(self, value: Any) -> None:
        """Sends a value to the coordinator during an epoch."""
        self._send(Progress(self.epoch.number, value))

    def send_result(self, value: Any) -> None:
        """Sends the last message: this rank's result, or the AuroraError or MemberCrashed that ended it."""
        self._send(MemberResult(value))

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
                    self._starts.put(message)
                case Stop(epoch):
                    self.member.stop(epoch)
                case Finish():
                    self._finish.set()
                    self.member.close()


def run_member(
    connection: Connection,
    rank_info: RankInfo,
    target: Callable[..., None],
    args: tuple[Any, ...],
    hang_s: float,
    absent_s: float,
) -> None:
    """Runs `target(rank_info, control, *args)` as a rank's main function; an error that ends it goes to the coordinator.

    Args:
        connection: pipe to the coordinator.
        rank_info: the rank; its host and port are those of the lighthouse.
        target, args: function that the rank runs, and its further arguments.
        hang_s: seconds without a heartbeat after which a member counts as lost.
        absent_s: how long the first epoch waits for missing ranks, in seconds after the latest arrival of a rank.
    """
    silence_native_code()
    try:
        lighthouse, patience_s = (rank_info.host, rank_info.port), hang_s - HEARTBEAT_TIMEOUT_S
        member = Member(
            lighthouse, f"{rank_info.rank:06d}", timeout_s=rank_info.timeout_s, expected=rank_info.ranks,
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
    """Discards what native code (gloo, torchft) writes to stderr, unless AURORA_DEBUG is set; sys.stderr still works."""
    if os.environ.get("AURORA_DEBUG"):
        return
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
    with open(os.devnull, "w") as silent:
        os.dup2(silent.fileno(), 2)
