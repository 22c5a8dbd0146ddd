"""Tensors between ranks in a planned order. A transport belongs to one process group and is used by one thread at a time."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

from aurora.errors import RankFailed
from aurora.types import Order

Observe = Callable[[int, bool, int, float, float], None]  # peer, whether sent, bytes, start, end by time.perf_counter


def parts(order: Order, rank: int, tensors: Sequence[torch.Tensor], sending: bool) -> list[tuple[int, torch.Tensor]]:
    """(peer, slice of its tensor along the first axis) of each row that `rank` sends or receives, in order; none is empty."""
    me, other = (0, 1) if sending else (1, 0)
    mine = order.pairs_X2[:, me] == rank
    peers = order.pairs_X2[:, other]
    lengths_X = np.array([len(tensors[peer]) for peer in peers.tolist()], dtype=np.int64)
    cuts = order.cuts(lengths_X)[mine].tolist()
    found = [(peer, tensors[peer][begin:end]) for peer, (begin, end) in zip(peers[mine].tolist(), cuts, strict=True)]
    return [(peer, tensor) for peer, tensor in found if tensor.numel()]


class Transport(Protocol):
    """What the backend needs of a network."""

    rank: int
    ranks: int

    def gather(self, row: torch.Tensor) -> torch.Tensor:
        """(ranks, *row.shape): every rank's row, on the CPU. Returns when all ranks have given theirs."""

    def exchange(self, order: Order, sends: Sequence[torch.Tensor], recvs: Sequence[torch.Tensor], observe: Observe) -> None:
        """Send sends[r] to and fill recvs[r] from every rank r but this one, in `order`; empty tensors do not travel.

        Both ends must agree on sizes and order. Returns when this rank's transfers are done; raises RankFailed when a
        peer is lost. `observe` is told of every transfer: it starts when this end is ready for it.
        """


class TorchTransport:
    """Point-to-point sends and receives over gloo.

    The order is held by both ends: each posts a transfer only when it is among its first open ones, and gloo moves data
    only once both have posted.
    """

    def __init__(self, group: Any = None) -> None:
        self.rank = dist.get_rank(group)
        self.ranks = dist.get_world_size(group)
        self._group = group
        self._pool = ThreadPoolExecutor(max(1, 2 * (self.ranks - 1)), thread_name_prefix="aurora-port")

    def gather(self, row: torch.Tensor) -> torch.Tensor:
        # Every pair directly: a third of all_gather's time at 4 ranks, whose ring takes a wake-up a step.
        rows = row.new_empty((self.ranks, *row.shape))
        rows[self.rank] = row
        peers = [peer for peer in range(self.ranks) if peer != self.rank]
        with _lost_peers(self.rank, "the others"):
            posted: list[Any] = [dist.irecv(rows[peer], group=self._group, group_src=peer) for peer in peers]
            posted += [dist.isend(rows[self.rank], group=self._group, group_dst=peer) for peer in peers]
            for work in posted:
                work.wait()
        return rows

    def exchange(self, order: Order, sends: Sequence[torch.Tensor], recvs: Sequence[torch.Tensor], observe: Observe) -> None:
        outgoing = deque(parts(order, self.rank, sends, sending=True))
        incoming = deque(parts(order, self.rank, recvs, sending=False))
        jobs: list[Future[None]] = [
            self._pool.submit(self._drain, outgoing, True, observe) for _ in range(min(order.sends_open, len(outgoing)))
        ]
        jobs += [self._pool.submit(self._drain, incoming, False, observe) for _ in range(min(order.recvs_open, len(incoming)))]
        for job in jobs:
            job.result()

    def _drain(self, rows: deque[tuple[int, torch.Tensor]], sending: bool, observe: Observe) -> None:
        while True:
            try:
                peer, tensor = rows.popleft()
            except IndexError:
                return
            began = time.perf_counter()
            with _lost_peers(self.rank, f"rank {peer}"):
                if sending:
                    self._send(peer, tensor)
                else:
                    self._receive(peer, tensor)
            observe(peer, sending, tensor.numel() * tensor.element_size(), began, time.perf_counter())

    def _send(self, peer: int, tensor: torch.Tensor) -> None:
        dist.send(tensor, group=self._group, group_dst=peer)

    def _receive(self, peer: int, tensor: torch.Tensor) -> None:
        dist.recv(tensor, group=self._group, group_src=peer)


class NcclTransport:
    """One grouped call of NCCL sends and receives a phase, posted in the planned order on the current stream.

    Within the group NCCL runs transfers side by side: the order decides which are posted first, not who waits for whom.
    Counts travel over `control`, a gloo group, so that the models' NCCL calls come in the turnstile's order on every rank;
    without one there is nothing to gather.
    """

    def __init__(self, group: Any, control: Any, device: str) -> None:
        self.rank = dist.get_rank(group)
        self.ranks = dist.get_world_size(group)
        self._group, self._device = group, device
        self._control = TorchTransport(control) if control is not None else None

    def gather(self, row: torch.Tensor) -> torch.Tensor:
        assert self._control is not None
        return self._control.gather(row.cpu())

    def exchange(self, order: Order, sends: Sequence[torch.Tensor], recvs: Sequence[torch.Tensor], observe: Observe) -> None:
        # A pair's parts go in one message here: within a group nobody waits between them.
        pairs = list(dict.fromkeys(map(tuple, order.pairs_X2.tolist())))
        whole = replace(order, pairs_X2=np.array(pairs, dtype=np.int64).reshape(-1, 2), share_X2=None)
        ends = [(peer, True, tensor) for peer, tensor in parts(whole, self.rank, sends, sending=True)]
        ends += [(peer, False, tensor) for peer, tensor in parts(whole, self.rank, recvs, sending=False)]
        posts = [
            dist.P2POp(dist.isend if sent else dist.irecv, tensor, group=self._group, group_peer=peer)
            for peer, sent, tensor in ends
        ]
        if not posts:
            return
        began = time.perf_counter()
        with _lost_peers(self.rank, "the others"):
            for work in dist.batch_isend_irecv(posts):
                work.wait()
            torch.cuda.current_stream(self._device).synchronize()
        for peer, sent, tensor in ends:
            observe(peer, sent, tensor.numel() * tensor.element_size(), began, time.perf_counter())


@contextmanager
def _lost_peers(rank: int, peer: str) -> Iterator[None]:
    """Turns a backend's RuntimeError into a RankFailed that names who was lost to whom."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        raise RankFailed(f"rank {rank} lost {peer}: {reason}") from None
