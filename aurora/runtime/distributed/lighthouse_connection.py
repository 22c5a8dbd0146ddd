"""Connection to a lighthouse: kept up by threads, made again whenever it ends."""

import secrets
import socket
import threading
from contextlib import suppress
from typing import Any

from aurora.runtime.distributed.connections import CONNECT_S, HELLO_S, watched
from aurora.runtime.distributed.lighthouse import HEARTBEAT_S
from aurora.runtime.distributed.signed_messages import LINE_BYTES, Alive, Goodbye, Hello, Refused, SignedMessages

RETRY_S = 0.05  # between two attempts to reach the lighthouse


class LighthouseConnection:
    """This process's connection to a lighthouse, as `name`.

    Two threads serve it, from `_start` on: one receives what the lighthouse says and connects again when the connection ends,
    one sends signs of life.

    Args:
        lighthouse: its host and port.
        name: tells this end from all others.
        secret: what all of them and the lighthouse share.
    """

    def __init__(self, lighthouse: tuple[str, int], name: str, secret: bytes) -> None:
        self._lighthouse, self._name, self._secret = lighthouse, name, secret
        self._process = secrets.token_hex(8)
        self._closed = threading.Event()
        self._changed = threading.Condition()
        self._connection: socket.socket | None = None
        self._messages: SignedMessages | None = None
        self._host, self._reason = "", "it does not answer"
        self._unheard = 0  # connections in sequence that ended before the lighthouse said anything but hello
        self._started = False

    @property
    def name(self) -> str:
        """The name that tells this end from all others."""
        return self._name

    def close(self) -> None:
        """Says goodbye to the lighthouse and ends the connection."""
        self._closed.set()
        with self._changed, suppress(OSError):
            self._send(Goodbye())
            if self._connection is not None:
                self._connection.shutdown(socket.SHUT_RDWR)

    def _start(self) -> None:
        """Starts the threads, once."""
        if not self._started:
            self._started = True
            for target in (self._receive, self._beat):
                threading.Thread(target=target, daemon=True, name=f"aurora-member{target.__name__}").start()

    def _on_connect(self) -> None:
        """Sends what a new connection begins with; `_changed` is held."""
        raise NotImplementedError

    def _handle(self, message: Any) -> None:
        """Handles what the lighthouse says; `_changed` is held. Raises Refused to end the connection."""
        raise NotImplementedError

    def _receive(self) -> None:
        """Receives what the lighthouse says, connecting again and again."""
        while not self._closed.is_set():
            try:
                with socket.create_connection(self._lighthouse, CONNECT_S) as connection, watched(connection):
                    self._talk(connection)
                self._reason = "it ended the connection; is the secret the same?"
            except (OSError, Refused) as error:
                self._reason = str(error)
            with self._changed:
                self._connection = None
                self._changed.notify_all()
            self._closed.wait(RETRY_S)

    def _talk(self, connection: socket.socket) -> None:
        """Serves one connection until it ends."""
        hello = Hello(self._name, self._process)
        connection.settimeout(HELLO_S)
        connection.sendall(hello.line())
        with connection.makefile("rb") as lines:
            messages = SignedMessages(self._secret, hello, Hello.parse(lines.readline(LINE_BYTES)), at_member=True)
            connection.settimeout(None)
            with self._changed:
                if self._closed.is_set():
                    return
                self._connection, self._messages, self._host = connection, messages, connection.getsockname()[0]
                self._unheard += 1
                self._on_connect()
            while line := lines.readline(LINE_BYTES):
                with self._changed:
                    message, self._unheard = messages.unpack(line), 0
                    self._handle(message)
                    self._changed.notify_all()

    def _beat(self) -> None:
        """Sends signs of life."""
        while not self._closed.wait(HEARTBEAT_S):
            with self._changed:
                self._send(Alive())

    def _send(self, message: Any) -> None:
        """Sends a message, if there is a connection; `_changed` is held. If not, `_on_connect` has to make up for it."""
        if self._connection is not None and self._messages is not None:
            with suppress(OSError):
                self._connection.sendall(self._messages.pack(message))
