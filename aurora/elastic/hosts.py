"""Ranks of a run over several hosts, as its leader sees them: those of this host, and those of hosts that join.

A host joins over one connection of mutual TLS. Its ranks are lost, all at once, when that ends: at once if the process there
dies; after about half a second if the host is gone, because its kernel acknowledges nothing any more.
"""

import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

from aurora.elastic.host_connection import (
    Certificate,
    EndRun,
    FromRank,
    HostAdmitted,
    HostConnection,
    HostRefused,
    JoinRun,
    KillRank,
    RankEnded,
    RankNotStarted,
    RankStarted,
    StartRank,
    ToRank,
    secured,
)
from aurora.elastic.messages import Alive, Refused, WireFormat
from aurora.elastic.processes import Outbox, RankProcess, RankProcesses, StartedRank
from aurora.errors import BadInput
from aurora.runtime.distributed.connections import listen
from aurora.types.options import MOST_PORT

ALIVE_S = 0.1  # between two signs of life on a connection, by which its kernel notices that the other host is gone
MOST_UNPROVED = 64  # connections that have not shown the certificate yet; more are ended at once
FAREWELL_S = 1.0  # for what was sent last to be read


def lighthouse_of(leader: tuple[str, int]) -> tuple[str, int]:
    """Returns the address of the lighthouse of a run that is led at an address: the port after it.

    Raises:
        BadInput: if there is no such port.
    """
    host, port = leader
    if port == MOST_PORT:
        raise BadInput(f"expected a leader's port with one after it for the lighthouse, at most {MOST_PORT - 1}, found {port}")
    return host, port + 1


@dataclass(frozen=True)
class Lead:
    """Leader of a run over several hosts: its address, its ranks, and who may join.

    Args:
        address: host and port on which it listens, and nowhere else; its own ranks' process groups listen on this host, too.
        certificate: what all hosts share; who has another one is not heard.
        local: the ranks of this host.
        wire: packs messages to and from ranks.
        refusal: returns, in a sentence, why a host that says this of itself cannot join; None: it can.
        job: returns what a host that joins now is told, for its ranks.
        awaited: for ranks of other hosts that are part of the run from its beginning, the names of their hosts.
    """

    address: tuple[str, int]
    certificate: Certificate
    local: tuple[int, ...]
    wire: WireFormat
    refusal: Callable[[JoinRun], str | None]
    job: Callable[[], Any]
    awaited: Mapping[int, str] = field(default_factory=dict)


@dataclass(eq=False)
class _Host:
    """A host that has joined."""

    about: JoinRun  # what it has said of itself
    connection: HostConnection
    outbox: Outbox
    starting: set[int] = field(default_factory=set)  # ranks that it was asked to start
    members: dict[int, "_JoinedRank"] = field(default_factory=dict)  # its running ranks
    lost: str | None = None  # why it is gone

    def send(self, message: object) -> None:
        """Sends a message without waiting for the host to read it. If the host is lost, it is dropped."""
        self.outbox.send(self.connection.pack(message))


@dataclass(eq=False)
class _JoinedRank(StartedRank):
    """A rank of another host."""

    host: _Host
    its_pid: int
    reason: str | None = field(default=None, init=False)  # why it has ended
    early: list[Any] | None = field(default_factory=list, init=False)  # messages before it is adopted; None: it is

    @property
    def pid(self) -> int:
        return self.its_pid

    def send(self, message: object) -> None:
        self.host.send(ToRank(self.rank, message))

    def exit_reason(self) -> str:
        return self.reason or "its process ended"

    def kill(self) -> None:
        if self.reason is None:
            self.host.send(KillRank(self.rank))

    def join(self) -> None:
        """The host itself does."""


