"""Epoch's process groups: made without a global group, and broken off at once when the epoch is over."""

import datetime
import socket
import threading
import time
from collections.abc import Callable, Collection
from contextlib import nullcontext, suppress
from queue import Empty, SimpleQueue
from typing import Any

from torch.distributed import PrefixStore, ProcessGroupGloo, Store  # type: ignore[attr-defined]

from aurora.errors import RankFailed
from aurora.runtime.distributed.connections import connected, kept_apart, marked_urgent, open_sockets
from aurora.runtime.distributed.epoch_gpu import RankGpu
from aurora.runtime.distributed.epoch_nccl import EpochCommunicators

POLL_S = 0.02
STUCK_S = 0.3  # after `abort` until gloo counts as stuck
_own = threading.local()  # `waiting`: this thread's _WaitingThread, unless a call runs in it


class EpochGroups:
    """Process groups of one epoch's members: one gloo group per model, and as many NCCL communicators if they use GPUs.

    gloo cannot stop waiting for a peer that lives but no longer waits. So `abort` shuts the connections: each thread that waits
    on one of them, at either end, gets an error at once. One case is left: if a connection is shut just as gloo begins to send
    a message on it, gloo forgets the message, and the thread that waits for it waits until the group's time-out; see
    `unless_stopped`.
    """

    def __init__(self, groups: list[Any], connections: list[socket.socket]) -> None:
        self.groups = groups
        self.communicators: EpochCommunicators | None = None
        self._connections = connections
        self._lock = threading.Lock()

    def abort(self) -> None:
        """Shuts all connections and aborts all communicators. May be called from any thread, and more than once."""
        with self._lock:
            connections, self._connections = self._connections, []
        for connection in connections:
            with suppress(OSError):  # the other end was faster
                if not kept_apart(connection):
                    connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        if self.communicators is not None:
            self.communicators.abort(RankFailed("the epoch is over"))

    def drain(self) -> None:
        """Waits until what is queued on the GPU has ended, after `abort`; see `EpochCommunicators.drain`."""
        if self.communicators is not None:
            self.communicators.drain()


def connect_groups(
    open_store: Callable[[], Store],
    epoch: int,
    rank: int,
    ranks: int,
    groups: int,
    timeout_s: float,
    stopped: threading.Event,
    host: str | None = None,
    gpu: RankGpu | None = None,
    urgent: Collection[int] = (),
) -> EpochGroups:
    """Makes the process groups of an epoch. A collective call: all members of the epoch make it.

    Args:
        open_store: returns the store of the rendezvous.
        epoch: the epoch's number, which keeps its groups apart from those of other epochs.
        rank, ranks: this member's rank in the epoch, and the number of members.
        groups: how many process groups to make.
        timeout_s: seconds to wait for the other members, and later for a peer.
        stopped: ends the rendezvous when it is set.
        host: this machine's address on which the gloo groups listen; None: that of the interface in GLOO_SOCKET_IFNAME.
        gpu: this member's GPU, for an NCCL communicator with each group; None: there are none.
        urgent: which gloo groups have packets that are to go before others; see `marked_urgent`.

    Raises:
        RankFailed: if `stopped` is set first, or the others do not join within timeout_s.
    """
    found: list[EpochGroups] = []
    lock, waited_for = threading.Lock(), True

    def connect() -> None:
        store = open_store()
        before = open_sockets()
        made = []
        for group in range(groups):
            with marked_urgent() if group in urgent else nullcontext():
                made.append(_group(PrefixStore(f"epoch{epoch}/{group}", store), rank, ranks, timeout_s, host))
        with lock:
            if waited_for:  # if not, gloo closes its sockets, and others may be of the next epoch
                new = (number for inode, number in open_sockets().items() if inode not in before)
                found.append(EpochGroups(made, connected(new)))

    reason = "the epoch was over before all had joined"
    try:
        _ends(connect, stopped, 0.0)
    except (RuntimeError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
    with lock:
        waited_for = False
    if found and stopped.is_set():
        found.pop().abort()
    if not found:
        raise RankFailed(f"rank {rank}: cannot join the other ranks of epoch {epoch}: {reason}")
    if gpu is not None:
        found[0].communicators = communicators = EpochCommunicators(gpu)
        try:
            communicators.make(open_store, epoch, rank, ranks, groups, timeout_s, stopped)
        except BaseException:
            found[0].abort()
            raise
    return found[0]


def _group(store: Store, rank: int, ranks: int, timeout_s: float, host: str | None) -> Any:
    """Makes one gloo group that listens on `host`."""
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = datetime.timedelta(seconds=timeout_s)
    device = ProcessGroupGloo.create_default_device() if host is None else ProcessGroupGloo.create_device(hostname=host)
    options._devices = [device]
    return ProcessGroupGloo(store, rank, ranks, options)


def unless_stopped(stopped: threading.Event, call: Callable[[], None]) -> None:
    """Runs `call`, which waits for peers, in a thread, and abandons it when the epoch is over.

    Raises:
        RankFailed: if `call` has not ended STUCK_S seconds after `stopped` was set; its thread is left behind.
        Exception: whatever `call` raises.
    """
    if not _ends(call, stopped, STUCK_S):
        raise RankFailed("gloo waits on although its connections are shut")


class _WaitingThread:
    """Runs calls that wait for peers, one after the other. It ends when nothing refers to it and its call has ended."""

    def __init__(self) -> None:
        self.calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.outcomes: SimpleQueue[BaseException | None] = SimpleQueue()  # of each call what it has raised
        args = self.calls, self.outcomes
        threading.Thread(target=_run_calls, args=args, daemon=True, name="aurora-waiting").start()

    def __del__(self) -> None:
        self.calls.put(None)


def _run_calls(calls: SimpleQueue[Callable[[], None] | None], outcomes: SimpleQueue[BaseException | None]) -> None:
    """The thread of a _WaitingThread. Between two calls it holds nothing of the last one."""
    while (call := calls.get()) is not None:
        outcome = None
        try:
            call()
        except BaseException as error:
            outcome = error
        outcomes.put(outcome)
        del call, outcome


def _ends(call: Callable[[], None], stopped: threading.Event, grace_s: float) -> bool:
    """Runs a call in another thread. Returns whether it has ended grace_s after `stopped` was set; raises what it raises.

    Each thread has one such thread, because to start one for each call takes longer than most calls.
    """
    waiting = getattr(_own, "waiting", None) or _WaitingThread()
    _own.waiting = None  # a thread whose call is left behind is not used again
    waiting.calls.put(call)
    end_s: float | None = None  # when to leave the call behind
    while True:
        try:
            outcome = waiting.outcomes.get(timeout=POLL_S)
            break
        except Empty:
            if stopped.is_set():
                end_s = time.monotonic() + grace_s if end_s is None else end_s
                if time.monotonic() >= end_s:
                    return False
    _own.waiting = waiting
    if outcome is not None:
        try:
            raise outcome
        finally:
            del outcome  # or the error would refer to itself, and keep all that its frames hold until Python looks for cycles
    return True
