"""Lighthouse: where the members and hosts of an elastic run meet, and which notices when one is lost.

A member is lost when its connection ends: at once if its process dies; after about half a second if its host is gone, because
the kernel of a living host acknowledges what it receives, however busy its processes are. Who only waits for a core is not
lost. Who says nothing for `hang_s` seconds is. The lighthouse takes no part in steps: when it is restarted, members find it
again and have lost nothing.

torchft's lighthouse (0.2.0) does less for this: it takes silence for death, so it is late or kills who waits for a core; it
believes every heartbeat that reaches its port; and restarted it forms a quorum of the first who come.
"""

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from aurora.runtime.distributed.connections import HELLO_S, listen, watched
from aurora.runtime.distributed.quorum import JoinEpoch, Quorum
from aurora.runtime.distributed.rank_processes import OwnTime
from aurora.runtime.distributed.signed_messages import (
    LINE_BYTES,
    Alive,
    Goodbye,
    Hello,
    HostMessage,
    NameTaken,
    Refused,
    SignedMessages,
    StoreValue,
)

HEARTBEAT_S = 0.1
ABSENT_S = 10.0
HANG_S = 20.0


@dataclass(eq=False)
class _Connection:
    """A member's connection."""

    name: str
    process: str
    writer: asyncio.StreamWriter
    messages: SignedMessages
    heard_s: float

    def send(self, message: Any) -> None:
        self.writer.write(self.messages.pack(message))


class Lighthouse:
    """Serves the members of one run from a thread of its own, until `close`.

    Args:
        secret: what it shares with all members; who does not know it is not heard.
        members: how many members the first epoch waits for.
        min_members: no epoch has fewer members.
        host, port: the only address on which it listens; port 0: any free one.
        hang_s: a member that says nothing for so long is lost, and so is one that does not leave an epoch that is over.
        absent_s: see Quorum.
        on_lost: called with the name of each lost member or host and how it was lost, in the lighthouse's thread.
        on_host: called with a host's name and each message of its HostLink, in the lighthouse's thread.

    Attributes:
        address: the host and port on which it listens.

    Raises:
        BadInput: if the address cannot be used.
    """

    def __init__(
        self,
        secret: bytes,
        members: int,
        min_members: int = 1,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        hang_s: float = HANG_S,
        absent_s: float = ABSENT_S,
        on_lost: Callable[[str, str], None] = lambda name, reason: None,
        on_host: Callable[[str, dict[str, Any]], None] = lambda name, data: None,
    ) -> None:
        self._listener = listen(host, port)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._secret, self._hang_s, self._on_lost, self._on_host = secret, hang_s, on_lost, on_host
        self._quorum = Quorum(members, min_members, absent_s, later_number)
        self._connections: dict[str, _Connection] = {}
        self._clock = OwnTime()
        self._loop = asyncio.new_event_loop()
        self._closed = asyncio.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="aurora-lighthouse")
        self._thread.start()

    @property
    def waiting(self) -> int:
        """How many members wait for an epoch."""
        return self._quorum.waiting

    def send_to_host(self, name: str, data: dict[str, Any]) -> None:
        """Sends a message to a host's HostLink, if it is connected. May be called in any thread."""

        def send() -> None:
            if (connection := self._connections.get(name)) is not None:
                connection.send(HostMessage(data))

        self._loop.call_soon_threadsafe(send)

    def close(self) -> None:
        """Ends all connections and stops listening."""
        self._loop.call_soon_threadsafe(self._closed.set)
        self._thread.join()

    def __enter__(self) -> "Lighthouse":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        """Listens, and looks every HEARTBEAT_S after what no message brings about."""
        server = await asyncio.start_server(self._accept, sock=self._listener, limit=LINE_BYTES)
        while not self._closed.is_set():
            self._clock.check(HEARTBEAT_S)
            now_s = self._clock()
            silent = [each.name for each in self._connections.values() if now_s - each.heard_s > self._hang_s]
            for name in silent:
                self._lose(name, f"said nothing for {self._hang_s:g} s")
            for name in self._quorum.overdue(now_s, self._hang_s):
                self._lose(name, f"did not leave the epoch within {self._hang_s:g} s")
            for each in self._connections.values():
                each.send(Alive())
            self._tell()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._closed.wait(), HEARTBEAT_S)
        server.close()
        served, self._connections = self._connections, {}  # whose members are not lost
        for each in served.values():
            each.writer.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves a new connection."""
        with watched(writer.get_extra_info("socket")), suppress(asyncio.CancelledError):  # which Python 3.11 prints at the end
            await self._talk(reader, writer)

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves one connection until it ends."""
        connection: _Connection | None = None
        reason = "its connection ended"
        try:
            async with asyncio.timeout(HELLO_S):
                member, ours = Hello.parse(await reader.readline()), Hello()
                writer.write(ours.line())
                messages = SignedMessages(self._secret, member, ours, at_member=False)
                message = messages.unpack(await reader.readline())
            connection = self._admit(_Connection(member.name, member.process, writer, messages, self._clock()))
            while connection is not None:
                self._handle(connection, message)
                if not (line := await reader.readline()) or self._connections.get(member.name) is not connection:
                    break
                message = messages.unpack(line)
        except Refused as error:
            reason = f"sent what it should not: {error}"
        except (OSError, ValueError) as error:  # a time-out, a reset, a line without end
            reason = f"its connection ended: {error}"
        finally:
            if connection is not None and self._connections.get(connection.name) is connection:
                self._lose(connection.name, reason)
            writer.close()

    def _admit(self, connection: _Connection) -> _Connection | None:
        """Adds a connection that has proved the secret. Returns None if another process has its name."""
        before = self._connections.get(connection.name)
        if before is not None and before.process != connection.process:
            connection.send(NameTaken())
            return None
        if before is not None:  # the same process again
            before.writer.transport.abort()
        self._connections[connection.name] = connection
        return connection

    def _handle(self, connection: _Connection, message: Any) -> None:
        """Handles one message of a member."""
        connection.heard_s = self._clock()
        if isinstance(message, JoinEpoch):
            self._quorum.join(connection.name, message, self._clock())
            self._tell()
        elif isinstance(message, Goodbye):
            self._remove(connection.name)
        elif isinstance(message, HostMessage) and isinstance(message.data, dict):
            self._on_host(connection.name, message.data)
        elif isinstance(message, StoreValue):
            for name in self._quorum.serving(message.epoch):
                if name != connection.name:
                    self._connections[name].send(message)

    def _lose(self, name: str, reason: str) -> None:
        """Ends a member's connection and tells the others."""
        self._remove(name)
        self._on_lost(name, reason)

    def _remove(self, name: str) -> None:
        self._connections.pop(name).writer.transport.abort()
        self._quorum.lose(name)
        self._tell()

    def _tell(self) -> None:
        """Sends what is due."""
        for name, message in self._quorum.due(self._clock()):
            self._connections[name].send(message)


def later_number(epoch: int) -> int:
    """Returns an epoch's number after `epoch`: milliseconds since 1970, as a restarted lighthouse knows no number before."""
    return max(epoch + 1, time.time_ns() // 1_000_000)
