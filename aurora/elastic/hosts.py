"""Ranks of a run over several hosts: `LedRanks` controls them at the leader, `JoiningHost` runs some on a joining host.

A host joins over one connection of mutual TLS. When the connection ends, all ranks of the host are lost. It ends at once if the
host's process dies, and after about half a second without acknowledgements if the host itself is gone.
"""

import itertools
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from typing import Any

from aurora.elastic.host_connection import (
    Alive,
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
    Refused,
    StartRank,
    ToRank,
    WireFormat,
    fails_soon,
)
from aurora.elastic.lighthouse import Lighthouse
from aurora.elastic.processes import Outbox, RankLoss, RankProcesses, StartedRank
from aurora.errors import BadInput, RankFailed
from aurora.runtime.distributed.connections import listen
from aurora.types.options import MOST_PORT
from aurora.types.run_options import address_text

ALIVE_S = 0.1  # between two signs of life on a connection, by which its kernel notices that the other host is gone
MOST_UNPROVED = 64  # connections that have not shown the certificate yet; more are ended at once
FAREWELL_S = 1.0  # for what was sent last to be read


def lighthouse_of(leader: tuple[str, int]) -> tuple[str, int]:
    """Returns the lighthouse's address for a run whose leader listens at `leader`: same host, port + 1.

    Raises:
        BadInput: if port + 1 is not a valid port.
    """
    host, port = leader
    if port == MOST_PORT:
        raise BadInput(f"expected a leader's port with one after it for the lighthouse, at most {MOST_PORT - 1}, found {port}")
    return host, port + 1


