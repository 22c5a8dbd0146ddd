"""Connections between the hosts of a run: mutual TLS, and the messages that it carries.

All hosts of a run share one certificate and its key, and each end accepts no other certificate. A peer has HELLO_S seconds to
show it; until then its messages are ignored. Messages are MessagePack of known dataclasses, with arrays as their bytes. Nothing
is unpickled: bytes from another host can only become one of the dataclasses that the receiver knows.
"""

import os
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from importlib.metadata import version
from secrets import token_hex
from typing import Any, TypeVar

import msgspec
import numpy as np

from aurora.errors import AuroraError, BadInput, BrokenPlan, InfeasiblePlan, MissingDependency, RankFailed


class Refused(Exception):
    """Exception raised when the other host sends invalid bytes, a message that it may not send, or a wrong certificate."""


@dataclass(frozen=True)
class Alive:
    """Heartbeat message, sent by both ends every HEARTBEAT_S."""


class WireFormat:
    """Serializes values to bytes and back, without pickle.

    Values may be instances of `kinds`, None, booleans, numbers, strings, tuples, lists, sets, dictionaries and numpy arrays of
    numbers, nested to any depth. Types are preserved.

    Args:
        kinds: allowed dataclasses and AuroraError classes, with different names; of an error only the message is sent.
    """

    def __init__(self, *kinds: type[Any]) -> None:
        self._kinds = {kind.__name__: kind for kind in kinds}
        assert len(self._kinds) == len(kinds), "two of one name"

    def pack(self, value: Any) -> bytes:
        """Returns a value serialized to bytes."""
        return msgspec.msgpack.encode(self._plain(value))

    def unpack(self, packed: bytes) -> Any:
        """Returns the value from which `pack` made these bytes.

        Raises:
            Refused: if the bytes are not from `pack` with the same kinds, or a field has a wrong type or an invalid value.
        """
        try:
            return self._value(msgspec.msgpack.decode(packed))
        except Exception as error:  # also what the constructor of a value raises
            raise Refused(f"no message of this version: {type(error).__name__}") from None

    def _plain(self, value: Any) -> Any:
        """Returns a value as a list that begins with what it is, or a number, a string or None."""
        match value:
            case None | bool() | str():
                return value
            case np.bool_() | np.integer() | np.floating():
                return value.item()
            case int() | float():
                return value
            case tuple():
                return ["tuple", *map(self._plain, value)]
            case list():
                return ["list", *map(self._plain, value)]
            case AbstractSet():
                return ["set", *map(self._plain, value)]
            case Mapping():
                return ["dict", *([self._plain(key), self._plain(entry)] for key, entry in value.items())]
            case np.ndarray():
                return ["array", value.dtype.str, list(value.shape), np.ascontiguousarray(value).tobytes()]
            case AuroraError():
                return [self._name(value), str(value)]
        assert is_dataclass(value), f"{type(value).__name__} does not travel between hosts"
        return [self._name(value), *(self._plain(getattr(value, field.name)) for field in fields(value) if field.init)]

    def _name(self, value: Any) -> str:
        name = type(value).__name__
        assert self._kinds.get(name) is type(value), f"{name} does not travel between hosts"
        return name

    def _value(self, plain: Any) -> Any:
        if not isinstance(plain, list):
            if isinstance(plain, (dict, bytes)):
                raise ValueError
            return plain
        kind, *parts = plain
        if kind == "dict":
            return {self._value(key): self._value(entry) for key, entry in parts}
        if kind == "array":
            dtype, shape, content = parts
            return _array(dtype, shape, content)
        values = list(map(self._value, parts))
        if kind in _COLLECTIONS:
            return _COLLECTIONS[kind](values)
        cls = self._kinds[kind]
        if issubclass(cls, AuroraError):
            return cls(*values)
        by_field = dict(zip((field for field in fields(cls) if field.init), values, strict=True))
        if not all(isinstance(value, _CLASSES.get(field.type, object)) for field, value in by_field.items()):
            raise TypeError
        return cls(**{field.name: value for field, value in by_field.items()})


_CLASSES: Mapping[Any, type | tuple[type, ...]] = {int: (int, float), float: (int, float), str: str}  # of fields' values
_COLLECTIONS: Mapping[str, Callable[[list[Any]], Any]] = {"tuple": tuple, "list": list, "set": set}


def _array(dtype: str, shape: list[int], content: bytes) -> np.ndarray:
    """Returns an array. Raises ValueError or TypeError if it is none of numbers."""
    array_dtype = np.dtype(dtype)
    if array_dtype.kind not in "biuf":
        raise ValueError
    return np.frombuffer(content, array_dtype).reshape(shape).copy()


