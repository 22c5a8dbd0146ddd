"""NCCL in elastic runs: decides whether ranks use it, and creates an epoch's communicator on their GPUs.

Communicators are created when an epoch's members connect, aborted together when it is over, and never reused.
"""

import datetime
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from aurora.elastic.abandoned_calls import call_ends
from aurora.errors import BadInput, RankFailed, first_line
from aurora.moe.transport import peer_lost
from aurora.runtime.phase_recorder import StreamTimer, Timer
from aurora.runtime.transports.nccl import End, NcclTransport, first_call
from aurora.runtime.transports.process_groups import keep_watchdogs_from_ending_the_process


class NcclGpu:
    """This rank's CUDA device: creates the NCCL groups, streams and timers of an epoch on it.

    Args:
        device: the device, such as "cuda:0".
    """

    def __init__(self, device: str) -> None:
        self.device = device

    def new_group(self, store: str, epoch: int, rank: int, ranks: int, timeout_s: float) -> Any:
        """Returns a torchft NCCL group with its communicator. A collective call, which may wait for a lost rank.

        The communicator is non-blocking: its calls fail after timeout_s.
        """
        from torchft.process_group import ProcessGroupNCCL  # takes a while

        keep_watchdogs_from_ending_the_process()
        os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", str(timeout_s))
        group = ProcessGroupNCCL(datetime.timedelta(seconds=timeout_s))
        group.configure(store, str(rank), rank, ranks, quorum_id=epoch)
        return group

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Context manager in which this thread's work is queued on a new stream, for which no other stream waits."""
        with torch.cuda.device(self.device):
            stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            with torch.cuda.stream(stream):
                yield

    def timer(self) -> Timer:
        """Returns a StreamTimer of the calling thread's current stream."""
        return StreamTimer(0.0)

    def synchronize(self) -> None:
        """Waits until all queued work has ended. Raises RuntimeError if the GPU has failed."""
        torch.cuda.synchronize(self.device)


def transport_of_host(asked: str, ranks: int) -> str:
    """Returns the name of the transport that this host's ranks use in an elastic run; all hosts must use the same.

    Args:
        asked: the requested transport; "auto": nccl if every rank of the host has a GPU, else gloo.
        ranks: number of ranks on this host.

    Raises:
        BadInput: if nccl is requested and there are too few GPUs.
    """
    if asked not in ("auto", "nccl"):
        return asked
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if asked == "nccl" and devices < ranks:
        raise BadInput(f"`transport` nccl: expected a CUDA device for each of {ranks} ranks, found {devices}")
    return "nccl" if asked == "nccl" or 0 < ranks <= devices else "gloo"


def gpu_of_rank(transport: str, local_rank: int, over_hosts: bool) -> NcclGpu | None:
    """Returns a rank's GPU, after making it this thread's current device; None if the transport uses no GPU.

    Args:
        transport: the run's transport, from `transport_of_host`.
        local_rank: the rank's number among the ranks of this host.
        over_hosts: True: the run has ranks on other hosts; False: NCCL listens on loopback only.
    """
    if transport != "nccl":
        return None
    if not over_hosts:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    torch.cuda.set_device(local_rank)
    return NcclGpu(f"cuda:{local_rank}")


POLL_S = 2e-5  # between two looks at a mark on a stream
POSTING_S = 0.3  # that an abort waits for a call that is being posted
DRAIN_S = 60.0  # in which all that is queued on the GPU has to end, once the communicator is aborted


class EpochCalls:
    """GroupedCalls of one communicator of an epoch. When the epoch is over, its calls end, and `post` raises RuntimeError.

    Threads wait by polling the stream, so they continue when the epoch is over, even if an aborted call does not end. A wait
    inside torch, such as in `item`, ends when the calls are aborted.

    Args:
        epoch: the epoch's communicator.
        group: torchft's NCCL group; None: the rank is the only member.
        rank, ranks: this member's rank, and the number of members.
    """

    def __init__(self, epoch: "EpochCommunicator", group: Any, rank: int, ranks: int) -> None:
        self.rank, self.ranks, self.device = rank, ranks, epoch.gpu.device
        self.timer: Timer = _PolledTimer(epoch.gpu.timer(), epoch)
        self._epoch, self._group = epoch, group
        self._posting = threading.Lock()  # NCCL does not take calls of a communicator that is being aborted

    def post(self, ends: Sequence[End]) -> None:
        """Queues one grouped call on the current stream; see `GroupedCalls.post`."""
        with self._posting:
            if self._epoch.failure is not None:
                raise RuntimeError(str(self._epoch.failure))
            group, device = self._group.parent, torch.device(self.device)
            group._start_coalescing(device)
            try:
                for peer, sent, tensor in ends:
                    (group.send if sent else group.recv)([tensor], peer, 0)
            except BaseException:
                with suppress(RuntimeError):
                    group._end_coalescing(device)  # or this thread's next calls, of another epoch, would be in this group too
                raise
            work = group._end_coalescing(device)
        work.wait()  # the current stream waits, not this thread

    @property
    def failure(self) -> RankFailed | None:
        """Error with which the epoch's calls were aborted; see `GroupedCalls.failure`."""
        return self._epoch.failure

    def abort(self, failure: RankFailed) -> None:
        """Aborts the communicator of the epoch; see `GroupedCalls.abort`."""
        self._epoch.abort(failure)

    def abort_group(self) -> None:
        """Aborts and frees this communicator. May block on the GPU and on torch's threads."""
        posted = self._posting.acquire(timeout=POSTING_S)  # what is posted for longer waits for a peer
        try:
            with suppress(RuntimeError):  # that it takes too long: `drain` finds out whether it matters
                self._group.abort()
        finally:
            self._group = None
            if posted:
                self._posting.release()


