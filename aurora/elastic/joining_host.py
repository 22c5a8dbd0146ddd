"""Host that joins a run: starts ranks of its own, and carries messages between them and the leader.

It decides nothing. When it has lost the leader, it tries to join again.
"""

import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable
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
from aurora.elastic.hosts import ALIVE_S
from aurora.elastic.messages import Alive, Refused, WireFormat
from aurora.elastic.processes import RankProcesses
from aurora.errors import BadInput, RankFailed
from aurora.runtime.distributed.connections import CONNECT_S
from aurora.types.run_options import address_text

LOG = logging.getLogger(__name__)
RETRY_S = 0.2  # between two attempts to reach the leader


class JoiningHost:
    """Runs ranks of a run that another host leads.

    Args:
        leader: the host and port on which the leader listens.
        certificate: what all hosts share.
        name, ranks, respawn, about: as of JoinRun.
        wire: packs messages to and from ranks.
        processes: returns the processes of the ranks, none of them started, for the job that the leader tells.
        timeout_s: seconds without a leader after which this host gives up.
        keeps_ranks: whether ranks go on while there is no leader; if not, they are killed.

    Attributes:
        admitted: how many times the leader has admitted it.
    """

    def __init__(
        self,
        leader: tuple[str, int],
        certificate: Certificate,
        name: str,
        ranks: tuple[int, ...],
        about: dict[str, str],
        wire: WireFormat,
        processes: Callable[[Any], RankProcesses],
        *,
        timeout_s: float,
        respawn: int = 0,
        keeps_ranks: bool = False,
    ) -> None:
        self._leader, self._certificate, self._wire, self._timeout_s = leader, certificate, wire, timeout_s
        self._request = JoinRun(name, secrets.token_hex(8), ranks, respawn, about)
        self._make, self._keeps_ranks = processes, keeps_ranks
        self._processes: RankProcesses | None = None
        self._connection: HostConnection | None = None
        self._end: EndRun | Refused | OSError | None = None  # how the connection ended
        self._spoken_s = 0.0
        self.admitted = 0

    def run(self) -> None:
        """Takes part until the leader says that the run is complete. None of its processes is left on return.

        Raises:
            BadInput: if the leader refuses this host.
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
        """Takes note of a rank's message, which goes to the leader."""

    def ended(self, rank: int, reason: str) -> None:
        """Takes note of a rank whose process has ended by itself."""

    def unheard(self) -> Iterable[tuple[int, Any]]:
        """Returns ranks' messages that a leader of before may have had, and the present one lacks."""
        return ()

    @property
    def pids(self) -> dict[int, int]:
        """Process ids of its ranks."""
        return {} if self._processes is None else {rank: each.pid for rank, each in self._processes.running.items()}

    def _take_part(self) -> EndRun:
        """Joins and serves until the connection ends. Returns the leader's last message.

        Raises:
            Refused: if the leader refuses this host or sends what it should not.
            OSError: if the connection cannot be made, or ends.
        """
        with secured(socket.create_connection(self._leader, CONNECT_S), self._certificate, False, self._wire) as connection:
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
            self._connection, self._end = connection, None
            for rank, pid in self.pids.items():  # they have gone on without a leader
                connection.send(RankStarted(rank, pid))
            for rank, message in self.unheard():
                connection.send(FromRank(rank, message))
            return self._serve()

    def _serve(self) -> EndRun:
        """Serves until the leader ends the run: one thread hears the leader, this one the ranks."""
        assert self._connection is not None
        hearing = threading.Thread(target=self._hear_leader, daemon=True, name="aurora-from-leader")
        hearing.start()
        try:
            while self._end is None:
                self._hear_ranks()
        except OSError as error:
            self._end = self._end or error
        finally:
            self._connection.close()
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

    def _hear_ranks(self) -> None:
        """Tells the leader what its ranks do and say."""
        assert self._processes is not None
        assert self._connection is not None
        for rank, started in self._processes.adopt_started():
            if isinstance(started, OSError):
                self._connection.send(RankNotStarted(rank, f"did not start: {started}"))
            else:
                self._connection.send(RankStarted(rank, started.pid))
        for rank, message in self._processes.messages(ALIVE_S):
            if message is not None:
                self.heard(rank, message)
                self._connection.send(FromRank(rank, message))
            elif (member := self._processes.running.get(rank)) is not None:
                reason = member.exit_reason()
                self.ended(rank, reason)
                self._connection.send(RankEnded(rank, reason))
                self._processes.kill(rank)
        if time.monotonic() - self._spoken_s > ALIVE_S:  # so that the kernel notices when the leader's host is gone
            self._spoken_s = time.monotonic()
            self._connection.send(Alive())

    def _hear_leader(self) -> None:
        """Does what the leader says, until it ends the run or the connection."""
        assert self._connection is not None
        try:
            while self._end is None:
                self._handle(self._connection.receive())
        except (OSError, Refused) as error:
            self._end = self._end or error

    def _handle(self, message: Any) -> None:
        assert self._processes is not None
        assert self._connection is not None
        match message:
            case ToRank(rank, content):
                if (member := self._processes.running.get(rank)) is not None:
                    member.send(content)
            case StartRank(rank) if rank in self._request.ranks:
                if rank not in self._processes.running:
                    self._processes.start(rank)
            case KillRank(rank):
                self._processes.kill(rank)
            case EndRun():
                self._end = message
            case Alive():
                pass
            case _:
                raise Refused(f"it sent {type(message).__name__}")
