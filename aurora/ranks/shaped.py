"""A cluster's network on one machine: every rank's port held to its rates by token buckets at both ends."""

import threading
import time
from typing import Any

import torch
import torch.distributed as dist

from aurora.ranks.transport import TorchTransport
from aurora.types import Cluster

CHUNK_S = 0.004  # a chunk's time on the slower port: short enough to share ports fairly, long enough to sleep through
LATE_S = 0.003  # how far behind a bucket may be and still catch up: covers late wake-ups
AHEAD = 2  # chunks posted ahead, so that a transfer does not stop between chunks


class Bucket:
    """A port's one direction. `take` returns when the bytes would have passed at the port's rate."""

    def __init__(self, rate_Bps: float) -> None:
        self._rate = rate_Bps
        self._busy_until = 0.0
        self._lock = threading.Lock()

    def take(self, size: int, begun_before: bool = False) -> None:
        """begun_before: the bytes have been arriving until now, so their own time counts backwards from now."""
        seconds = size / self._rate
        with self._lock:
            now = time.perf_counter()
            late = LATE_S + (seconds if begun_before else 0.0)
            self._busy_until = max(self._busy_until, now - late) + seconds
            wait = self._busy_until - now
        if wait > 0:
            time.sleep(wait)


class Port:
    """One rank's network port, shared by all models on the rank."""

    def __init__(self, cluster: Cluster, rank: int) -> None:
        self.cluster = cluster
        self.out = Bucket(cluster.gpus[rank].out_Bps)
        self.into = Bucket(cluster.gpus[rank].in_Bps)


class ShapedTransport(TorchTransport):
    """gloo, with every transfer held to the rates and start-up times of the cluster file, in chunks."""

    def __init__(self, group: Any, port: Port) -> None:
        super().__init__(group)
        self._port = port

    def _send(self, peer: int, tensor: torch.Tensor) -> None:
        here, there = self._port.cluster.gpus[self.rank], self._port.cluster.gpus[peer]
        time.sleep(max(here.startup_s, there.startup_s))
        posted: list[Any] = []
        for chunk in self._chunks(tensor, min(here.out_Bps, there.in_Bps)):
            self._port.out.take(chunk.numel())
            posted.append(dist.isend(chunk, group=self._group, group_dst=peer))
            if len(posted) > AHEAD:
                posted.pop(0).wait()
        for work in posted:
            work.wait()

    def _receive(self, peer: int, tensor: torch.Tensor) -> None:
        here, there = self._port.cluster.gpus[self.rank], self._port.cluster.gpus[peer]
        chunks = self._chunks(tensor, min(there.out_Bps, here.in_Bps))
        posted: list[tuple[Any, int]] = []
        for index in range(len(chunks) + AHEAD):
            if index < len(chunks):
                posted.append((dist.irecv(chunks[index], group=self._group, group_src=peer), chunks[index].numel()))
            if index >= AHEAD:
                work, size = posted.pop(0)
                work.wait()
                self._port.into.take(size, begun_before=True)

    @staticmethod
    def _chunks(tensor: torch.Tensor, rate_Bps: float) -> tuple[torch.Tensor, ...]:
        """Views of the tensor's bytes, cut the same way at both ends."""
        size = max(1024, int(rate_Bps * CHUNK_S))
        return torch.split(tensor.view(-1).view(torch.uint8), size)