@dataclass(frozen=True)
class Lead:
    """Settings of the leader of a run over several hosts: its address, its ranks, and which hosts may join.

    Args:
        address: the only host and port on which it listens; process groups of its ranks listen on the same host.
        certificate: the certificate that all hosts share; hosts with another one are rejected.
        local: the ranks that the leader's host runs.
        wire: serializes messages to and from ranks.
        refusal: called with a host's JoinRun; returns a sentence on why the host cannot join, or None if it can.
        job: returns the `HostAdmitted.job` for a host that joins now.
        awaited: ranks of other hosts for which the run waits at its start, each with the name of its host.
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

    def send(self, message: object) -> None:
        self.host.send(ToRank(self.rank, message))

    def kill(self) -> None:
        if self.host.members.pop(self.rank, None) is not None:  # else it has ended
            self.host.send(KillRank(self.rank))


class LedRanks(RankProcesses):
    """RankProcesses that also controls the ranks of joined hosts; used by the leader.

    Args:
        main, args, ranks: as in RankProcesses.
        lead: the ranks of this host, and which hosts may join.
        timeout_s: as in RankProcesses; also the time after which ranks of hosts that have not joined count as lost. These hosts
            may still join later.

    Attributes:
        address: host and port on which the leader listens.

    Raises:
        BadInput: if the address cannot be used.
    """

    def __init__(self, main: Callable[..., None], args: tuple[Any, ...], ranks: int, lead: Lead, timeout_s: float) -> None:
        self._listener = listen(*lead.address)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        super().__init__(main, args, ranks, lighthouse_of(self.address), timeout_s, lead.local)
        self._lead = lead
        self._late_s = time.monotonic() + timeout_s
        self._lock = threading.RLock()
        self._hosts: dict[str, _Host] = {}  # by name
        self._awaited: set[int] = set()  # ranks of hosts that have not joined yet
        self._asked: set[int] = set()  # ranks whose start was asked for
        self._closed = threading.Event()
        self._unproved = threading.Semaphore(MOST_UNPROVED)
        for target in (self._accept, self._beat):
            threading.Thread(target=target, daemon=True, name=f"aurora-hosts{target.__name__}").start()

    @property
    def joined(self) -> list[JoinRun]:
        """The JoinRun requests of the hosts that have joined."""
        with self._lock:
            return [host.about for host in self._hosts.values()]

    def host_of(self, rank: int) -> JoinRun | None:
        """Returns the JoinRun of a rank's host; None: the rank belongs to this host, or its host is gone."""
        return next((host for host in self.joined if rank in host.ranks), None)

    def start(self, rank: int) -> None:
        """Starts a rank's process on its host, as soon as that host has joined."""
        if rank in self._lead.local:
            super().start(rank)
            return
        with self._lock:
            host = next((candidate for candidate in self._hosts.values() if rank in candidate.about.ranks), None)
            if host is not None:
                self._start(host, rank)
            elif rank in self._lead.awaited and (rank not in self._asked or time.monotonic() < self._late_s):
                self._awaited.add(rank)
                self.starting.append(rank)
            self._asked.add(rank)

    def close(self, complete: bool = True) -> None:
        """Ends the run on all hosts, kills this host's processes, and waits until they have ended.

        Args:
            complete: True if all work is done; sent to the other hosts.
        """
        self._closed.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            hosts = list(self._hosts.values())
        for host in hosts:
            host.send(EndRun(complete))
        super().close()
        until_s = time.monotonic() + FAREWELL_S
        while time.monotonic() < until_s and any(host.lost is None for host in hosts):  # they end their connections
            time.sleep(0.01)
        for host in hosts:
            host.connection.end()

    def _start(self, host: _Host, rank: int) -> None:
        if rank not in host.starting and rank not in host.members:  # a host starts its ranks when it joins
            host.starting.add(rank)
            self.starting.append(rank)
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
            threading.Thread(target=self._hear_host, args=(connection,), daemon=True, name=f"aurora-host-{number}").start()

    def _beat(self) -> None:
        """Sends signs of life, by which a host that is gone is noticed: its kernel has something to acknowledge.

        Also gives up ranks whose hosts have not joined in time.
        """
        while not self._closed.wait(ALIVE_S):
            with self._lock:
                for host in self._hosts.values():
                    host.send(Alive())
                while self._awaited and time.monotonic() > self._late_s:
                    rank = min(self._awaited)
                    self._awaited.remove(rank)
                    late = f"did not start: {self._lead.awaited[rank]} did not join within {self._timeout_s:g} s"
                    self.inbox.put((rank, None, RankLoss(late)))

    def _hear_host(self, connection: socket.socket) -> None:
        """Serves one connection until it ends."""
        host: _Host | None = None
        reason = "its connection ended"
        try:
            try:
                talk = HostConnection(fails_soon(connection), self._lead.certificate, True, self._lead.wire)
            finally:
                self._unproved.release()
            with closing(talk):
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
            used_ranks = {rank for host in self._hosts.values() for rank in host.about.ranks} | set(lead.local)
            refused = None
            if before is not None:
                refused = f"{name}: another process has joined as it"
            elif (why := lead.refusal(message)) is not None:
                refused = f"{name}: {why}"
            elif used_ranks & set(message.ranks):
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
                if rank in self._awaited:
                    self._awaited.remove(rank)
                    self.starting.remove(rank)
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
                    host.members[rank] = started = _JoinedRank(rank, pid, host)
                    self.inbox.put((rank, started, started))
                case RankNotStarted(rank, reason) if rank in host.starting:
                    self._end(host, rank, reason)
                case RankEnded(rank, reason) if rank in host.members:
                    self._end(host, rank, reason)
                case FromRank(rank, said) if (member := host.members.get(rank)) is not None:
                    self.inbox.put((rank, member, said))
                case FromRank() | RankEnded():
                    pass  # of a rank that was killed
                case _:
                    raise Refused(type(message).__name__)

    def _end(self, host: _Host, rank: int, reason: str) -> None:
        member = host.members.pop(rank, None)
        if member is not None or rank in host.starting:  # else it was killed meanwhile
            host.starting.discard(rank)
            self.inbox.put((rank, member, RankLoss(reason)))

    def _lose(self, host: _Host, reason: str) -> None:
        """Gives up a host, and with it all its ranks."""
        with self._lock:
            if host.lost is not None:
                return
            host.lost = reason = f"{host.about.name} is lost: {reason}"
            if self._hosts.get(host.about.name) is host:
                del self._hosts[host.about.name]
            for rank in [*host.starting, *host.members]:
                self._end(host, rank, reason)
        host.outbox.stop()
        host.connection.end()