CERTIFICATE = "AURORA_CERTIFICATE"  # environment variable: a PEM file with the certificate that all hosts share, and its key
EXPIRED = 10  # X509_V_ERR_CERT_HAS_EXPIRED of OpenSSL
MOST_RANKS = 4096  # of a host
HELLO_S = 10.0  # for a new connection to show its certificate
UNACKNOWLEDGED_S = 0.2  # after the first retransmission, which the kernel sends 0.2 s after what it repeats
FRAME_BYTES = 2**30  # no frame is longer
_LENGTH = struct.Struct(">Q")
_CHUNK = 2**20
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Certificate:
    """TLS contexts for the leader and for joining hosts, from the one certificate and key that all hosts of a run share."""

    at_leader: ssl.SSLContext
    at_host: ssl.SSLContext


def load_certificate(file: str) -> Certificate:
    """Returns the certificate in a PEM file that also contains its key.

    Raises:
        BadInput: if the file has no certificate with its key.
    """
    contexts = []
    for protocol in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT):
        context = ssl.SSLContext(protocol)
        context.check_hostname = False  # hosts of a run have one certificate, whatever their names are
        context.verify_mode = ssl.CERT_REQUIRED
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        try:
            context.load_cert_chain(file, password=lambda: "")
            context.load_verify_locations(file)
        except (OSError, ValueError) as error:
            reason = error.strerror or str(error) if isinstance(error, OSError) else str(error)
            raise BadInput(
                f"{CERTIFICATE}: expected a PEM file with a certificate and its key, found {file}: {reason}"
            ) from None
        contexts.append(context)
    return Certificate(*contexts)


def certificate_of_hosts(name: str) -> Certificate:
    """Returns the certificate for a run over several hosts, from the file named by environment variable AURORA_CERTIFICATE.

    Args:
        name: name of the parameter that requested such a run, for the error message.

    Raises:
        BadInput: if the variable is not set, or its file has no certificate with its key.
    """
    file = os.environ.get(CERTIFICATE)
    if not file:
        instead = " in place of AURORA_SECRET" if os.environ.get("AURORA_SECRET") else ""
        raise BadInput(
            f"`{name}`: expected the file of a certificate that all hosts share in {CERTIFICATE}{instead}, found none"
        )
    return load_certificate(file)


@dataclass(frozen=True)
class JoinRun:
    """First message from host to leader: request to run ranks.

    Args:
        name: name of the host, for messages to users.
        ranks: the ranks that it offers to run.
        about: values that must be the same on all hosts, by description; see `difference`.
        respawn: how often each of them may be restarted, if hosts decide this for their ranks.
        process: random text that distinguishes this process from earlier ones of the same name.
    """

    name: str
    ranks: tuple[int, ...]
    about: dict[str, str]
    respawn: int = 0
    process: str = field(default_factory=partial(token_hex, 8))

    def __post_init__(self) -> None:
        texts = isinstance(self.about, dict) and all(isinstance(value, str) for value in self.about.values())
        numbers = isinstance(self.ranks, tuple) and all(isinstance(rank, int) for rank in self.ranks)
        if not (texts and numbers and 0 < len(self.ranks) <= MOST_RANKS):
            raise TypeError("about, ranks")


@dataclass(frozen=True)
class HostAdmitted:
    """Message from leader to host: the host is admitted; `job` holds the arguments of its ranks."""

    job: Any


@dataclass(frozen=True)
class HostRefused:
    """Last message from leader to host: the host is rejected."""

    reason: str


@dataclass(frozen=True)
class StartRank:
    """Message from leader to host: start a process for this rank."""

    rank: int


@dataclass(frozen=True)
class KillRank:
    """Message from leader to host: this rank is lost; kill its process if it exists."""

    rank: int


@dataclass(frozen=True)
class ToRank:
    """Message from leader to host: pass `message` to a rank."""

    rank: int
    message: Any


@dataclass(frozen=True)
class RankStarted:
    """Message from host to leader: a rank's process has started."""

    rank: int
    pid: int


@dataclass(frozen=True)
class FromRank:
    """Message from host to leader: a message sent by a rank."""

    rank: int
    message: Any


@dataclass(frozen=True)
class RankNotStarted:
    """Message from host to leader: a rank's process could not be started."""

    rank: int
    reason: str


@dataclass(frozen=True)
class RankEnded:
    """Message from host to leader: a rank's process has ended."""

    rank: int
    reason: str


@dataclass(frozen=True)
class EndRun:
    """Last message from leader to host: the run is over.

    Args:
        complete: True if all work is done.
    """

    complete: bool


