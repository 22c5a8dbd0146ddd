"""gloo transport: TCP between processes on any machine."""

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from aurora.errors import RankFailed
from aurora.moe.transport import Observe, joined
from aurora.runtime.transports.ordered import Message, OrderedTransport, Work
from aurora.types import Cluster, Order

if TYPE_CHECKING:
    from aurora.runtime.transports.process_groups import Heartbeats

PROBE = 2**31 - 1  # a tag that no message has


class GlooTransport(OrderedTransport):
    """OrderedTransport over a gloo process group; `group` None: torch.distributed's default group.

    When a call times out, its error uses the heartbeats to name the ranks that hang, not ranks that only wait for those.

    A message waits at its sender until the receiver's request has come, over the same connection. The message's tag is its
    size. If sender and receiver disagree on the size, they never match, and the call times out.
    """

    has_collective = True

    def __init__(self, group: Any = None, cluster: Cluster | None = None, heartbeats: "Heartbeats | None" = None) -> None:
        self._group: Any = dist.distributed_c10d._get_default_group() if group is None else group
        super().__init__(self._group.rank(), self._group.size(), cluster)
        self._heartbeats = heartbeats
        _yield_to_posters()

    def gather(self, row: torch.Tensor) -> torch.Tensor:
        """All-gathers a small tensor; see `Transport.gather`."""
        if self.ranks == 2:
            return super().gather(row)
        # One collective in which every rank sends the same to all: only gloo's threads wait there.
        sent = row.expand(self.ranks, *row.shape).contiguous()
        rows = torch.empty_like(sent)
        self._alltoall(rows, sent, [], [])
        return rows

    def exchange(
        self, order: Order | None, sends: Sequence[torch.Tensor], recvs: Sequence[torch.Tensor], observe: Observe
    ) -> None:
        """Performs one all-to-all in `order`; see `Transport.exchange`."""
        if order is not None:
            super().exchange(order, sends, recvs, observe)
            return
        assert self.has_collective
        (out, out_bytes), (into, in_bytes) = ((joined(parts), [tensor.nbytes for tensor in parts]) for parts in (sends, recvs))
        began_s = time.perf_counter()
        self._alltoall(into, out, in_bytes, out_bytes)
        ended_s = time.perf_counter()
        for tensor, part in zip(recvs, into.split_with_sizes(in_bytes), strict=True):
            if part.data_ptr() != tensor.data_ptr():  # the tensors lie apart
                tensor.view(-1).view(torch.uint8).copy_(part)
        for peer in range(self.ranks):
            for size, sent in ((out_bytes[peer], True), (in_bytes[peer], False)):
                if size and peer != self.rank:
                    observe(peer, sent, size, began_s, ended_s)

    def _alltoall(self, into: torch.Tensor, out: torch.Tensor, in_sizes: list[int], out_sizes: list[int]) -> None:
        """gloo's own all-to-all; without sizes all parts are equal. A collective that fails does not name the lost peer."""
        try:
            self._group.alltoall_base(into, out, in_sizes, out_sizes).wait()
        except RuntimeError as error:
            broken = self.broken_peers()
            raise self._lost(broken if len(broken) == 1 else (), error) from None

    def broken_peers(self) -> list[int]:
        """Returns the peers whose connections are broken; gloo's errors of collectives do not name them.

        Each call leaks about 90 bytes per peer in gloo, so call it only after a failure, or while another call waits.
        """
        broken = []
        for peer in range(self.ranks):
            if peer != self.rank:
                try:
                    self._group.recv([torch.empty(1)], peer, PROBE)  # does not wait
                except RuntimeError:
                    broken.append(peer)
        return broken

    def _lost(self, peers: Sequence[int], error: RuntimeError) -> RankFailed:
        hung = self._heartbeats.silent if self._heartbeats is not None else []
        return super()._lost(hung or peers, error)

    # The group's own methods: torch.distributed's isend and irecv take a third of a small message's time.

    def _send(self, message: Message) -> Work:
        work: Work = self._group.send([message.tensor], message.peer, _tag(message))
        return work

    def _receive(self, message: Message) -> Work:
        work: Work = self._group.recv([message.tensor], message.peer, _tag(message))
        return work


def _yield_to_posters() -> None:
    """Keeps gloo's own threads of this process from taking a core from another thread (Linux).

    A thread that posts a message holds its connection's lock while it writes, and may be interrupted there by gloo's thread,
    which wants that lock and polls for it until the scheduler's next tick, 4 ms later.
    """
    for task in Path("/proc/self/task").glob("*"):
        with suppress(OSError):  # the thread has ended, or may not be changed
            if (task / "comm").read_text().startswith("gloo_tcp_loop"):
                os.sched_setscheduler(int(task.name), os.SCHED_BATCH, os.sched_param(0))


def _tag(message: Message) -> int:
    return message.size % PROBE
