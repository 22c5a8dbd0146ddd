"""Put and signal: a transport by NCCL's one-sided calls, for long exchanges, and for those beside another model's compute.

Inside a server copy engines carry the bytes, and between servers NICs, so no multiprocessor of the GPU is occupied. A put and
its signal are two operations on a stream, which runs them in sequence, so a rank's transfers are made in the sequence of its
puts. Calls are not grouped, because NCCL keeps no sequence between the peers of a group. Receivers keep no order.

A pair of ranks takes as many rounds as the longer of its two tensors needs parts that fit into a buffer. In each round both
signal, also without bytes. So a peer's signal of one round also tells that it has taken the bytes of the round before; for this
buffers have two halves. NCCL counts the signals of a peer, whatever buffer they are for. None of this has run on a GPU.
"""

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from aurora.errors import BadInput
from aurora.moe.transport import Observe, lost_others, row_slices
from aurora.runtime.phase_recorder import HostTimer, StreamTimer, Timer
from aurora.runtime.transports.gloo import GlooTransport
from aurora.runtime.transports.nccl import CHECK_S, QueuedTransport
from aurora.runtime.transports.process_groups import Heartbeats, new_process_group
from aurora.types import Order

LOOK_S = 1e-4  # between two looks at a signal that has not come
LEAST_BYTES = 16  # of a put: a signal needs one
BUFFER_BYTES = 512 << 20  # of a GPU's outbox and inbox
GLOO_BYTES = 64 << 10  # of a rank's part of a half, on a CPU
PART_ALIGNED = 256  # bytes
NCCL = (2, 29)  # which has one-sided calls


class NcclPutCalls:
    """One-sided calls by `put_signal` and `wait_signal` of torch.distributed's symmetric memory with back end "NCCL".

    Tests use an emulation in their place.

    Args:
        group: an NCCL process group; the constructor is a collective call of its ranks.
        device: this rank's CUDA device, which is the current device.
        size: bytes per peer in each half of a buffer.

    Attributes:
        rank, ranks: this rank, and the number of ranks.
        timer: timer of the current stream.
        outbox, inbox: (2, R, bytes) uint8: two halves, each with a part for every rank.
    """

    def __init__(self, group: Any, device: str, size: int) -> None:
        import torch.distributed._symmetric_memory as symmetric

        symmetric.set_backend("NCCL")
        dist.barrier(group)  # makes the communicator, which a rendezvous does not
        self._calls, self.rank, self.ranks = symmetric, group.rank(), group.size()
        self.timer: Timer = StreamTimer(0.0)
        shape, where = (2, self.ranks, size), torch.device(device)
        self.outbox, self.inbox = (symmetric.empty(shape, dtype=torch.uint8, device=where) for _ in range(2))
        symmetric.rendezvous(self.outbox, group)
        self._inbox_2R = [[symmetric.rendezvous(part, group) for part in half] for half in self.inbox]

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> None:
        """Queues a copy on the current stream."""
        into.copy_(source)

    def put(self, peer: int, half: int, size: int) -> None:
        """Queues a put of the first `size` bytes of `outbox[half, peer]` into the peer's `inbox[half, rank]`, and a signal."""
        self._calls.put_signal(self.outbox[half, peer, :size], self._inbox_2R[half][self.rank], peer)

    def wait_signal(self, peer: int, half: int) -> None:
        """Queues a wait for the next signal from `peer`; its put has then filled `inbox[half, peer]`."""
        self._calls.wait_signal(self._inbox_2R[half][peer], peer)


class GlooPutCalls:
    """NcclPutCalls emulated on CPUs by messages of a gloo group, for tests; `wait_signal` receives the message."""

    def __init__(self, group: Any, size: int) -> None:
        self.rank, self.ranks, self._group = group.rank(), group.size(), group
        self.timer: Timer = HostTimer(0.0)
        self.outbox, self.inbox = torch.zeros(2, 2, self.ranks, size, dtype=torch.uint8)
        self._sent: dict[tuple[int, int], Any] = {}

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> None:
        """Copies; see `NcclPutCalls.copy`."""
        into.copy_(source)

    def put(self, peer: int, half: int, size: int) -> None:
        """Sends a message in place of the put; see `NcclPutCalls.put`."""
        if (before := self._sent.get((peer, half))) is not None:
            before.wait()
        self._sent[peer, half] = dist.isend(self.outbox[half, peer].clone(), group=self._group, group_dst=peer)

    def wait_signal(self, peer: int, half: int) -> None:
        """Receives the peer's message; see `NcclPutCalls.wait_signal`."""
        dist.recv(self.inbox[half, peer], group=self._group, group_src=peer)


