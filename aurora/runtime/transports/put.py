"""Put and signal: a transport by NCCL's one-sided calls, for long exchanges, and for those beside another model's compute.

Copy engines carry the bytes inside a server and NICs those between servers, so that no multiprocessor is taken. A put and its
signal are two operations of a stream, which runs them in order: the sequence in which a rank puts is that of its transfers.
Inside a group of calls NCCL keeps no order between peers, so there is none here. Receivers keep no order.

Every rank signals every other in every round, also where it has no bytes for it. A peer's signal of one round therefore says
that it has taken what the round before brought, and buffers have two halves. Nothing of this has run on a GPU.
"""

import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from aurora.errors import RankFailed
from aurora.moe.transport import peer_lost
from aurora.runtime.phase_recorder import StreamTimer, Timer
from aurora.runtime.transports.in_rounds import RoundsTransport
from aurora.types import Order

LOOK_S = 0.001  # between two looks at a signal that has not come
LEAST_BYTES = 16  # of a put: a signal needs one


class PutCalls(Protocol):
    """One-sided calls of NCCL and a stream, as far as a PutTransport uses them. Tests put an emulation in their place.

    Each rank has an outbox and an inbox, both (2, R, bytes) uint8, two halves with a part for each rank.
    """

    rank: int
    ranks: int
    device: str
    timer: Timer  # of the current stream
    outbox: torch.Tensor
    inbox: torch.Tensor

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> None:
        """Queues a copy on the current stream."""

    def put(self, peer: int, half: int, size: int) -> None:
        """Queues a put of the first `size` bytes for a peer into its inbox, and its signal."""

    def wait_signal(self, peer: int, half: int) -> None:
        """Queues a wait for one more signal of a peer in a half."""


class NcclPutCalls:
    """PutCalls by `put_signal` and `wait_signal` of torch.distributed's symmetric memory, whose back end is "NCCL".

    Args:
        group: an NCCL process group; making the calls is a collective call of its ranks.
        device: this rank's CUDA device, the current one.
        size: bytes of a rank's part of a half.
    """

    def __init__(self, group: Any, device: str, size: int) -> None:
        import torch.distributed._symmetric_memory as symmetric

        symmetric.set_backend("NCCL")
        self._calls, self.rank, self.ranks, self.device = symmetric, group.rank(), group.size(), device
        self.timer: Timer = StreamTimer(0.0)
        shape, where = (2, self.ranks, size), torch.device(device)
        self.outbox, self.inbox = (symmetric.empty(shape, dtype=torch.uint8, device=where) for _ in range(2))
        symmetric.rendezvous(self.outbox, group)
        self._inbox_2R = [[symmetric.rendezvous(part, group) for part in half] for half in self.inbox]

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> None:
        """Queues a copy; see `PutCalls.copy`."""
        into.copy_(source)

    def put(self, peer: int, half: int, size: int) -> None:
        """Queues a put and its signal; see `PutCalls.put`."""
        self._calls.put_signal(self.outbox[half, peer, :size], self._inbox_2R[half][self.rank], peer)

    def wait_signal(self, peer: int, half: int) -> None:
        """Queues a wait; see `PutCalls.wait_signal`."""
        self._calls.wait_signal(self._inbox_2R[half][peer], peer)


class PutTransport(RoundsTransport):
    """A Transport by put and signal. It keeps the sequence in which an order's senders send.

    Args:
        calls: the calls of an NCCL process group.
        most_bytes: most bytes of a tensor; as many rounds as they fill the calls' buffers make an exchange.
        timeout_s: seconds after which `wait` takes a peer for lost.
    """

    in_stages = False

    def __init__(self, calls: PutCalls, most_bytes: int, timeout_s: float = 300.0) -> None:
        super().__init__(calls.rank, calls.ranks, most_bytes, calls.inbox.shape[-1], calls.device)
        self._calls, self._timeout_s = calls, timeout_s
        self._waits: deque[tuple[int, Any]] = deque()  # peers, and the marks behind the waits for their signals

    def wait(self) -> None:
        """Waits until this rank's transfers are done; see `Transport.wait`."""
        until_s = time.monotonic() + self._timeout_s
        while self._waits:
            peer, mark = self._waits[0]
            if self._calls.timer.reached(mark):
                self._waits.popleft()
            elif time.monotonic() > until_s:
                raise self._lost(peer)
            else:
                time.sleep(LOOK_S)

    def _lost(self, peer: int) -> RankFailed:
        return peer_lost(self.rank, [peer], RuntimeError(f"no signal within {self._timeout_s:g} s"))

    def _exchange_round(self, order: Order, outs: Sequence[torch.Tensor], intos: Sequence[torch.Tensor], half: int) -> None:
        calls = self._calls
        peers = list(dict.fromkeys(order.rows_of(self.rank, True)[1].tolist()))  # a pair's bytes travel at its first row
        for peer in peers:
            calls.copy(calls.outbox[half, peer, : len(outs[peer])], outs[peer])
        for peer in peers:
            calls.put(peer, half, max(len(outs[peer]), LEAST_BYTES))
        for peer in dict.fromkeys(order.rows_of(self.rank, False)[1].tolist()):
            calls.wait_signal(peer, half)
            self._waits.append((peer, calls.timer.mark()))
            calls.copy(intos[peer], calls.inbox[half, peer, : len(intos[peer])])
        while len(self._waits) > 64 * self.ranks and calls.timer.reached(self._waits[0][1]):
            self._waits.popleft()
