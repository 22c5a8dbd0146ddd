"""Process groups of an epoch, aborted immediately when the epoch is over, and a transport over one of them.

They are groups of torchft, so no global process group is needed."""

import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from aurora.elastic.abandoned_calls import call_ends
from aurora.elastic.epoch_nccl import EpochCommunicator, NcclGpu
from aurora.errors import RankFailed, first_line
from aurora.moe.transport import Observe
from aurora.runtime.distributed.close_connections import close_connections, connected, open_sockets
from aurora.runtime.transports.gloo import GlooTransport
from aurora.types import Order


@dataclass(frozen=True)
class Epoch:
    """Epoch, as one of its members sees it.

    Args:
        number: number of the epoch, greater than that of every earlier one.
        members: names of the members, ascending; a member's rank is its index.
        data: the JSON value that each member gave to `Member.join`, by name.
        rank: this member's rank.
        store: address of the torch.distributed store of its first member.
    """

    number: int
    members: tuple[str, ...]
    data: Mapping[str, Any]
    rank: int
    store: str = ""


class EpochGroups:
    """Process groups of one epoch's members: a gloo group, and with GPUs an NCCL communicator.

    gloo cannot stop waiting for a peer that is alive but has left the call. So `abort` shuts the connections: every thread that
    waits on one of them, at either end, gets an error immediately. One case remains: if a connection is shut just as gloo
    starts to send on it, gloo loses the message, and the thread waits until the group's time-out; see `unless_stopped`.
    """

    def __init__(self, group: Any, connections: list[socket.socket]) -> None:
        self.group = group
        self.communicator: EpochCommunicator | None = None
        self._connections = connections
        self._lock = threading.Lock()

    def abort(self) -> None:
        """Shuts all connections and aborts the communicator. May be called from any thread, and repeatedly."""
        with self._lock:
            connections, self._connections = self._connections, []
        close_connections(connections)
        if self.communicator is not None:
            self.communicator.abort(RankFailed("the epoch is over"))

    def drain(self) -> None:
        """Waits, after `abort`, until all queued work of the GPU has ended; see `EpochCommunicator.drain`."""
        if self.communicator is not None:
            self.communicator.drain()


def connect_groups(
    epoch: Epoch,
    timeout_s: float,
    stopped: threading.Event,
    gpu: NcclGpu | None = None,
) -> EpochGroups:
    """Creates the process groups of an epoch. A collective call of the epoch's members.

    The gloo group listens on the interface in GLOO_SOCKET_IFNAME.

    Args:
        epoch: the epoch, whose number distinguishes its groups from those of other epochs in the store.
        timeout_s: seconds to wait for the other members, and later for a peer.
        stopped: event that aborts the rendezvous.
        gpu: this member's GPU, for an NCCL communicator beside the gloo group; None: none.

    Raises:
        RankFailed: if `stopped` is set before all have connected, or the others do not join within timeout_s.
    """
    timeout = timedelta(seconds=timeout_s)
    epoch_groups: list[EpochGroups] = []
    lock, waited_for = threading.Lock(), True

    def connect() -> None:
        before = open_sockets()
        group = _group(f"{epoch.store}/epoch{epoch.number}/gloo", epoch, timeout)
        with lock:
            if waited_for:  # if not, gloo closes its sockets, and others may be of the next epoch
                new = (number for inode, number in open_sockets().items() if inode not in before)
                epoch_groups.append(EpochGroups(group, connected(new)))

    reason = "the epoch was over before all had joined"
    try:
        call_ends(connect, stopped, 0.0)
    except (RuntimeError, OSError) as error:
        reason = first_line(error)
    with lock:
        waited_for = False
    if epoch_groups and stopped.is_set():
        epoch_groups.pop().abort()
    if not epoch_groups:
        raise RankFailed(f"rank {epoch.rank}: cannot join the other ranks of epoch {epoch.number}: {reason}")
    if gpu is not None:
        epoch_groups[0].communicator = communicator = EpochCommunicator(gpu)
        try:
            communicator.make(epoch.store, epoch.number, epoch.rank, len(epoch.members), timeout_s, stopped)
        except BaseException:
            epoch_groups[0].abort()
            raise
    return epoch_groups[0]


def _group(address: str, epoch: Epoch, timeout: timedelta) -> Any:
    """Makes one gloo group of torchft's, at a store and prefix; returns torch's own in it, which takes torch's arguments."""
    from torchft.process_group import ProcessGroupGloo  # takes a while

    group = ProcessGroupGloo(timeout)
    group.configure(address, str(epoch.rank), epoch.rank, len(epoch.members), quorum_id=epoch.number)
    return group.parent


class EpochTransport(GlooTransport):
    """GlooTransport over a process group of an epoch. Its calls raise RankFailed when the epoch is over.

    Each gloo call runs in a helper thread, which is abandoned if it does not end. So the calling thread always returns, and
    only that thread changes the member's state.

    Args:
        group: a process group of the epoch.
        perform: runs a collective, and raises RankFailed when the epoch is over; see `Member.perform`.
    """

    def __init__(self, group: Any, perform: Callable[[Callable[[], Any]], None]) -> None:
        super().__init__(group)
        self._until_over = perform

    def gather(self, row: torch.Tensor) -> torch.Tensor:
        """All-gathers a small tensor; see `Transport.gather`."""
        gathered: list[torch.Tensor] = []
        call = super().gather
        self._until_over(lambda: gathered.append(call(row)))
        return gathered[0]

    def exchange(
        self, order: Order | None, sends: Sequence[torch.Tensor], recvs: Sequence[torch.Tensor], observe: Observe
    ) -> None:
        """Performs one all-to-all in `order`; see `Transport.exchange`."""
        call = super().exchange
        self._until_over(lambda: call(order, sends, recvs, observe))