HOST_MESSAGES = (
    Alive, EndRun, FromRank, HostAdmitted, HostRefused, JoinRun, KillRank, RankEnded, RankNotStarted, RankStarted, StartRank,
    ToRank, AuroraError, BadInput, BrokenPlan, InfeasiblePlan, MissingDependency, RankFailed,
)  # fmt: skip


class HostConnection:
    """TLS connection for messages between the leader and another host. Any thread may send; only one may receive.

    Args:
        connection: a connected socket, which this object owns from now on; the other end must create a HostConnection, too.
        certificate: the certificate that all hosts share.
        at_leader: True at the leader's end, False at the other end.
        wire: serializes messages.

    Raises:
        Refused: if the other end has another certificate or none.
        OSError: if the connection breaks, or the other end does not answer in time.
    """

    def __init__(self, connection: socket.socket, certificate: Certificate, at_leader: bool, wire: WireFormat) -> None:
        self._wire = wire
        context = certificate.at_leader if at_leader else certificate.at_host
        self._socket = context.wrap_socket(connection, server_side=at_leader, do_handshake_on_connect=False)
        self._socket.setblocking(False)
        self._using, self._sending = threading.Lock(), threading.Lock()  # TLS takes one call at a time
        try:
            self._perform(self._socket.do_handshake, time.monotonic() + HELLO_S)
        except ssl.SSLCertVerificationError as error:
            self.close()
            if error.verify_code == EXPIRED:
                raise Refused(f"the certificate in {CERTIFICATE} has expired") from None
            raise Refused(f"it has another certificate; is {CERTIFICATE} the same on both hosts?") from None
        except BaseException:
            self.close()
            raise

    def send(self, message: Any) -> None:
        """Sends a message. Raises OSError if the connection has ended."""
        self.send_packed(self.pack(message))

    def pack(self, message: Any) -> bytes:
        """Returns a message as bytes for `send_packed`."""
        return self._wire.pack(message)

    def send_packed(self, content: bytes) -> None:
        """Sends a message that `pack` has packed. Raises OSError if the connection has ended."""
        with self._sending:
            rest = memoryview(_LENGTH.pack(len(content)) + content)
            while rest:
                part = rest[:_CHUNK]
                rest = rest[self._perform(partial(self._socket.send, part)) :]

    def receive(self) -> Any:
        """Waits for the next message, and returns it.

        Raises:
            Refused: if the received bytes are not an allowed message.
            OSError: if the connection has ended.
        """
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        if length > FRAME_BYTES:
            raise Refused(f"a frame of {length} bytes")
        return self._wire.unpack(self._read(length))

    def end(self) -> None:
        """Ends the connection; `receive` then raises OSError at both ends."""
        with suppress(OSError):  # it has ended
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """Ends the connection and closes its descriptor; the object must not be used afterwards."""
        self.end()
        self._socket.close()

    def _read(self, length: int) -> bytes:
        content = bytearray()
        while len(content) < length:
            most = min(length - len(content), _CHUNK)
            if not (part := self._perform(partial(self._socket.recv, most))):
                raise OSError("the connection ended")
            content += part
        return bytes(content)

    def _perform(self, call: Callable[[], _Result], until_s: float | None = None) -> _Result:
        """Performs a call of TLS, which may wait for either direction. Raises TimeoutError if it lasts until `until_s`."""
        while True:
            try:
                with self._using:
                    return call()
            except ssl.SSLWantReadError:
                events = select.POLLIN
            except ssl.SSLWantWriteError:
                events = select.POLLOUT
            left_s = None if until_s is None else until_s - time.monotonic()
            if left_s is not None and left_s <= 0:
                raise TimeoutError("timed out")
            ready = select.poll()
            ready.register(self._socket.fileno(), events)
            ready.poll(None if left_s is None else left_s * 1000)


def fails_soon(connection: socket.socket) -> socket.socket:
    """Sets a TCP timeout: `connection` fails if the peer acknowledges nothing for UNACKNOWLEDGED_S. Returns `connection`."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(UNACKNOWLEDGED_S * 1000))
    return connection


def this_version() -> dict[str, str]:
    """Returns {description: version} of the aurora installed here. Hosts need equal versions to understand each other."""
    return {"aurora's version": version("aurora-moe")}


def difference(expected: Mapping[str, Any], found: Mapping[str, Any]) -> str | None:
    """Returns a sentence that names the first value in which a host differs from the leader; None if all are equal.

    Args:
        expected, found: the leader's and the host's values, by description.
    """
    for name in [*expected, *(found.keys() - expected.keys())]:
        leaders, value = expected.get(name), found.get(name)
        if leaders != value:
            return f"expected {name} {leaders} as the leader has, found {value}"
    return None
