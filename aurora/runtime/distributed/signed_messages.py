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

    def __post_init__(self) -> None:
        if not isinstance(self.epoch, int) or not isinstance(self.key, str):
            raise TypeError("no value of an epoch")
        bytes.fromhex(self.value)  # which others will do


@dataclass(frozen=True)
class HostMessage:
    """Between the launchers of two hosts of a run: what their work has to say, as JSON."""

    data: dict[str, Any]


KINDS = {
    kind.__name__: kind
    for kind in (Alive, BeginEpoch, Goodbye, HostMessage, JoinEpoch, LeaveEpoch, NameTaken, StopEpoch, StoreValue)
}


class Signatures:
    """Proofs of what one end of a connection sends, and checks of the other end's.

    Args:
        secret: what both ends share.
        hellos: of the two ends, in a sequence that both take.
        ours, theirs: what this end and the other are in this connection.
    """

    def __init__(self, secret: bytes, hellos: tuple[Hello, Hello], ours: str, theirs: str) -> None:
        self._secret, self._ours, self._theirs = secret, ours, theirs
        self._hellos = tuple(hello.line() for hello in hellos)
        self._sent = self._received = 0

    def sign(self, content: bytes) -> bytes:
        """Returns the proof of what this end sends next, as hexadecimal digits."""
        self._sent += 1
        return proof(self._secret, *self._hellos, self._ours, str(self._sent), content).encode()

    def check(self, found: bytes, content: bytes) -> None:
        """Checks the proof of what the other end has sent next. Raises Refused."""
        self._received += 1
        if not proves(self._secret, found, *self._hellos, self._theirs, str(self._received), content):
            raise Refused("the secret is another one")


class SignedMessages:
    """Packs and unpacks the messages of one connection.

    Args:
        secret: what the lighthouse and all members share.
        member, lighthouse: the hellos of both ends.
        at_member: whether this end is the member's.
    """

    def __init__(self, secret: bytes, member: Hello, lighthouse: Hello, at_member: bool) -> None:
        ends = ("member", "lighthouse") if at_member else ("lighthouse", "member")
        self._signatures = Signatures(secret, (member, lighthouse), *ends)

    def pack(self, message: Any) -> bytes:
        """Returns the line of a message."""
        text = json.dumps([type(message).__name__, asdict(message)]).encode()
        return self._signatures.sign(text) + b" " + text + b"\n"

    def unpack(self, line: bytes) -> Any:
        """Returns the message of a line. Raises Refused."""
        found, _, text = line.removesuffix(b"\n").partition(b" ")
        self._signatures.check(found, text)
        try:
            kind, values = json.loads(text)
            return KINDS[kind](**values)
        except (ValueError, TypeError, KeyError, RecursionError):
            raise Refused("no message of this version") from None
