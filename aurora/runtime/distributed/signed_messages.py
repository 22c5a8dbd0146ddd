"""Signed messages between a lighthouse and a member: lines of JSON, each with a proof of the secret.

A connection begins with a `Hello` of each end, in the clear: a name and a nonce. Each proof is of both hellos, of the end that
sends, of the line's number and of its text; so a line of another connection, from the other end, or out of sequence is refused.
"""

import json
import secrets
from dataclasses import asdict, dataclass, field
from typing import Any

from aurora.runtime.distributed.quorum import BeginEpoch, JoinEpoch, LeaveEpoch, StopEpoch
from aurora.runtime.distributed.secret import proof, proves

LINE_BYTES = 2**20  # no line is longer


class Refused(Exception):
    """A line is no message, or does not come from the other end of the connection."""


@dataclass(frozen=True)
class Hello:
    """First line of each end.

    Args:
        name: the member's name; empty at the lighthouse.
        process: tells the member's process from others of the same name; empty at the lighthouse.
        nonce: is used for this connection only.
    """

    name: str = ""
    process: str = ""
    nonce: str = field(default_factory=lambda: secrets.token_hex(16))

    def line(self) -> bytes:
        """Returns the line to send."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def parse(cls, line: bytes) -> "Hello":
        """Returns the hello of a line. Raises Refused."""
        try:
            values = json.loads(line)
            if {name: type(value) for name, value in values.items()} != {"name": str, "process": str, "nonce": str}:
                raise ValueError
            return cls(**values)
        except (ValueError, AttributeError, RecursionError):
            raise Refused("no hello") from None


@dataclass(frozen=True)
class Alive:
    """Both ways, every HEARTBEAT_S: the process runs."""


@dataclass(frozen=True)
class Goodbye:
    """Member to lighthouse, as its last message: it leaves on purpose and is not lost."""


@dataclass(frozen=True)
class NameTaken:
    """Lighthouse to a process that wants to join: another one of this name is there."""


@dataclass(frozen=True)
class StoreValue:
    """A value of the rendezvous in an epoch, from one member to all others; `value` is hexadecimal."""

    epoch: int
    key: str
    value: str


@dataclass(frozen=True)
class HostMessage:
    """Between the launchers of two hosts of a run: what their work has to say, as JSON."""

    data: dict[str, Any]


KINDS = {
    kind.__name__: kind
    for kind in (Alive, BeginEpoch, Goodbye, HostMessage, JoinEpoch, LeaveEpoch, NameTaken, StopEpoch, StoreValue)
}


class SignedMessages:
    """Packs and unpacks the messages of one connection.

    Args:
        secret: what the lighthouse and all members share.
        member, lighthouse: the hellos of both ends.
        at_member: whether this end is the member's.
    """

    def __init__(self, secret: bytes, member: Hello, lighthouse: Hello, at_member: bool) -> None:
        self._secret, self._hellos = secret, (member.line(), lighthouse.line())
        self._out, self._in = ("member", "lighthouse") if at_member else ("lighthouse", "member")
        self._out_lines = self._in_lines = 0

    def pack(self, message: Any) -> bytes:
        """Returns the line of a message."""
        text = json.dumps([type(message).__name__, asdict(message)])
        self._out_lines += 1
        return f"{proof(self._secret, *self._hellos, self._out, str(self._out_lines), text)} {text}\n".encode()

    def unpack(self, line: bytes) -> Any:
        """Returns the message of a line. Raises Refused."""
        found, _, text = line.removesuffix(b"\n").partition(b" ")
        self._in_lines += 1
        if not proves(self._secret, found, *self._hellos, self._in, str(self._in_lines), text):
            raise Refused("the secret is another one")
        try:
            kind, values = json.loads(text)
            return KINDS[kind](**values)
        except (ValueError, TypeError, KeyError):
            raise Refused("no message of this version") from None
