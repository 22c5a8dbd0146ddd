"""gloo transports: TCP between processes on any machine, plain or shaped.

The shaped transport imitates a cluster's network on one machine: token buckets slow each rank's port down to its rates.
"""

import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from aurora.errors import RankFailed
from aurora.moe.transport import Observe, ThreadWork, Transport, joined
from aurora.runtime.transports.ordered import Message, OrderedTransport, Work
from aurora.types import Cluster, Order

if TYPE_CHECKING:
    from aurora.runtime.transports.process_groups import Heartbeats

PROBE = 2**31 - 1  # a tag that no message has
CHUNK_S = 0.004  # a chunk's time on the slower port: short enough to share ports fairly, long enough to sleep through
LATE_S = 0.003  # how far behind a bucket may be and still catch up: covers late wake-ups
UNDER_WAY = 2  # chunks posted ahead, so that a transfer does not stop between chunks


class GlooTransport(OrderedTransport):
    """An ordered transport over a gloo process group; None: torch.distributed's default group.

    If a call waits in vain, heartbeats tell it which ranks hang, so that its error names those and not ranks that wait too.

    A message waits at its sender until the receiver's request has come, over the same connection. The message's tag is its
    size. If the ends disagree on the size, send and receive never match, and the call ends by the time-out.
    """

    has_collective = True

    def __init__(self, group: Any = None, cluster: Cluster | None = None, heartbeats: "Heartbeats | None" = None) -> None:
        self._group: Any = dist.distributed_c10d._get_default_group() if group is None else group
        super().__init__(self._group.rank(), self._group.size(), cluster)
        self._heartbeats = heartbeats
        _yield_to_posters()

    def gather(self, row: torch.Tensor) -> torch.Tensor:
        """Gathers every rank's small tensor; see `Transport.gather`."""
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
        (out, out_bytes), (into, in_bytes) = ((joined(each), [tensor.nbytes for tensor in each]) for each in (sends, recvs))
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
        """Returns the peers whose connections are broken, because a collective that fails does not name them.

        Each call leaks some 90 bytes per peer in gloo, so it is made only after a failure, or while another call waits.
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


class Bucket:
    """Token bucket of one direction of a port."""

    def __init__(self, rate_Bps: float) -> None:
        self._rate = rate_Bps
        self._busy_until = 0.0
        self._lock = threading.Lock()

    def take(self, size: int, not_before_s: float, arrived: bool = False) -> None:
        """Sleeps until `size` bytes would have passed at the port's rate.

        Args:
            size: number of bytes.
            not_before_s: earliest time at which they could begin to pass, by time.perf_counter.
            arrived: True: the bytes have just arrived, so their transfer counts as begun size / rate seconds ago. False: they
                begin to pass now.
        """
        seconds = size / self._rate
        with self._lock:
            now = time.perf_counter()
            late = LATE_S + (seconds if arrived else 0.0)
            self._busy_until = max(self._busy_until, now - late, not_before_s) + seconds
            wait = self._busy_until - now
        if wait > 0:
            time.sleep(wait)


class Port:
    """Both directions of one rank's port, shared by all models on the rank."""

    def __init__(self, cluster: Cluster, rank: int) -> None:
        self.cluster = cluster
        self.out = Bucket(cluster.gpus[rank].out_Bps)
        self.into = Bucket(cluster.gpus[rank].in_Bps)


class ShapedTransport(GlooTransport):
    """A gloo transport that slows each transfer down to the cluster's rates and start-up times, chunk by chunk.

    A transfer's first byte is sent alone. When it has been received, both ends are ready, and the ports' time begins to count.
    """

    cuts_rows = False  # a request takes no time here
    has_collective = False  # it would not keep to the rates

    def __init__(self, group: Any, port: Port, heartbeats: "Heartbeats | None" = None) -> None:
        super().__init__(group, port.cluster, heartbeats)
        self._port = port
        self._sending, self._receiving = (
            [ThreadPoolExecutor(1, thread_name_prefix="aurora-shaped") for _ in range(self.ranks)] for _ in range(2)
        )

    def _send(self, message: Message) -> Work:
        return ThreadWork(self._sending[message.peer].submit(self._send_chunks, message))

    def _receive(self, message: Message) -> Work:
        return ThreadWork(self._receiving[message.peer].submit(self._receive_chunks, message))

    def _send_chunks(self, message: Message) -> None:
        here, there = self._port.cluster.gpus[self.rank], self._port.cluster.gpus[message.peer]
        first, *chunks = self._chunks(message, min(here.out_Bps, there.in_Bps))
        super()._send(first).wait()
        if message.offset == 0:
            time.sleep(max(here.startup_s, there.startup_s))
        ready_s = time.perf_counter()
        posted: list[Work] = []
        for chunk in chunks:
            self._port.out.take(chunk.size, ready_s)
            posted.append(super()._send(chunk))
            if len(posted) > UNDER_WAY:
                posted.pop(0).wait()
        for work in posted:
            work.wait()

    def _receive_chunks(self, message: Message) -> None:
        here, there = self._port.cluster.gpus[self.rank], self._port.cluster.gpus[message.peer]
        first, *chunks = self._chunks(message, min(there.out_Bps, here.in_Bps))
        receive = super()._receive
        ready = receive(first)
        posted = [(receive(chunk), chunk.size) for chunk in chunks[:UNDER_WAY]]
        ready.wait()
        ready_s = time.perf_counter()
        for chunk in chunks[UNDER_WAY:]:
            posted.append((receive(chunk), chunk.size))
            self._arrive(*posted.pop(0), ready_s)
        for work, size in posted:
            self._arrive(work, size, ready_s)

    def _arrive(self, work: Work, size: int, ready_s: float) -> None:
        """Waits for a chunk whose message could begin at `ready_s`, for as long as it takes at the port's rate."""
        work.wait()
        self._port.into.take(size, ready_s, arrived=True)

    @staticmethod
    def _chunks(message: Message, rate_Bps: float) -> list[Message]:
        """A message's first byte, and the rest in pieces, cut the same way at both ends."""
        size = max(1024, int(rate_Bps * CHUNK_S))
        pieces = [message.flat[:1], *(torch.split(message.flat[1:], size) if message.size > 1 else ())]
        return [Message(message.peer, piece, 0, 0, piece.numel()) for piece in pieces]


def tcp_transports(
    groups: Sequence[Any], cluster: Cluster, rank: int, shaped: bool, heartbeats: "Heartbeats | None" = None
) -> list[Transport]:
    """Returns a transport for each gloo group. With `shaped` they are ShapedTransports that share this rank's port."""
    if not shaped:
        return [GlooTransport(group, cluster, heartbeats) for group in groups]
    port = Port(cluster, rank)
    return [ShapedTransport(group, port, heartbeats) for group in groups]
