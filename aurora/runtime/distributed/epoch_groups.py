"""Epoch's process groups: made without a global group, and broken off at once when the epoch is over."""

import datetime
import os
import socket
import stat
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

from aurora.errors import RankFailed

POLL_S = 0.005
STUCK_S = 0.3  # after `abort` until gloo counts as stuck


class EpochGroups:
    """Process groups of one epoch's members: one gloo group per model.

    gloo cannot stop waiting for a peer that lives but has stopped waiting itself. So `abort` shuts the connections: each thread
    that waits on one of them, here or at the other end, gets an error at once. One case is left: gloo forgets a message that it
    begins to send, because the receiver's notice has just come, on a connection that is shut by then. The thread that waits for
    that message waits until the group's time-out; see `unless_stopped`.

    Args:
        groups: the process groups, by model.
        connections: the sockets that they use.
    """

    def __init__(self, groups: list[Any], connections: list[socket.socket]) -> None:
        self.groups = groups
        self._connections = connections
        self._lock = threading.Lock()

    def abort(self) -> None:
        """Shuts all connections; may be called from any thread, and again."""
        with self._lock:
            connections, self._connections = self._connections, []
        for connection in connections:
            with suppress(OSError):  # the other end was faster
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()


def join_epoch(
    store: tuple[str, int], epoch: int, rank: int, ranks: int, groups: int, timeout_s: float, stopped: threading.Event
) -> EpochGroups:
    """Rendezvous of an epoch's members. All of them call it.

    Args:
        store: host and port of the supervisor's store.
        epoch: its number, which keeps its groups apart from other epochs'.
        rank, ranks: of this member, among the epoch's members.
        groups: how many process groups to make.
        timeout_s: how long to wait for the others, and later for a peer.
        stopped: gives the rendezvous up when it is set.

    Raises:
        RankFailed: if `stopped` is set first, or the others do not join within timeout_s.
    """
    found: list[EpochGroups] = []
    failed: list[Exception] = []

    def connect() -> None:
        try:
            timeout = datetime.timedelta(seconds=timeout_s)
            # A client of its own: one that waits for members that never come keeps all others from using it.
            client = TCPStore(*store, is_master=False, timeout=timeout)
            before = _sockets()
            made = [
                ProcessGroupGloo(PrefixStore(f"epoch{epoch}/{group}", client), rank, ranks, timeout) for group in range(groups)
            ]
            new = (number for inode, number in _sockets().items() if inode not in before)
            epoch_groups = EpochGroups(made, _connected(new))
            if stopped.is_set():
                epoch_groups.abort()
            else:
                found.append(epoch_groups)
        except (RuntimeError, OSError) as error:
            failed.append(error)

    connecting = threading.Thread(target=connect, daemon=True, name=f"aurora-epoch-{epoch}")
    connecting.start()
    while connecting.is_alive() and not stopped.is_set():
        connecting.join(POLL_S)
    if found:
        return found[0]
    reason = str(failed[0]).strip().splitlines()[0] if failed else "the epoch was over before all had joined"
    raise RankFailed(f"rank {rank}: cannot join the other ranks of epoch {epoch}: {reason}")


def unless_stopped(stopped: threading.Event, call: Callable[[], None]) -> None:
    """Runs a call that waits for peers, in a thread, and gives it up when the epoch is over.

    Args:
        stopped: set when the epoch is over.
        call: waits for peers.

    Raises:
        RankFailed: if `call` has not ended STUCK_S after `stopped` was set; its thread is left behind.
        Exception: what `call` raises.
    """
    failed: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            failed.append(error)

    waiting = threading.Thread(target=run, daemon=True, name="aurora-waiting")
    waiting.start()
    while waiting.is_alive() and not stopped.is_set():
        waiting.join(POLL_S)
    waiting.join(STUCK_S)
    if failed:
        raise failed[0]
    if waiting.is_alive():
        raise RankFailed("gloo waits on although its connections are shut")


def _sockets() -> dict[int, int]:
    """This process's socket descriptors by inode: descriptors' numbers are given again when sockets of the last epoch close."""
    found = {}
    for name in os.listdir("/dev/fd"):
        try:
            status = os.fstat(int(name))
        except OSError:  # closed since
            continue
        if stat.S_ISSOCK(status.st_mode):
            found[status.st_ino] = int(name)
    return found


def _connected(descriptors: Iterable[int]) -> list[socket.socket]:
    """The sockets among `descriptors` that have a peer, each under a descriptor of its own."""
    connections = []
    for descriptor in descriptors:
        try:
            connection = socket.socket(fileno=os.dup(descriptor))
        except OSError:
            continue
        try:
            connection.getpeername()
            connections.append(connection)
        except OSError:  # it listens
            connection.close()
    return connections
