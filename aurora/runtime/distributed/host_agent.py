"""Agent of a host that joins a run: starts the ranks of its node, and carries messages between them and the leader.

It decides nothing. When it has lost the leader it kills its ranks, which the leader counts as lost, and tries to join again.
"""

import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from aurora.errors import BadInput, RankFailed
from aurora.runtime.distributed.connections import CONNECT_S, watched
from aurora.runtime.distributed.control_channel import HEARTBEAT_S, run_member
from aurora.runtime.distributed.host_connection import (
    EndRun,
    FromRank,
    HostAdmitted,
    HostConnection,
    HostJob,
    HostRefused,
    JoinRun,
    KillRank,
    RankEnded,
    RankNotStarted,
    RankStarted,
    StartRank,
    ToRank,
)
from aurora.runtime.distributed.rank_processes import RankProcess, RankProcesses
from aurora.runtime.distributed.signed_messages import Alive, Hello, Refused
from aurora.runtime.distributed.wire_format import WireFormat
from aurora.types.addresses import address_text

LOG = logging.getLogger(__name__)
RETRY_S = 0.2  # between two attempts to reach the leader


class HostAgent:
    """Runs the ranks of one node of a run that another host leads.

    Args:
        leader: the host and port on which the leader listens. Ranks listen on the address from which this host reaches it.
        node: the node whose ranks this host runs.
        secret: what all hosts share.
        target: what a rank runs, as of Supervisor.
        args: returns the further arguments of `target` for the job that the leader tells.
        about: what has to be the same on all hosts; see Lead.refusal.
        wire: packs messages to and from ranks.
        timeout_s: seconds without a leader after which this host gives up.

    Attributes:
        local: the ranks of this host; empty before it was admitted.
        admitted: how many times it was.
    """

    def __init__(
        self,
        leader: tuple[str, int],
        node: int,
        secret: bytes,
        target: Callable[..., None],
        args: Callable[[Any], tuple[Any, ...]],
        about: dict[str, str],
        wire: WireFormat,
        *,
        timeout_s: float,
    ) -> None:
        self._leader, self._node, self._secret, self._wire = leader, node, secret, wire
        self._target, self._args, self._about, self._timeout_s = target, args, about, timeout_s
        self._hello = Hello(str(node), secrets.token_hex(8))
        self.local: tuple[int, ...] = ()
        self.admitted = 0

    def run(self) -> None:
        """Takes part until the leader says that the run is complete. None of its processes is left on return.

        Raises:
            BadInput: if the leader refuses this host.
            RankFailed: if the leader ends the run before it is complete, or cannot be reached for timeout_s.
        """
        name = address_text(self._leader)
        alone_s = time.monotonic()
        while True:
            admitted = self.admitted
            try:
                end = self._take_part()
                if not end.complete:
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

    def _take_part(self) -> EndRun:
        """Joins and serves until the connection ends. Returns the leader's last message.

        Raises:
            Refused: if the leader refuses this host or sends what it should not.
            OSError: if the connection cannot be made, or ends.
        """
        with socket.create_connection(self._leader, CONNECT_S) as connection, watched(connection):
            hello = Hello(self._hello.name, self._hello.process)
            signed = HostConnection(connection, self._secret, hello, False, self._wire)
            signed.send(JoinRun(self._node, self._about))
            try:
                admitted = signed.receive()
            except ConnectionError:
                raise
            except OSError as error:
                if self.admitted or isinstance(error, TimeoutError):
                    raise
                raise Refused("it ended the connection; is AURORA_SECRET the same on both hosts?") from None
            if isinstance(admitted, HostRefused):
                raise Refused(admitted.reason)
            if not isinstance(admitted, HostAdmitted) or not isinstance(job := signed.receive(), HostJob):
                raise Refused("it did not say what to do")
            self.admitted, self.local = self.admitted + 1, admitted.local
            LOG.info("node %d joined; it runs ranks %s", self._node, ", ".join(map(str, self.local)))
            return _Service(signed, admitted, self._target, self._args(job.job), connection.getsockname()[0]).run()


class _Service:
    """Serves one connection to the leader. One thread hears the leader, the caller's of `run` hears the ranks."""

    def __init__(
        self,
        signed: HostConnection,
        admitted: HostAdmitted,
        target: Callable[..., None],
        args: tuple[Any, ...],
        address: str,
    ) -> None:
        self._signed, self._local = signed, admitted.local
        self._processes = RankProcesses(
            run_member, (target, args), admitted.ranks, (address, 0), admitted.timeout_s, admitted.local
        )  # fmt: skip
        self._members: dict[int, RankProcess] = {}
        self._end: EndRun | Refused | OSError | None = None
        self._spoken_s = 0.0

    def run(self) -> EndRun:
        """Serves until the leader ends the run. Raises Refused, or OSError if the connection ends."""
        hearing = threading.Thread(target=self._hear_leader, daemon=True, name="aurora-from-leader")
        hearing.start()
        try:
            while self._end is None:
                self._hear_ranks()
        except OSError as error:
            self._end = self._end or error
        finally:
            self._signed.close()
            hearing.join()
            self._processes.close()
        if isinstance(self._end, EndRun):
            return self._end
        assert self._end is not None
        raise self._end

    def _hear_ranks(self) -> None:
        """Tells the leader what its ranks do and say."""
        for rank, started in self._processes.adopt_started():
            if isinstance(started, OSError):
                self._signed.send(RankNotStarted(rank, f"did not start: {started}"))
            else:
                self._members[rank] = started
                self._signed.send(RankStarted(rank, started.pid))
        for rank, message in self._processes.messages(HEARTBEAT_S):
            if message is not None:
                self._signed.send(FromRank(rank, message))
            elif (member := self._members.get(rank)) is not None:
                self._signed.send(RankEnded(rank, member.exit_reason()))
                self._kill(rank)
        if time.monotonic() - self._spoken_s > HEARTBEAT_S:  # so that the kernel notices when the leader's host is gone
            self._spoken_s = time.monotonic()
            self._signed.send(Alive())

    def _hear_leader(self) -> None:
        """Does what the leader says, until it ends the run or the connection."""
        try:
            while self._end is None:
                self._handle(self._signed.receive())
        except (OSError, Refused) as error:
            self._end = self._end or error

    def _handle(self, message: Any) -> None:
        match message:
            case ToRank(rank, content):
                if (member := self._members.get(rank)) is not None:
                    member.send(content)
            case StartRank(rank) if rank in self._local:
                self._processes.start(rank)
            case KillRank(rank):
                self._kill(rank)
            case EndRun():
                self._end = message
            case Alive():
                pass
            case _:
                raise Refused(f"it sent {type(message).__name__}")

    def _kill(self, rank: int) -> None:
        if self._members.pop(rank, None) is not None:
            self._processes.kill(rank)