class _PolledTimer:
    """A Timer whose marks are waited for until the epoch is over, and no longer."""

    def __init__(self, timer: Timer, epoch: "EpochCommunicator") -> None:
        self._timer, self._epoch = timer, epoch
        self.mark, self.reached, self.elapsed_s = timer.mark, timer.reached, timer.elapsed_s

    def seconds(self, mark: Any) -> float:
        """Returns when the work reached the mark. Raises RuntimeError if the epoch is over first."""
        while not self.reached(mark):
            if self._epoch.failure is not None:
                raise RuntimeError(str(self._epoch.failure))
            time.sleep(POLL_S)
        return self._timer.seconds(mark)


class EpochCommunicator:
    """NCCL communicator of one epoch's members, on this rank's GPU.

    Args:
        gpu: this rank's GPU.

    Attributes:
        calls: EpochCalls of the communicator, once its group is made.
    """

    def __init__(self, gpu: NcclGpu) -> None:
        self.gpu = gpu
        self.calls: EpochCalls | None = None
        self._reason: str | None = None  # why the communicator was aborted
        self._changing = threading.Lock()

    @property
    def failure(self) -> RankFailed | None:
        """Error with which the communicator was aborted (a new object at each read); None: not aborted."""
        return None if self._reason is None else RankFailed(self._reason)

    def make(self, store: str, epoch: int, rank: int, ranks: int, timeout_s: float, stopped: threading.Event) -> None:
        """Creates the communicator, and connects all pairs of ranks by a first message. A collective call.

        It runs in a new thread, which is abandoned if the epoch is over before all members have joined.

        Args:
            store, epoch, rank, ranks: of the Epoch: its store and number, this rank, and the number of members.
            timeout_s, stopped: as in `connect_groups`.

        Raises:
            RankFailed: if `stopped` is set before all have connected, or the others do not join within timeout_s.
        """

        def run() -> None:
            with self.gpu.aside():
                self._connect(f"{store}/epoch{epoch}/nccl", epoch, rank, ranks, timeout_s)

        try:
            if call_ends(run, stopped, 0.0, timeout_s):
                return
            reason = "the epoch was over before all had joined" if stopped.is_set() else f"nothing within {timeout_s:g} s"
        except (RuntimeError, OSError) as error:
            reason = first_line(error)
        self.abort(RankFailed(f"rank {rank}: cannot make a communicator with the other ranks of epoch {epoch}: {reason}"))
        assert self.failure is not None
        raise self.failure

    def _connect(self, store: str, epoch: int, rank: int, ranks: int, timeout_s: float) -> None:
        """Makes the group. Each pair's connections are made in its first call, which takes all ranks."""
        group = None if ranks == 1 else self.gpu.new_group(store, epoch, rank, ranks, timeout_s)
        calls = EpochCalls(self, group, rank, ranks)
        with self._changing:
            self.calls, late = calls, self.failure  # aborted while the group was made: `abort` did not know of it
        if ranks == 1:
            return
        if late is not None:
            calls.abort_group()
            raise late
        calls.post(first_call(calls))
        calls.timer.seconds(calls.timer.mark())

    def abort(self, failure: RankFailed) -> None:
        """Aborts all calls, in a thread: aborting waits for the GPU. May be called in any thread, and repeatedly."""
        with self._changing:
            if self._reason is not None:
                return
            self._reason, calls = str(failure), self.calls
        if calls is not None and calls.ranks > 1:
            threading.Thread(target=calls.abort_group, daemon=True, name="aurora-abort").start()

    def drain(self) -> None:
        """Waits until the GPU has finished all queued work; call `abort` before.

        Memory that an aborted call would have filled may be reused earlier, because its new use is queued behind the call.

        Raises:
            RuntimeError: if the work does not end within DRAIN_S seconds, or the GPU has failed; the GPU is then unusable.
        """
        if not call_ends(self.gpu.synchronize, threading.Event(), 0.0, DRAIN_S):
            raise RuntimeError(f"the GPU's aborted calls did not end within {DRAIN_S:g} s")


class EpochNcclTransport(NcclTransport):
    """NcclTransport over a communicator of an epoch. Its calls raise RankFailed when the epoch is over.

    Its arguments are the communicator's EpochCalls, and a gloo transport over a group of the same epoch.
    """

    def _make_communicator(self, timeout_s: float | None) -> None:
        """Nothing: it was made when the epoch's members connected."""

    def wait(self) -> None:
        """Waits until all queued GPU work is done, not only this rank's transfers; so errors of the GPU are raised here."""
        super().wait()
        timer = self._calls.timer
        try:
            timer.seconds(timer.mark())
        except RuntimeError as error:
            raise self._calls.failure or peer_lost(self.rank, (), error) from None
        if self._calls.failure is not None:
            raise self._calls.failure
