"""Time slices of colocated servers: one server at a time computes on each GPU, and one at a time sends on its port.

A rank that waits for other ranks of its own server never holds its GPU, so that servers cannot deadlock. A batch server may cut
its all-to-alls, so that interactive servers wait for a slice of one and not for all of it.
"""

import datetime
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from aurora.errors import BadInput
from aurora.moe.transport import ExchangeStep, Transport
from aurora.types import Network, Order, SlicePolicy
from aurora.types.arrays import IntArray

if TYPE_CHECKING:
    from aurora.runtime.port_arbiter import PortArbiter
    from aurora.runtime.process_port_arbiter import ProcessPortArbiter


class TimeSlices:
    """Holds and releases this rank's GPU and port in turn with colocated servers, through a port arbiter.

    Args:
        arbiter: port arbiter of this server on this GPU; None if no other server shares it.
        holds_between_layers: True: this server keeps the GPU between the all-to-alls of a forward pass. False under tensor
            parallelism, because its ranks wait for each other there.
        slice_s: as in `SlicePolicy`.
    """

    def __init__(
        self, arbiter: "PortArbiter | None" = None, holds_between_layers: bool = False, slice_s: float = float("inf")
    ) -> None:
        self.arbiter, self.holds_between_layers, self._slice_s = arbiter, holds_between_layers, slice_s
        self._holds_gpu = False

    def hold_gpu(self) -> None:
        """Waits for the GPU, and holds it until `release_gpu`."""
        if self.arbiter is not None and not self._holds_gpu:
            self.arbiter.start_compute()
            self._holds_gpu = True

    def release_gpu(self) -> bool:
        """Releases the GPU to other servers, if it is held. Returns True if it was held."""
        if (was_held := self._holds_gpu) and self.arbiter is not None:
            self._holds_gpu = False
            self.arbiter.stop_compute()
        return was_held

    @contextmanager
    def exchanging(self, transport: Transport) -> Iterator[None]:
        """Context manager around one all-to-all: waits for the port, and releases it when the transfers are done.

        If no other server shares the port, it waits neither for the port nor for the transfers.
        """
        if self.arbiter is None:
            yield
            return
        with self.arbiter.exchange():
            yield
            if not self.arbiter.exclusive:
                transport.wait()  # another server's process gets the port

    @property
    def cuts(self) -> bool:
        """True if all-to-alls are cut into slices, by `cut`."""
        return self._slice_s < float("inf")

    def cut(self, transport: Transport, order: Order, bytes_SGG: IntArray, network: Network) -> ExchangeStep:
        """Returns a function(sends, recvs) that performs one step of an all-to-all in slices, each of which waits for the port.

        Args:
            transport: carries tensors between the expert-parallel ranks.
            order: the order of each step.
            bytes_SGG: (S, G, G) bytes from each rank to each other in each step. If S > 1 (hierarchical), steps are not cut.
            network: the ports' rates.
        """
        from aurora.algorithms.arbitration import slices_of
        from aurora.runtime.port_arbiter import in_slices

        assert self.arbiter is not None, "servers that share no port cut nothing"

        def exchange(sends: Sequence[torch.Tensor], recvs: Sequence[torch.Tensor]) -> None:
            transport.exchange(order, sends, recvs, lambda *_event: None)
            transport.wait()  # another server's process gets the port

        pieces = slices_of(bytes_SGG[0], network, self._slice_s) if len(bytes_SGG) == 1 else 1
        return in_slices(self.arbiter, pieces, exchange)


def join_port_arbiter(
    store: Any,
    key: str,
    rank: int,
    folder: Path,
    timeout_s: float,
    finish: Callable[[], None] = lambda: None,
    policy: SlicePolicy = SlicePolicy(),
) -> "ProcessPortArbiter":
    """Returns this rank's port arbiter among the servers that share GPUs through `folder`.

    An arbiter process numbers the servers. Rank 0 gets this server's number, its slot, and publishes it to the other ranks.

    Args:
        store: a torch.distributed Store that all ranks of this server reach.
        key: prefix of the store's keys.
        rank: this rank, which uses the GPU with its number.
        folder: the folder of the servers' arbiter process.
        timeout_s: seconds that other ranks wait for rank 0's slot.
        finish: called before the GPU is released; must wait for the work launched on it.
        policy: how the server shares GPUs and ports, the same on all ranks.

    Raises:
        BadInput: if the arbiter cannot be reached, or rank 0 published no slot.
    """
    from aurora.runtime.process_port_arbiter import ProcessPortArbiter

    if rank == 0:
        slot = ""
        try:
            arbiter = ProcessPortArbiter(folder, 0, None, finish, policy=policy)
            slot = str(arbiter.slot)
        finally:
            store.set(f"{key}/slot", slot)
        return arbiter
    try:
        store.wait([f"{key}/slot"], datetime.timedelta(seconds=timeout_s))
    except RuntimeError:
        raise BadInput(f"colocate: rank 0 published no slot within {timeout_s:g} s") from None
    slot = store.get(f"{key}/slot").decode()
    if not slot:
        raise BadInput("colocate: rank 0 has no slot")
    return ProcessPortArbiter(folder, rank, int(slot), finish, policy=policy)
