"""NCCL transport: one GPU per rank. An order runs in stages; a stage is one grouped call of NCCL sends and receives."""

import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, wait
from contextlib import nullcontext
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from aurora.errors import RankFailed
from aurora.moe.transport import Observe, peer_lost, row_slices
from aurora.runtime.phase_recorder import StreamTimer, Timer
from aurora.runtime.transports.gloo import GlooTransport
from aurora.runtime.transports.process_groups import Heartbeats, abort_nccl_groups, nccl_failure, new_process_group
from aurora.types import Order

MOST_QUEUED = 4096  # stages whose times have not been read
CHECK_S = 0.5  # between two looks at peers that an exchange waits for


class End(NamedTuple):
    """This rank's end of a transfer: a tensor that it sends to a peer, or receives from it."""

    peer: int  # the rank at the other end
    sent: bool  # whether this rank sends
    tensor: torch.Tensor  # the contiguous tensor to send or to fill


class GroupedCalls(Protocol):
    """Interface through which NcclTransport calls NCCL on a CUDA stream; tests implement it with an emulation."""

    rank: int
    ranks: int
    device: str
    timer: Timer  # of the current stream

    def post(self, ends: Sequence[End]) -> None:
        """Queues one grouped call on the current stream. Raises RuntimeError if the communicator has failed."""

    @property
    def failure(self) -> RankFailed | None:
        """Error with which the calls of this process were aborted, by this or another transport; None: not aborted."""

    def abort(self, failure: RankFailed) -> None:
        """Aborts all NCCL calls of this process, so that calls which wait for peers end. May be called in any thread."""


class NcclCalls:
    """GroupedCalls of an NCCL process group.

    NCCL runs the calls of a communicator in stream order. The transfers of a grouped call run side by side, each as soon as the
    call has started at both ends, and the call ends when all have ended. Small messages are buffered, so a sender's call may
    end before they are received.

    Args:
        group: an NCCL process group; None: the default one.
        device: this rank's CUDA device, the current one.
        timer: timer of the current stream; None: a StreamTimer.
    """

    def __init__(self, group: Any, device: str, timer: Timer | None = None) -> None:
        self.rank, self.ranks, self.device = dist.get_rank(group), dist.get_world_size(group), device
        self.timer = StreamTimer(0.0) if timer is None else timer
        self._group = group

    def post(self, ends: Sequence[End]) -> None:
        """Queues one grouped call on the current stream; see `GroupedCalls.post`."""
        calls = [
            dist.P2POp(dist.isend if sent else dist.irecv, tensor, group=self._group, group_peer=peer)
            for peer, sent, tensor in ends
        ]
        for work in dist.batch_isend_irecv(calls):
            work.wait()  # the current stream waits, not this thread

    @property
    def failure(self) -> RankFailed | None:
        """Error with which the communicators of this process were aborted; see `GroupedCalls.failure`."""
        return nccl_failure()

    def abort(self, failure: RankFailed) -> None:
        """Aborts this process's communicators; see `GroupedCalls.abort`."""
        abort_nccl_groups(failure)


def first_call(calls: GroupedCalls) -> list[End]:
    """Returns this rank's sends and receives of a grouped call in which every pair of ranks exchanges one byte."""
    others = [peer for peer in range(calls.ranks) if peer != calls.rank]
    out, into = torch.zeros(2, calls.ranks, dtype=torch.uint8, device=calls.device)
    return [End(peer, sent, row[peer : peer + 1]) for sent, row in ((True, out), (False, into)) for peer in others]


class _Queued(NamedTuple):
    """Transfers that are queued together, such as those of a stage, and whose times have not been read."""

    moves: list[tuple[int, bool, int]]  # peer, whether sent, bytes
    start: Any  # marks before and after them
    end: Any
    observe: Observe
    since_s: float  # by time.monotonic


