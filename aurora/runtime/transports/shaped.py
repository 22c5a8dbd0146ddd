"""Shaped transport: emulates a cluster's network on one machine, with token buckets that limit ports to their rates."""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch

from aurora.moe.transport import ThreadWork, Transport
from aurora.runtime.transports.gloo import GlooTransport
from aurora.runtime.transports.ordered import Message, Work
from aurora.types import Cluster

if TYPE_CHECKING:
    from aurora.runtime.transports.process_groups import Heartbeats

CHUNK_S = 0.004  # a chunk's time on the slower port: short enough to share ports fairly, long enough to sleep through
LATE_S = 0.003  # how far behind a bucket may be and still catch up: covers late wake-ups
UNDER_WAY = 2  # chunks posted ahead, so that a transfer does not stop between chunks


class Bucket:
    """Token bucket that limits one direction of a port to `rate_Bps` bytes per second."""

    def __init__(self, rate_Bps: float) -> None:
        self._rate = rate_Bps
        self._busy_until = 0.0
        self._lock = threading.Lock()

    def take(self, size: int, not_before_s: float, arrived: bool = False) -> None:
        """Sleeps until the port, at its rate, would have transferred `size` bytes after all earlier ones.

        Args:
            size: number of bytes.
            not_before_s: earliest possible start of this transfer, by time.perf_counter.
            arrived: True: the bytes have just arrived, so their transfer counts as started size / rate seconds ago. False: it
                starts now.
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
    """Token buckets for both directions of one rank's port, shared by all models on the rank."""

    def __init__(self, cluster: Cluster, rank: int) -> None:
        self.cluster = cluster
        self.out = Bucket(cluster.gpus[rank].out_Bps)
        self.into = Bucket(cluster.gpus[rank].in_Bps)


class ShapedTransport(GlooTransport):
    """GlooTransport that slows each transfer, chunk by chunk, to the cluster's rates and start-up times.

    A transfer's first byte is sent separately. Once it has been received, both ends are ready, and the ports' time starts.
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
        gpu, peer_gpu = self._port.cluster.gpus[self.rank], self._port.cluster.gpus[message.peer]
        first, *chunks = self._chunks(message, min(gpu.out_Bps, peer_gpu.in_Bps))
        super()._send(first).wait()
        if message.offset == 0:
            time.sleep(max(gpu.startup_s, peer_gpu.startup_s))
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
        gpu, peer_gpu = self._port.cluster.gpus[self.rank], self._port.cluster.gpus[message.peer]
        first, *chunks = self._chunks(message, min(peer_gpu.out_Bps, gpu.in_Bps))
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
    """Returns one GlooTransport per gloo group; with `shaped`, ShapedTransports that share this rank's port."""
    if not shaped:
        return [GlooTransport(group, cluster, heartbeats) for group in groups]
    port = Port(cluster, rank)
    return [ShapedTransport(group, port, heartbeats) for group in groups]
