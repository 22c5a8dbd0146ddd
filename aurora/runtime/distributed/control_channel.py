"""A rank's side of the supervisor, and what they say to each other over a pipe."""

import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from aurora.errors import AuroraError
from aurora.runtime.distributed.launcher import RankInfo, what_happened

BEAT_S = 0.1


@dataclass(frozen=True)
class EpochStart:
    """From the supervisor to a member. seats: of all members, ascending; a member's rank is its place among them. part: what
    the steward assigned to it."""

    number: int
    seats: tuple[int, ...]
    part: Any


@dataclass(frozen=True)
class Stop:
    """From the supervisor: the epoch is over."""


@dataclass(frozen=True)
class Finish:
    """From the supervisor: all is done, bring home what you have."""


@dataclass(frozen=True)
class Heartbeat:
    """From a rank, every BEAT_S. busy_s: for how long it has been in one piece of work that waits for nobody."""

    busy_s: float


@dataclass(frozen=True)
class MemberState:
    """From a rank: it is in no epoch and waits for one. lost: why it left the last one by itself; None: it was told to."""

    value: Any
    lost: str | None = None


@dataclass(frozen=True)
class Progress:
    """From a rank in an epoch, for the steward."""

    value: Any


@dataclass(frozen=True)
class MemberResult:
    """From a rank at the end: its result, or the error that it cannot go on from."""

    value: Any


@dataclass(frozen=True)
class MemberCrashed:
    """MemberResult by a rank that met an error of its own; the others go on."""

    how: str


class ControlChannel:
    """A rank's way to its supervisor."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._stop = threading.Event()
        self._changed = threading.Condition()
        self._next: EpochStart | Finish | None = None
        self._abort: Callable[[], None] = lambda: None
        self._busy_since: Callable[[], float | None] = lambda: None
        threading.Thread(target=self._listen, daemon=True, name="aurora-link").start()
        threading.Thread(target=self._beat, daemon=True, name="aurora-beat").start()

    def stand_by(self, value: Any, lost: str | None = None) -> EpochStart | Finish:
        """Say what this rank holds, and wait for what comes next."""
        self._say(MemberState(value, lost))
        with self._changed:
            self._changed.wait_for(lambda: self._next is not None)
            found, self._next = self._next, None
        assert found is not None
        return found

    @property
    def stopped(self) -> threading.Event:
        """Set when the epoch is over, until the next message."""
        return self._stop

    def on_stop(self, abort: Callable[[], None]) -> None:
        """Call `abort` when the epoch is over, at once if it is."""
        self._abort = abort
        if self._stop.is_set():
            abort()

    def busy(self, since: Callable[[], float | None]) -> None:
        """`since` tells by time.monotonic when this rank began what it is doing, None: it waits for others."""
        self._busy_since = since

    def tell(self, value: Any) -> None:
        """Something for the steward, from within an epoch."""
        self._say(Progress(value))

    def bring(self, value: Any) -> None:
        """This rank's result, or the AuroraError or MemberCrashed that ended it; nothing comes after it."""
        self._say(MemberResult(value))

    def _say(self, message: object) -> None:
        with self._sending:
            self._connection.send(message)

    def _listen(self) -> None:
        while True:
            try:
                message = self._connection.recv()
            except (EOFError, OSError):
                os._exit(1)  # nobody is left to work for
            if isinstance(message, Stop):
                self._stop.set()
                self._abort()
                continue
            with self._changed:
                self._stop.clear()
                self._abort = lambda: None
                self._next = message
                self._changed.notify_all()

    def _beat(self) -> None:
        while True:
            since = self._busy_since()
            try:
                self._say(Heartbeat(0.0 if since is None else time.monotonic() - since))
            except OSError:
                os._exit(1)
            time.sleep(BEAT_S)


def _hush() -> None:
    """gloo tells of every lost connection on descriptor 2, and losing them is what is expected here; Python keeps its own."""
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
    with open(os.devnull, "w") as silent:
        os.dup2(silent.fileno(), 2)


def member(connection: Connection, seat: RankInfo, target: Callable[..., None], args: tuple[Any, ...]) -> None:
    """A rank's process: `target(seat, link, *args)`, whose errors it brings."""
    if not os.environ.get("AURORA_DEBUG"):
        _hush()
    link = ControlChannel(connection)
    try:
        target(seat, link, *args)
    except AuroraError as error:
        link.bring(error)
    except BaseException as error:
        link.bring(MemberCrashed(what_happened(error)))
