"""Connections between the hosts of a run: signed frames, and the messages that they carry.

Both ends begin with a `Hello` in the clear. Every frame after that has a proof of the shared secret, of both hellos, of the end
that sends it, of its number and of its content, as the lines between a lighthouse and its members.
"""

import socket
import struct
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from aurora.errors import AuroraError, BadInput, BrokenPlan, InfeasiblePlan, MissingDependency, RankFailed
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
from aurora.runtime.distributed.secret import proof, proves
from aurora.runtime.distributed.signed_messages import LINE_BYTES, Alive, Hello, Refused, StoreValue
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
        about: what has to be the same on all hosts.
    """

    node: int
    about: dict[str, Any]


@dataclass(frozen=True)
class HostAdmitted:
    """Leader to host: it takes part.

    Args:
        ranks: number of ranks of the whole run.
        local: the ranks of this host.
        timeout_s: seconds that a rank waits for a peer.
        job: what else the host's ranks have to know.
    """

    ranks: int
    local: tuple[int, ...]
    timeout_s: float
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
    Alive, EndRun, EpochStart, Finish, FromRank, Heartbeat, HostAdmitted, HostRefused, JoinRun, KillRank, MemberCrashed,
    MemberResult, MemberState, Progress, RankEnded, RankNotStarted, RankStarted, StartRank, Stop, StoreValue, ToRank,
    AuroraError, BadInput, BrokenPlan, InfeasiblePlan, MissingDependency, RankFailed,
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
        OSError: if the connection ends first, or times out.
    """

    def __init__(self, connection: socket.socket, secret: bytes, ours: Hello, at_leader: bool, wire: WireFormat) -> None:
        self._connection, self._secret, self._wire = connection, secret, wire
        connection.sendall(_LENGTH.pack(len(ours.line())) + ours.line())
        self.theirs = Hello.parse(self._read(self._length(LINE_BYTES)))
        hellos = (ours, self.theirs) if at_leader else (self.theirs, ours)
        self._hellos = tuple(hello.line() for hello in hellos)
        self._out, self._in = ("leader", "host") if at_leader else ("host", "leader")
        self._sending = threading.Lock()
        self._sent = self._received = 0

    def send(self, message: Any) -> None:
        """Sends a message. Raises OSError if the connection has ended."""
        content = self._wire.pack(message)
        with self._sending:
            self._sent += 1
            signed = proof(self._secret, *self._hellos, self._out, str(self._sent), content)
            self._connection.sendall(_LENGTH.pack(len(content)) + signed.encode() + content)

    def receive(self) -> Any:
        """Waits for a message.

        Raises:
            Refused: if something else comes, or what comes is not from the other end of this connection.
            OSError: if the connection has ended.
        """
        length = self._length(FRAME_BYTES if self._received else LINE_BYTES)
        signed, content = self._read(_PROOF_BYTES), self._read(length)
        self._received += 1
        if not proves(self._secret, signed, *self._hellos, self._in, str(self._received), content):
            raise Refused("the secret is another one")
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
            if not (part := self._connection.recv(min(length - len(found), _CHUNK))):
                raise OSError("the connection ended")
            found += part
        return bytes(found)
