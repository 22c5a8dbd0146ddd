"""NCCL transport: one GPU per rank. An order runs in stages, each of them one grouped call of NCCL sends and receives."""

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from aurora.runtime.distributed.gloo import GlooTransport
from aurora.runtime.distributed.transport import Observe, lost_peer, row_slices
from aurora.runtime.timers import StreamTimer
from aurora.types import Order

MOST_QUEUED = 64  # exchanges whose times have not been read


class End(NamedTuple):
    """This rank's end of a transfer."""

    peer: int  # the rank at the other end
    sent: bool  # whether this rank sends
    tensor: torch.Tensor  # the contiguous tensor to send or to fill


class GroupedCalls(Protocol):
    """What a NcclTransport asks of NCCL and of a stream. Tests put an emulation of NCCL in its place."""

    rank: int
    ranks: int

    def post(self, ends: Sequence[End]) -> None:
        """Queues one grouped call on the current stream. Raises RuntimeError if the communicator has failed."""

    def mark(self) -> object:
        """Marks the present end of the current stream."""

    def seconds(self, mark: Any) -> float:
        """Returns when the stream reached a mark, by time.perf_counter; waits for it."""


class NcclCalls:
    """GroupedCalls of an NCCL process group.

    NCCL runs the calls of a communicator in stream order, and a grouped call ends as a whole: its transfers run side by side,
    each as soon as the call has started at both of its ends. Small messages are buffered, so that a sender's call may end
    earlier.

    Args:
        group: an NCCL process group; None: the default one.
        device: this rank's CUDA device, the current one.
    """

    def __init__(self, group: Any, device: str) -> None:
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self._group = group
        self._timer = StreamTimer(0.0)
        others = [peer for peer in range(self.ranks) if peer != self.rank]
        if others:
            # A communicator's first call makes it, which takes all ranks. Later calls are of some ranks only.
            out, into = torch.zeros(2, self.ranks, dtype=torch.uint8, device=device)
            ends = [
                End(peer, sent, tensor[peer : peer + 1]) for sent, tensor in ((True, out), (False, into)) for peer in others
            ]
            self.post(ends)

    def post(self, ends: Sequence[End]) -> None:
        """Queues one grouped call on the current stream; see `GroupedCalls.post`."""
        calls = [
            dist.P2POp(dist.isend if sent else dist.irecv, tensor, group=self._group, group_peer=peer)
            for peer, sent, tensor in ends
        ]
        for work in dist.batch_isend_irecv(calls):
            work.wait()  # the current stream waits, not this thread

    def mark(self) -> object:
        """Marks the present end of the current stream."""
        return self._timer.mark()

    def seconds(self, mark: Any) -> float:
        """Returns when the stream reached a mark; see `GroupedCalls.seconds`."""
        return self._timer.seconds(mark)


class _Queued(NamedTuple):
    """An exchange whose times have not been read."""

    moves: list[list[tuple[int, bool, int]]]  # of each stage: peer, whether sent, bytes
    marks: list[object]  # before the first stage, and after each
    observe: Observe


class NcclTransport:
    """A transport that runs an order in stages, each of them one grouped call, all on the current stream.

    A stage has this rank's transfers of one number in `Order.stage_X`. It waits for the partners of its transfers, and for no
    others. An order in which ranks have all transfers open has a single stage.

    `exchange` queues its stages and returns; this thread waits for them in `wait` and `gather`, and when more than MOST_QUEUED
    exchanges are queued.

    Args:
        calls: the calls of an NCCL process group.
        control: a gloo group for `gather`, so that several models' NCCL calls come in the port arbiter's sequence on every
            rank; None: `gather` cannot be called.
    """

    def __init__(self, calls: GroupedCalls, control: Any) -> None:
        self.rank, self.ranks = calls.rank, calls.ranks
        self._calls = calls
        self._control = GlooTransport(control) if control is not None else None
        self._queued: deque[_Queued] = deque()

    def gather(self, row: torch.Tensor) -> torch.Tensor:
        """Waits for this rank's transfers, then gathers every rank's small tensor over gloo; see `Transport.gather`."""
        assert self._control is not None
        self.wait()
        return self._control.gather(row.cpu())

    def exchange(self, order: Order, sends: Sequence[torch.Tensor], recvs: Sequence[torch.Tensor], observe: Observe) -> None:
        """Queues one all-to-all in `order`; see `Transport.exchange`."""
        stages = self._stages(order, sends, recvs)
        marks = [self._calls.mark()] if stages else []
        with lost_peer(self.rank, None):
            for ends in stages:
                self._calls.post(ends)
                marks.append(self._calls.mark())
        moves = [[(peer, sent, int(tensor.nbytes)) for peer, sent, tensor in ends] for ends in stages]
        self._queued.append(_Queued(moves, marks, observe))
        while len(self._queued) > MOST_QUEUED:
            self._wait_for_oldest()

    def wait(self) -> None:
        """Waits until this rank's transfers are done; see `Transport.wait`."""
        while self._queued:
            self._wait_for_oldest()

    def _stages(self, order: Order, sends: Sequence[torch.Tensor], recvs: Sequence[torch.Tensor]) -> list[list[End]]:
        """This rank's transfers that carry bytes, stage by stage."""
        stages: dict[int, list[End]] = {}
        for sending, tensors in ((True, sends), (False, recvs)):
            for row, peer, tensor in row_slices(order, self.rank, tensors, sending):
                stages.setdefault(int(order.stage_X[row]), []).append(End(peer, sending, tensor))
        return [stages[number] for number in sorted(stages)]

    def _wait_for_oldest(self) -> None:
        """Waits for the exchange queued first and reports its transfers."""
        moves, marks, observe = self._queued[0]
        seconds = [self._calls.seconds(mark) for mark in marks]
        self._queued.popleft()
        for stage, start_s, end_s in zip(moves, seconds, seconds[1:], strict=False):
            for peer, sent, size in stage:
                observe(peer, sent, size, start_s, end_s)
