"""TCP connections of a rank's process groups: shut down when ranks are lost, so that no survivor blocks in a collective."""

from __future__ import annotations

import socket
import threading
from collections.abc import Collection, Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from aurora.runtime.distributed.close_connections import close_connections, connected, open_sockets
from aurora_vllm.vllm_internals.api_checks import find

KEEPER_STARTS = timedelta(minutes=3)  # longest time until a keeper answers, while ranks start too


class RankLost(RuntimeError):
    """Exception raised when other ranks are lost: in an idle engine, and in a change that a newer change replaces."""


def connect(address: str, timeout: timedelta) -> Store:
    """Returns a client of the keeper's store at "HOST:PORT"."""
    host, _, port = address.rpartition(":")
    return TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timeout)


class GroupConnections:
    """Tracks the TCP connections of this process's process groups, and shuts them down when a newer change begins.

    A process has one of these: a second one would take connections of the first one's new groups for older ones.

    So a survivor does not wait, until a time-out, for another survivor that has already left the collective. Connections are
    shut down because aborting a gloo group has no effect.

    Attributes:
        of_process: those of this process; None: it has none yet.
        gave_up: True: a wait was abandoned in this process, as tests on CPUs do.
    """

    of_process: ClassVar[GroupConnections | None] = None
    gave_up = False

    def __init__(self) -> None:
        GroupConnections.of_process = self
        self._change, self._others, self._lock = -1, frozenset[int](), threading.Lock()
        self._newest = 0  # change that is known of
        self._kept: list[Any] = []

    def begin(self, change: int) -> None:
        """Assigns connections that are opened from now on to change number `change`; a second call for it does nothing.

        Raises:
            RankLost: if there is a newer change.
        """
        with self._lock:
            if 0 < change < self._newest:
                raise RankLost(f"change {change} is given up, there is change {self._newest}")
            if change == self._change:  # an engine and the worker in its process
                return
            self._change, self._others = change, connection_numbers()

    @property
    def outdated(self) -> bool:
        """True if a newer change is known than the one to which new connections belong."""
        return self._newest > self._change

    def keep(self, groups: Iterable[Any]) -> None:
        """Keeps references to old process groups if this process abandoned a wait, because freeing them would block on it."""
        self._kept += groups if self.gave_up else ()

    def shut(self, change: int) -> None:
        """Shuts down the connections of changes before `change`, once: later connections may be to the keeper."""
        with self._lock:
            if max(self._change, self._newest) >= change:
                return
            self._newest = change
            _abort_nccl()
            close_connections(tcp_connections(self._others))

    def watch(self, address: str) -> None:
        """Starts a thread that shuts connections down as soon as the keeper at `address` announces a newer change."""
        store = connect(address, KEEPER_STARTS)

        def wait() -> None:
            client, change = store, 1
            while client.check([f"change/{change}"]):  # made before this rank was started
                change += 1
            while True:
                try:
                    client.wait([f"change/{change}"], timedelta(hours=1))
                except RuntimeError:
                    with suppress(RuntimeError):  # `aurora vllm` has ended, and so will this process
                        client = client if _reached(client) else connect(address, KEEPER_STARTS)  # to the next keeper
                    continue
                self.shut(change)
                change += 1

        threading.Thread(target=wait, daemon=True, name="aurora-changes").start()


def announce(store: Store, number: int) -> None:
    """Announces change `number` to all processes that called `GroupConnections.watch`."""
    while number > 0 and not store.check([f"change/{number}"]):
        store.set(f"change/{number}", "")
        number -= 1


def connection_numbers() -> frozenset[int]:
    """Returns the numbers (inodes) of this process's sockets."""
    return frozenset(open_sockets())


def tcp_connections(others: Collection[int]) -> list[socket.socket]:
    """Returns this process's TCP connections, except those with the numbers (inodes) `others`."""
    sockets = connected(number for inode, number in open_sockets().items() if inode not in others)
    for connection in (each for each in sockets if each.family not in (socket.AF_INET, socket.AF_INET6)):
        connection.close()
    return [connection for connection in sockets if connection.family in (socket.AF_INET, socket.AF_INET6)]


def _reached(store: Store) -> bool:
    """Returns whether a store answers."""
    try:
        return not store.check([""])
    except RuntimeError:
        return False


def _abort_nccl() -> None:
    """Aborts communicators of NCCL, whose kernels wait for a lost rank for ever."""
    if not torch.cuda.is_available() or not dist.is_initialized():
        return
    for group in (reference() for reference in find("vllm.distributed.parallel_state:_groups").values()):
        communicator = getattr(getattr(group, "device_communicator", None), "pynccl_comm", None)
        if communicator is not None:
            communicator.destroy()  # by ncclCommAbort
    for group in list(dist.distributed_c10d._world.pg_map):
        group.abort()