class PutTransport(QueuedTransport):
    """Transport by NCCL's one-sided put and signal. Senders keep the planned order; receivers accept rows in any order.

    Args:
        calls: the one-sided calls of a process group.
        control, heartbeats: as in `QueuedTransport`.
        timeout_s: seconds after which `wait` reports a peer as lost.
    """

    in_stages = False

    def __init__(
        self,
        calls: NcclPutCalls | GlooPutCalls,
        control: GlooTransport | None,
        timeout_s: float = 300.0,
        heartbeats: Heartbeats | None = None,
    ) -> None:
        super().__init__(calls.rank, calls.ranks, calls.timer, control, heartbeats)
        self._calls, self._timeout_s = calls, timeout_s
        self._rounds_R = [0] * self.ranks  # of each pair so far; the last bit says which half is next

    def exchange(
        self, order: Order | None, sends: Sequence[torch.Tensor], recvs: Sequence[torch.Tensor], observe: Observe
    ) -> None:
        """Queues one all-to-all in `order`; see `Transport.exchange`."""
        assert order is not None, "it has no all-to-all of its own"
        row_slices(order, self.rank, sends, True)  # which says what the order leaves out
        outs, intos = ([tensor.view(-1).view(torch.uint8) for tensor in tensors] for tensors in (sends, recvs))
        size = self._calls.inbox.shape[-1]
        rounds_R = [-(-max(len(out), len(into)) // size) for out, into in zip(outs, intos, strict=True)]
        rounds_R[self.rank] = 0
        receivers, senders = ([*order.rows_of(self.rank, sent)[1].tolist(), *range(self.ranks)] for sent in (True, False))
        with lost_others(self.rank):
            for number in range(max(rounds_R)):
                part = slice(number * size, (number + 1) * size)
                peers = {peer: self._rounds_R[peer] % 2 for peer in dict.fromkeys(receivers) if number < rounds_R[peer]}
                self._put(peers, [out[part] for out in outs], observe)
                from_peers = {peer: peers[peer] for peer in dict.fromkeys(senders) if peer in peers}
                self._take(from_peers, [into[part] for into in intos], observe)
                for peer in peers:
                    self._rounds_R[peer] += 1

    def _put(self, half_of: dict[int, int], outs: Sequence[torch.Tensor], observe: Observe) -> None:
        """Queues a round's puts, to peers in this sequence, each from and into a half."""
        calls = self._calls
        for peer, half in half_of.items():
            calls.copy(calls.outbox[half, peer, : len(outs[peer])], outs[peer])
        mark = self._timer.mark()
        for peer, half in half_of.items():
            calls.put(peer, half, max(len(outs[peer]), LEAST_BYTES))
            mark = self._queue([(peer, True, len(outs[peer]))], mark, observe)

    def _take(self, half_of: dict[int, int], intos: Sequence[torch.Tensor], observe: Observe) -> None:
        """Queues the waits for a round's signals, and copies of what has come."""
        calls, start = self._calls, self._timer.mark()
        for peer, half in half_of.items():
            calls.wait_signal(peer, half)
            self._queue([(peer, False, len(intos[peer]))], start, observe)
            calls.copy(intos[peer], calls.inbox[half, peer, : len(intos[peer])])

    def wait(self) -> None:
        """Waits until this rank's transfers are done; see `Transport.wait`."""
        began_s = looked_s = time.monotonic()
        while self._queued:
            oldest, now_s = self._queued[0], time.monotonic()
            with lost_others(self.rank):
                reached = self._timer.reached(oldest.end)
            if reached:
                self._report_oldest(self._timer.seconds(oldest.start), self._timer.seconds(oldest.end))
                continue
            if now_s - looked_s > CHECK_S:
                looked_s = now_s
                if (failure := self._lost_while_waiting([oldest.moves[0][0]], now_s - began_s, self._timeout_s)) is not None:
                    raise failure
            time.sleep(LOOK_S)


def put_transport(device: str, timeout_s: float, heartbeats: Heartbeats) -> PutTransport:
    """Returns a PutTransport over new NCCL groups (on CPUs, for tests: gloo groups) of all ranks. A collective call.

    Args:
        device: this rank's device; a GPU must be the current device.
        timeout_s: seconds to wait for a peer.
        heartbeats: heartbeats of all ranks.

    Raises:
        BadInput: if this NCCL has no one-sided calls.
    """
    on_gpu = device != "cpu"
    if on_gpu and (version := torch.cuda.nccl.version()) < NCCL:  # type: ignore[no-untyped-call]
        raise BadInput(
            f"`transport` put: expected NCCL {'.'.join(map(str, NCCL))} or newer, found {'.'.join(map(str, version))}"
        )
    group, control = (new_process_group(backend, timeout_s) for backend in ("nccl" if on_gpu else "gloo", "gloo"))
    size = BUFFER_BYTES // (4 * group.size()) // PART_ALIGNED * PART_ALIGNED
    calls = NcclPutCalls(group, device, size) if on_gpu else GlooPutCalls(group, GLOO_BYTES)
    return PutTransport(calls, GlooTransport(control, None, heartbeats), timeout_s, heartbeats)