class LedRanks:
    """The ranks of this host and of those that join; methods as of RankProcesses.

    Args:
        main, args: what each rank's process on this host runs.
        ranks: as of RankProcesses.
        lead: which ranks are this host's, and who may join.
        timeout_s: as of RankProcesses; ranks of hosts that have not joined after so many seconds count as lost, and may still
            join.

    Attributes:
        address: host and port on which it listens.

    Raises:
        BadInput: if the address cannot be used.
    """

    def __init__(self, main: Callable[..., None], args: tuple[Any, ...], ranks: int, lead: Lead, timeout_s: float) -> None:
        self._listener = listen(*lead.address)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._lead, self._timeout_s = lead, timeout_s
        self._local = RankProcesses(main, args, ranks, lighthouse_of(self.address), timeout_s, lead.local)
        self._late_s = time.monotonic() + timeout_s
        self._lock = threading.RLock()
        self._hosts: dict[str, _Host] = {}  # by name
        self._awaited: set[int] = set()  # ranks of hosts that have not joined yet
        self._asked: set[int] = set()  # ranks whose start was asked for
        self._started: SimpleQueue[tuple[int, _JoinedRank | OSError]] = SimpleQueue()
        self._closed = threading.Event()
        self._unproved = threading.Semaphore(MOST_UNPROVED)
        for target in (self._accept, self._beat):
            threading.Thread(target=target, daemon=True, name=f"aurora-hosts{target.__name__}").start()

    @property
    def starting(self) -> int:
        """Number of ranks that are expected to start, or that `adopt_started` has not yet returned."""
        with self._lock:
            asked = sum(len(host.starting) for host in self._hosts.values())
            return self._local.starting + len(self._awaited) + asked + self._started.qsize()

    @property
    def joined(self) -> list[JoinRun]:
        """Requests of the hosts that have joined."""
        with self._lock:
            return [host.about for host in self._hosts.values()]

    def host_of(self, rank: int) -> JoinRun | None:
        """Returns what the host of a rank says of itself; None: the rank is this host's, or that host is gone."""
        return next((host for host in self.joined if rank in host.ranks), None)

    def start(self, rank: int) -> None:
        """Starts a rank's process on its host, when that has joined."""
        if rank in self._lead.local:
            self._local.start(rank)
            return
        with self._lock:
            host = next((each for each in self._hosts.values() if rank in each.about.ranks), None)
            if host is not None:
                self._start(host, rank)
            elif rank in self._lead.awaited and (rank not in self._asked or time.monotonic() < self._late_s):
                self._awaited.add(rank)
            self._asked.add(rank)

    def adopt_started(self) -> Iterator[tuple[int, RankProcess | _JoinedRank | OSError]]:
        """Yields (rank, its process, or the error of its start) of ranks started, or given up, since the last call."""
        yield from self._local.adopt_started()
        if self._awaited and time.monotonic() > self._late_s:
            with self._lock:
                late, self._awaited = self._awaited, set()
            for rank in sorted(late):
                yield rank, OSError(f"{self._lead.awaited[rank]} did not join within {self._timeout_s:g} s")
        for _ in range(self._started.qsize()):
            rank, found = self._started.get()
            if isinstance(found, OSError):
                yield rank, found
            elif not self._local.adopt(found):  # a message on the end of the one before is on its way
                self._started.put((rank, found))
            else:
                yield rank, found
                with self._lock:
                    early, found.early = found.early or [], None
                    for message in early:
                        self._local.inbox.put((found, message))

    def messages(self, timeout_s: float) -> Iterator[tuple[int, Any]]:
        """Yields (rank, message); see RankProcesses."""
        yield from self._local.messages(timeout_s)

    def kill(self, rank: int) -> None:
        """Kills a rank's process, wherever it runs. Its further messages are dropped."""
        self._local.kill(rank)

    def close(self, complete: bool = True) -> None:
        """Ends the run on all hosts, and kills this host's processes; none is left on return.

        Args:
            complete: whether all work is done, which other hosts are told.
        """
        self._closed.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            hosts = list(self._hosts.values())
        for host in hosts:
            host.send(EndRun(complete))
        self._local.close()
        until_s = time.monotonic() + FAREWELL_S
        while time.monotonic() < until_s and any(host.lost is None for host in hosts):  # they end their connections
            time.sleep(0.01)
        for host in hosts:
            host.connection.close()

    def _start(self, host: _Host, rank: int) -> None:
        if rank not in host.starting:
            host.starting.add(rank)
            host.send(StartRank(rank))

    def _accept(self) -> None:
        """Serves every connection in a thread of its own."""
        for number in itertools.count():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._closed.wait(ALIVE_S):  # else too many files are open
                    return
                continue
            if not self._unproved.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._talk, args=(connection,), daemon=True, name=f"aurora-host-{number}").start()

    def _beat(self) -> None:
        """Sends signs of life, by which a host that is gone is noticed: its kernel has something to acknowledge."""
        while not self._closed.wait(ALIVE_S):
            with self._lock:
                for host in self._hosts.values():
                    host.send(Alive())

    def _talk(self, connection: socket.socket) -> None:
        """Serves one connection until it ends."""
        host: _Host | None = None
        reason = "its connection ended"
        try:
            with secured(connection, self._lead.certificate, True, self._lead.wire, self._unproved.release) as talk:
                message = talk.receive()
                if not isinstance(message, JoinRun):
                    raise Refused("it did not ask to join")
                if (host := self._admit(talk, message)) is not None:
                    while True:
                        self._handle(host, talk.receive())
        except Refused as error:
            reason = f"it sent what it should not: {error}"
        except OSError as error:
            reason = f"its connection ended: {error}"
        if host is not None:
            self._lose(host, reason)

    def _admit(self, connection: HostConnection, message: JoinRun) -> _Host | None:
        """Adds a host, and starts its ranks. Returns None, and says why, if it cannot join."""
        lead, name = self._lead, message.name
        with self._lock:
            before = self._hosts.get(name)
            if before is not None and before.about.process == message.process:  # it has noticed sooner that it was cut off
                self._lose(before, "it has joined again")
                before = None
            taken = {rank for host in self._hosts.values() for rank in host.about.ranks} | set(lead.local)
            refused = None
            if before is not None:
                refused = f"{name}: another process has joined as it"
            elif (why := lead.refusal(message)) is not None:
                refused = f"{name}: {why}"
            elif taken & set(message.ranks):
                refused = f"{name}: expected ranks that no other host has, found {', '.join(map(str, message.ranks))}"
            if refused is not None or self._closed.is_set():
                connection.send(HostRefused(refused or "the run is over"))
                return None
            host = _Host(message, connection, Outbox())
            host.send(HostAdmitted(lead.job()))
            writer = threading.Thread(
                target=host.outbox.write, args=(connection.send_packed,), daemon=True, name=f"aurora-to-{name}"
            )
            writer.start()
            self._hosts[name] = host
            for rank in message.ranks:
                self._awaited.discard(rank)
                self._start(host, rank)
            return host

    def _handle(self, host: _Host, message: Any) -> None:
        """Handles what a host says. Raises Refused."""
        with self._lock:
            match message:
                case _ if host.lost is not None:
                    raise Refused("it has joined again")
                case Alive():
                    pass
                case RankStarted(rank, pid) if rank in host.starting:
                    host.starting.remove(rank)
                    host.members[rank] = member = _JoinedRank(rank, host, pid)
                    self._started.put((rank, member))
                case RankNotStarted(rank, reason) if rank in host.starting:
                    host.starting.remove(rank)
                    self._started.put((rank, OSError(reason)))
                case RankEnded(rank, reason) if rank in host.members:
                    self._end(host.members.pop(rank), reason)
                case FromRank(rank, said) if rank in host.members:
                    self._deliver(host.members[rank], said)
                case FromRank() | RankEnded():
                    pass  # of a rank that was killed
                case _:
                    raise Refused(type(message).__name__)

    def _deliver(self, member: _JoinedRank, message: Any) -> None:
        if member.early is None:
            self._local.inbox.put((member, message))
        else:
            member.early.append(message)

    def _end(self, member: _JoinedRank, reason: str) -> None:
        member.reason = reason
        self._deliver(member, None)

    def _lose(self, host: _Host, reason: str) -> None:
        """Gives up a host, and with it all its ranks."""
        with self._lock:
            if host.lost is not None:
                return
            host.lost = reason = f"{host.about.name} is lost: {reason}"
            if self._hosts.get(host.about.name) is host:
                del self._hosts[host.about.name]
            for rank in sorted(host.starting):
                self._started.put((rank, OSError(reason)))
            host.starting.clear()
            for member in host.members.values():
                self._end(member, reason)
            host.members.clear()
        host.outbox.stop()
        host.connection.close()