class NcclTransport:
    """Transport that runs an order in stages on the current CUDA stream; each stage is one grouped NCCL call.

    Stage s contains this rank's transfers with number s in `Order.stage_X`, and waits only for their partners. An order that
    lets ranks send everything at once has a single stage.

    `exchange` queues its stages and returns. The host waits for them in `wait` and `gather`, and when more than MOST_QUEUED
    stages are queued.

    NCCL waits for a lost peer for ever. So with `timeout_s`, a thread checks the oldest unfinished stage every CHECK_S. If
    the connection to a peer is broken, or `timeout_s` have passed, the thread aborts all communicators of this process, and
    waiting calls raise RankFailed. The error names the ranks whose heartbeats have stopped, or else the ranks for which the
    stage waits.

    The constructor is a collective call, because NCCL connects a communicator in its first call, while later calls may involve
    only some ranks. This first call cannot be aborted. With `timeout_s` it runs in a thread, which is abandoned if a peer is
    lost.

    Args:
        calls: the calls of an NCCL process group.
        control: a gloo transport of the same ranks. It performs `gather`, so that only exchanges use the GPU, in the port
            arbiter's sequence on every rank; and it detects lost peers. None: `gather` cannot be called, and broken
            connections are not detected.
        timeout_s: seconds that an exchange may take; None: only the group's own time-out applies.
        heartbeats: heartbeats of all ranks, which reveal ranks that hang; None: not used.
    """

    has_collective = False
    in_stages = True  # a single stage is NCCL's own all-to-all

    def __init__(
        self,
        calls: GroupedCalls,
        control: GlooTransport | None,
        timeout_s: float | None = None,
        heartbeats: Heartbeats | None = None,
    ) -> None:
        self.rank, self.ranks = calls.rank, calls.ranks
        self._calls, self._timer, self._control, self._heartbeats = calls, calls.timer, control, heartbeats
        self._queued: deque[_Queued] = deque()
        if self.ranks > 1:
            self._make_communicator(timeout_s)
            if timeout_s is not None and control is not None:
                watch = threading.Thread(target=_watch, args=(weakref.ref(self), timeout_s), daemon=True, name="aurora-peers")
                watch.start()

    def exchange(
        self, order: Order | None, sends: Sequence[torch.Tensor], recvs: Sequence[torch.Tensor], observe: Observe
    ) -> None:
        """Queues one all-to-all in `order`; see `Transport.exchange`."""
        assert order is not None, "it has no all-to-all of its own"
        stages = self._stages(order, sends, recvs)
        if not stages:
            return
        try:
            mark = self._timer.mark()
            for ends in stages:
                self._calls.post(ends)
                mark = self._queue([(peer, sent, int(tensor.nbytes)) for peer, sent, tensor in ends], mark, observe)
        except RuntimeError as error:
            raise self._calls.failure or peer_lost(self.rank, (), error) from None
        while len(self._queued) > MOST_QUEUED:
            self._wait_for_oldest()

    def wait(self) -> None:
        """Waits until this rank's transfers are done; see `Transport.wait`."""
        while self._queued:
            self._wait_for_oldest()

    def _queue(self, moves: list[tuple[int, bool, int]], start: Any, observe: Observe) -> Any:
        """Notes transfers (peer, whether sent, bytes) that have been queued since the mark `start`; returns the mark after."""
        self._queued.append(_Queued(moves, start, self._timer.mark(), observe, time.monotonic()))
        return self._queued[-1].end

    def _report_oldest(self, start_s: float, end_s: float) -> None:
        """Reports the transfers that were queued first, with their times."""
        moves, *_, observe, _ = self._queued.popleft()
        for peer, sent, size in moves:
            if size:
                observe(peer, sent, size, start_s, end_s)

    def gather(self, row: torch.Tensor) -> torch.Tensor:
        """Waits for this rank's transfers, then all-gathers a small tensor; see `Transport.gather`."""
        assert self._control is not None
        self.wait()
        return self._control.gather(row.cpu())

    def _lost_while_waiting(self, peers: Sequence[int], waited_s: float, timeout_s: float) -> RankFailed | None:
        """The failure of a call that has waited for `peers`, if one of all ranks is lost; names who hangs, if that is known."""
        if self._control is not None and (lost := self._control.broken_peers()):
            return peer_lost(self.rank, lost, RuntimeError("the connection is broken"))
        if waited_s < timeout_s:
            return None
        hung = self._heartbeats.silent if self._heartbeats is not None else []
        return peer_lost(self.rank, hung or peers, RuntimeError(f"nothing within {timeout_s:g} s"))

    def check_peers(self, timeout_s: float) -> bool:
        """Aborts the communicators if an exchange waits for a lost peer, has waited `timeout_s`, or the GPU has failed.

        Returns:
            True if they were aborted.
        """
        queued = self._queued.copy()  # another thread adds and removes
        try:
            waiting = next((exchange for exchange in queued if not self._timer.reached(exchange.end)), None)
        except RuntimeError as error:  # an error of CUDA stays: all later calls of this process fail too
            self._calls.abort(peer_lost(self.rank, (), error))
            return True
        if waiting is None or (waited_s := time.monotonic() - waiting.since_s) < CHECK_S:
            return False
        failure = self._lost_while_waiting(sorted({peer for peer, _, _ in waiting.moves}), waited_s, timeout_s)
        if failure is not None:
            self._calls.abort(failure)
        return failure is not None

    def _make_communicator(self, timeout_s: float | None) -> None:
        """Posts the first call. Raises RankFailed if a peer is lost meanwhile."""
        future: Future[None] = Future()
        ends = first_call(self._calls)
        on_gpu = self._calls.device != "cpu"
        stream = torch.cuda.current_stream(self._calls.device) if on_gpu else None

        def post() -> None:
            try:
                with nullcontext() if stream is None else torch.cuda.stream(stream):
                    self._calls.post(ends)
                future.set_result(None)
            except BaseException as error:
                future.set_exception(error)

        if timeout_s is None or self._control is None:
            post()
        else:
            began_s, peers = time.monotonic(), sorted({end.peer for end in ends})
            threading.Thread(target=post, daemon=True, name="aurora-communicator").start()
            while not wait([future], CHECK_S).done:
                if (failure := self._lost_while_waiting(peers, time.monotonic() - began_s, timeout_s)) is not None:
                    raise failure
        try:
            future.result()
        except RuntimeError as error:
            raise peer_lost(self.rank, (), error) from None

    def _stages(self, order: Order, sends: Sequence[torch.Tensor], recvs: Sequence[torch.Tensor]) -> list[list[End]]:
        """This rank's transfers that carry bytes, stage by stage."""
        stages: dict[int, list[End]] = {}
        for sending, tensors in ((True, sends), (False, recvs)):
            for row, peer, tensor in row_slices(order, self.rank, tensors, sending):
                stages.setdefault(int(order.stage_X[row]), []).append(End(peer, sending, tensor))
        return [stages[number] for number in sorted(stages)]

    def _wait_for_oldest(self) -> None:
        """Waits for the stage queued first and reports its transfers. Raises RankFailed if it was aborted."""
        oldest = self._queued[0]
        try:
            start_s, end_s = map(self._timer.seconds, (oldest.start, oldest.end))
        except RuntimeError as error:
            raise self._calls.failure or peer_lost(self.rank, (), error) from None
        if self._calls.failure is not None:  # not kept here: it would refer to itself, and keep all that its frames hold
            raise self._calls.failure
        self._report_oldest(start_s, end_s)


def nccl_transport(device: str, timeout_s: float, heartbeats: Heartbeats) -> NcclTransport:
    """Returns a transport over new NCCL and gloo groups of all ranks. A collective call.

    Args:
        device: this rank's CUDA device, which is the current device.
        timeout_s: seconds to wait for a peer.
        heartbeats: heartbeats of all ranks.
    """
    group, control = (new_process_group(backend, timeout_s) for backend in ("nccl", "gloo"))
    return NcclTransport(NcclCalls(group, device), GlooTransport(control, None, heartbeats), timeout_s, heartbeats)


def _watch(of: "weakref.ref[NcclTransport]", timeout_s: float) -> None:
    """Checks a transport's peers until one is lost or nobody uses the transport."""
    aborted = False
    while not aborted:
        time.sleep(CHECK_S)
        if (transport := of()) is None:
            return
        aborted = transport.check_peers(timeout_s)
        del transport