def ranks_at_lighthouse(
    stack: ExitStack,
    main: Callable[..., None],
    args: tuple[Any, ...],
    ranks: int,
    timeout_s: float,
    lead: Lead | None,
    port: int = 0,
) -> RankProcesses:
    """Returns the processes of a run's ranks, with no process started, and starts their lighthouse, which `stack` closes.

    Args:
        stack: closes the lighthouse; the processes have to be closed before.
        main, args, ranks, timeout_s: as in RankProcesses.
        lead: as in LedRanks; None: all ranks run on this host.
        port: without `lead`, port of the lighthouse; 0: a free one.

    Raises:
        BadInput: if an address cannot be used.
    """
    if lead is None:
        return RankProcesses(main, args, ranks, stack.enter_context(Lighthouse(port=port)).address, timeout_s)
    stack.enter_context(Lighthouse(*lighthouse_of(lead.address)))
    return LedRanks(main, args, ranks, lead, timeout_s)


LOG = logging.getLogger(__name__)
CONNECT_S = 2.0  # for one attempt: the kernel's own next one may be a minute away when a link comes back
RETRY_S = 0.2  # between two attempts to reach the leader


class JoiningHost:
    """Runs some ranks of a run that is led by another host.

    Args:
        leader: the host and port on which the leader listens.
        certificate: the certificate that all hosts share.
        request: names this host, and offers its ranks.
        wire: serializes messages to and from ranks.
        processes: called with the leader's job; returns this host's RankProcesses, with no process started.
        timeout_s: seconds without a leader after which this host ends.
        keeps_ranks: True: ranks continue while there is no leader; False: they are killed.

    Attributes:
        admitted: number of times that a leader has admitted this host.
    """

    def __init__(
        self,
        leader: tuple[str, int],
        certificate: Certificate,
        request: JoinRun,
        wire: WireFormat,
        processes: Callable[[Any], RankProcesses],
        *,
        timeout_s: float,
        keeps_ranks: bool = False,
    ) -> None:
        self._leader, self._certificate, self._wire, self._timeout_s = leader, certificate, wire, timeout_s
        self._request, self._make, self._keeps_ranks = request, processes, keeps_ranks
        self._processes: RankProcesses | None = None
        self._end: EndRun | Refused | OSError | None = None  # how the connection ended
        self._spoken_s = 0.0
        self.admitted = 0

    def run(self) -> None:
        """Joins the run, and returns when the leader ends it as complete; all ranks of this host have then ended.

        Raises:
            BadInput: if the leader rejects this host.
            RankFailed: if the leader ends the run before it is complete, or cannot be reached for timeout_s.
        """
        name = address_text(self._leader)
        alone_s = time.monotonic()
        try:
            while True:
                admitted = self.admitted
                try:
                    if not self._take_part().complete:
                        raise RankFailed(f"the leader, {name}, ended the run before it was complete")
                    return
                except Refused as error:
                    raise BadInput(f"`join` {name}: {error}") from None
                except OSError as error:
                    reason = str(error)
                if self.admitted > admitted:
                    alone_s = time.monotonic()
                    LOG.warning("lost the leader, %s (%s); trying to join again", name, reason)
                if time.monotonic() - alone_s > self._timeout_s:
                    raise RankFailed(f"no leader at {name} for {self._timeout_s:g} s: {reason}")
                time.sleep(RETRY_S)
        finally:
            self._close_processes()

    def heard(self, rank: int, message: Any) -> None:
        """Hook, called with each message of a rank that is sent to the leader; does nothing here."""

    def ended(self, rank: int, reason: str) -> None:
        """Hook, called when a rank did not start, or its process has ended by itself; does nothing here."""

    def unheard(self) -> Iterable[tuple[int, Any]]:
        """Hook: returns (rank, message) pairs to send again to a new leader, which an earlier leader may have received."""
        return ()

    @property
    def pids(self) -> dict[int, int]:
        """{rank: process id} of this host's running ranks."""
        return {} if self._processes is None else {rank: process.pid for rank, process in self._processes.running.items()}

    def _take_part(self) -> EndRun:
        """Joins and serves until the connection ends. Returns the leader's last message.

        Raises:
            Refused: if the leader refuses this host or sends what it should not.
            OSError: if the connection cannot be made, or ends.
        """
        leader = fails_soon(socket.create_connection(self._leader, CONNECT_S))
        with closing(HostConnection(leader, self._certificate, False, self._wire)) as connection:
            connection.send(self._request)
            answer = connection.receive()
            if isinstance(answer, HostRefused):
                raise Refused(answer.reason)
            if not isinstance(answer, HostAdmitted):
                raise Refused("it did not say what to do")
            processes = self._make(answer.job)
            self._processes = self._processes or processes
            self.admitted += 1
            LOG.info("%s joined; it runs %d ranks", self._request.name, len(self._request.ranks))
            self._end = None
            for rank, pid in self.pids.items():  # they have gone on without a leader
                connection.send(RankStarted(rank, pid))
            for rank, message in self.unheard():
                connection.send(FromRank(rank, message))
            return self._serve(connection, self._processes)

    def _serve(self, connection: HostConnection, processes: RankProcesses) -> EndRun:
        """Serves until the leader ends the run: one thread hears the leader, this one the ranks."""
        hearing = threading.Thread(
            target=self._hear_leader, args=(connection, processes), daemon=True, name="aurora-from-leader"
        )
        hearing.start()
        try:
            while self._end is None:
                self._hear_ranks(connection, processes)
        except OSError as error:
            self._end = self._end or error
        finally:
            connection.end()
            hearing.join()
            if not self._keeps_ranks:
                self._close_processes()
        if isinstance(self._end, EndRun):
            return self._end
        assert self._end is not None
        raise self._end

    def _close_processes(self) -> None:
        if self._processes is not None:
            self._processes.close()
            self._processes = None

    def _hear_ranks(self, connection: HostConnection, processes: RankProcesses) -> None:
        """Tells the leader which ranks have started or ended, and what they send."""
        for rank, event in processes.events(ALIVE_S):
            if isinstance(event, StartedRank):
                connection.send(RankStarted(rank, event.pid))
            elif isinstance(event, RankLoss):
                kind = RankEnded if rank in processes.running else RankNotStarted
                processes.kill(rank)  # before the leader is told, which may start the rank again at once
                self.ended(rank, event.reason)
                connection.send(kind(rank, event.reason))
            else:
                self.heard(rank, event)
                connection.send(FromRank(rank, event))
        if time.monotonic() - self._spoken_s > ALIVE_S:  # so that the kernel notices when the leader's host is gone
            self._spoken_s = time.monotonic()
            connection.send(Alive())

    def _hear_leader(self, connection: HostConnection, processes: RankProcesses) -> None:
        """Handles the leader's messages, until it ends the run or the connection."""
        try:
            while self._end is None:
                self._handle(connection.receive(), processes)
        except (OSError, Refused) as error:
            self._end = self._end or error

    def _handle(self, message: Any, processes: RankProcesses) -> None:
        match message:
            case ToRank(rank, content):
                if (member := processes.running.get(rank)) is not None:
                    member.send(content)
            case StartRank(rank) if rank in self._request.ranks:
                if rank not in processes.running and rank not in processes.starting:
                    processes.start(rank)
            case KillRank(rank):
                processes.kill(rank)
            case EndRun():
                self._end = message
            case Alive():
                pass
            case _:
                raise Refused(f"it sent {type(message).__name__}")
