"""Connections between the hosts of a run: signed frames, and the messages that they carry.

Both ends begin with a `Hello` in the clear. Every frame after that has a proof of the shared secret, of both hellos, of the end
that sends it, of its number and of its content, as the lines between a lighthouse and its members. An end that has proved
nothing yet is heard for HELLO_S seconds in all, and with short frames.
"""

import socket
import struct
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from aurora.errors import AuroraError, BadInput, BrokenPlan, InfeasiblePlan, MissingDependency, RankFailed
from aurora.runtime.distributed.connections import HELLO_S
from aurora.runtime.distributed.control_channel import (
    EpochStart,
    Finish,
    Heartbeat,
    MemberCrashed,
    MemberResult,
    MemberState,
    Progress,
    Stop,
)
from aurora.runtime.distributed.signed_messages import LINE_BYTES, Alive, Hello, Refused, Signatures, StoreValue
from aurora.runtime.distributed.wire_format import WireFormat

FRAME_BYTES = 2**30  # no frame is longer; no first frame, whose sender has proved nothing yet, is longer than LINE_BYTES
_LENGTH = struct.Struct(">Q")
_PROOF_BYTES = 64
_CHUNK = 2**20


@dataclass(frozen=True)
class JoinRun:
    """Host to leader, as its first message: it wants to run ranks.

    Args:
        node: which ranks: those of the plan's GPUs on this node.
        about: what has to be the same on all hosts; see `difference`.
    """

    node: int
    about: dict[str, str]

    def __post_init__(self) -> None:
        if not isinstance(self.about, dict) or not all(isinstance(value, str) for value in self.about.values()):
            raise TypeError("about")


@dataclass(frozen=True)
class HostAdmitted:
    """Leader to host: it takes part. A HostJob follows.

    Args:
        ranks: number of ranks of the whole run.
        local: the ranks of this host.
        timeout_s: seconds that a rank waits for a peer.
    """

    ranks: int
    local: tuple[int, ...]
    timeout_s: float


@dataclass(frozen=True)
class HostJob:
    """Leader to host: what else its ranks have to know. It may be long, so it is not the leader's first message."""

    job: Any


@dataclass(frozen=True)
class HostRefused:
    """Leader to host, as its last message: it cannot take part."""

    reason: str


@dataclass(frozen=True)
class StartRank:
    """Leader to host: start a process for this rank."""

    rank: int


@dataclass(frozen=True)
class KillRank:
    """Leader to host: this rank is lost; kill its process if it is there."""

    rank: int


@dataclass(frozen=True)
class ToRank:
    """Leader to host: a message for a rank."""

    rank: int
    message: Any


@dataclass(frozen=True)
class RankStarted:
    """Host to leader: a rank's process runs."""

    rank: int
    pid: int


@dataclass(frozen=True)
class FromRank:
    """Host to leader: a message of a rank."""

    rank: int
    message: Any


@dataclass(frozen=True)
class RankNotStarted:
    """Host to leader: a rank's process could not be started."""

    rank: int
    reason: str


@dataclass(frozen=True)
class RankEnded:
    """Host to leader: a rank's process has ended."""

    rank: int
    reason: str


@dataclass(frozen=True)
class EndRun:
    """Leader to host, as its last message: the run is over.

    Args:
        complete: whether all work is done.
    """

    complete: bool


MESSAGES = (
    Alive, EndRun, EpochStart, Finish, FromRank, Heartbeat, HostAdmitted, HostJob, HostRefused, JoinRun, KillRank,
    MemberCrashed, MemberResult, MemberState, Progress, RankEnded, RankNotStarted, RankStarted, StartRank, Stop, StoreValue,
    ToRank, AuroraError, BadInput, BrokenPlan, InfeasiblePlan, MissingDependency, RankFailed,
)  # fmt: skip


class HostConnection:
    """Sends and receives the messages of one connection between a leader and another host.

    Args:
        connection: a connected socket; the other end does the same, with the other `at_leader`.
        secret: what all hosts share.
        ours: this end's hello.
        at_leader: whether this end is the leader's.
        wire: packs messages.

    Attributes:
        theirs: the other end's hello, which proves nothing before the first message has come.

    Raises:
        Refused: if the other end says something else than a hello.
        OSError: if the connection ends first, or nothing comes in time.
    """

    def __init__(self, connection: socket.socket, secret: bytes, ours: Hello, at_leader: bool, wire: WireFormat) -> None:
        self._connection, self._wire = connection, wire
        self._until_s: float | None = time.monotonic() + HELLO_S  # by which the other end has to prove itself; None: it has
        connection.sendall(_LENGTH.pack(len(ours.line())) + ours.line())
        self.theirs = Hello.parse(self._read(self._length(LINE_BYTES)))
        hellos = (ours, self.theirs) if at_leader else (self.theirs, ours)
        self._signatures = Signatures(secret, hellos, *(("leader", "host") if at_leader else ("host", "leader")))
        self._sending = threading.Lock()

    def send(self, message: Any) -> None:
        """Sends a message. Raises OSError if the connection has ended."""
        self.send_packed(self.pack(message))

    def pack(self, message: Any) -> bytes:
        """Returns a message as `send_packed` takes it."""
        return self._wire.pack(message)

    def send_packed(self, content: bytes) -> None:
        """Sends what `pack` returned. Raises OSError if the connection has ended."""
        with self._sending:
            self._connection.sendall(_LENGTH.pack(len(content)) + self._signatures.sign(content) + content)

    def receive(self) -> Any:
        """Waits for a message.

        Raises:
            Refused: if something else comes, or what comes is not from the other end of this connection.
            OSError: if the connection has ended, or the first message does not come in time.
        """
        length = self._length(FRAME_BYTES if self._until_s is None else LINE_BYTES)
        signed, content = self._read(_PROOF_BYTES), self._read(length)
        self._signatures.check(signed, content)
        if self._until_s is not None:
            self._until_s = None
            self._connection.settimeout(None)
        return self._wire.unpack(content)

    def close(self) -> None:
        """Ends the connection, and `receive` at both ends."""
        with suppress(OSError):  # it has ended
            self._connection.shutdown(socket.SHUT_RDWR)

    def _length(self, most: int) -> int:
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        if length > most:
            raise Refused(f"a frame of {length} bytes")
        return int(length)

    def _read(self, length: int) -> bytes:
        found = bytearray()
        while len(found) < length:
            if self._until_s is not None:
                if (left_s := self._until_s - time.monotonic()) <= 0:
                    raise TimeoutError("timed out")
                self._connection.settimeout(left_s)
            if not (part := self._connection.recv(min(length - len(found), _CHUNK))):
                raise OSError("the connection ended")
            found += part
        return bytes(found)
