"""GPUs of an elastic run: which transport it takes, and what its NCCL communicators ask of a rank's GPU."""

import datetime
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch

from aurora.errors import BadInput
from aurora.runtime.phase_recorder import StreamTimer, Timer
from aurora.runtime.transports.process_groups import keep_watchdogs_from_ending_the_process


class RankGpu(Protocol):
    """Calls that communicators of an epoch make to this rank's GPU. Tests put an emulation in its place."""

    device: str

    def new_group(self, store: str, epoch: int, rank: int, ranks: int, timeout_s: float) -> Any:
        """Makes a group of torchft's for NCCL, with its communicator. A collective call, which may wait for a lost rank."""

    def aside(self) -> AbstractContextManager[Any]:
        """Context manager in which this thread's work goes to a stream of its own, for which no other one waits."""

    def timer(self) -> Timer:
        """Returns a timer of the streams of the threads that use it."""

    def synchronize(self) -> None:
        """Waits until all that is queued has ended. Raises RuntimeError if the GPU has failed."""


class NcclGpu:
    """A CUDA device, and how its NCCL groups are made; see `RankGpu`.

    Args:
        device: the device, such as "cuda:0".
    """

    def __init__(self, device: str) -> None:
        self.device = device

    def new_group(self, store: str, epoch: int, rank: int, ranks: int, timeout_s: float) -> Any:
        """Makes the group; see `RankGpu.new_group`. It does not block: a call it is not ready for fails after timeout_s."""
        from torchft.process_group import ProcessGroupNCCL  # takes a while

        keep_watchdogs_from_ending_the_process()
        os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", str(timeout_s))
        group = ProcessGroupNCCL(datetime.timedelta(seconds=timeout_s))
        group.configure(store, str(rank), rank, ranks, quorum_id=epoch)
        return group

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Uses a new stream of the device; see `RankGpu.aside`."""
        with torch.cuda.device(self.device):
            stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            with torch.cuda.stream(stream):
                yield

    def timer(self) -> Timer:
        """A timer by events; see `RankGpu.timer`."""
        return StreamTimer(0.0)

    def synchronize(self) -> None:
        """Waits for all streams of the device; see `RankGpu.synchronize`."""
        torch.cuda.synchronize(self.device)


def transport_of_host(asked: str, ranks: int) -> str:
    """Returns the transport that this host's ranks take in an elastic run; all hosts have to take the same.

    Args:
        asked: name of a transport; "auto": nccl where every rank has a GPU, else gloo.
        ranks: ranks of this host.

    Raises:
        BadInput: if nccl is asked for and there are too few GPUs.
    """
    if asked not in ("auto", "nccl"):
        return asked
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if asked == "nccl" and found < ranks:
        raise BadInput(f"`transport` nccl: expected a CUDA device for each of {ranks} ranks, found {found}")
    return "nccl" if asked == "nccl" or 0 < ranks <= found else "gloo"


def gpu_of_rank(transport: str, local_rank: int, over_hosts: bool) -> RankGpu | None:
    """Returns the GPU of a rank, which becomes the current one of this thread; None if the transport needs none.

    Args:
        transport: of the run, as `transport_of_host` returns it.
        local_rank: the rank's number among those of this host.
        over_hosts: whether the run has ranks on other hosts; if not, nothing listens but on loopback.
    """
    if transport != "nccl":
        return None
    if not over_hosts:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    torch.cuda.set_device(local_rank)
    return NcclGpu(f"cuda:{local_rank}")
