"""Whose turn it is, where several servers share GPUs. A rank that waits for others of its server never holds its GPU."""

import datetime
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from aurora.errors import BadInput
from aurora.runtime.distributed.transport import Observe, Transport
from aurora.runtime.port_arbiter import PortArbiter
from aurora.runtime.process_port_arbiter import ProcessPortArbiter
from aurora.types import Order

TURN_S = 300.0  # that a rank waits for a server which lives


class TimeSlices:
    """This rank's turns at its GPU. through: between its all-to-alls a forward pass waits for no other rank."""

    def __init__(self, turnstile: PortArbiter, through: bool) -> None:
        self.turnstile, self.through = turnstile, through
        self._holds = False

    def compute(self) -> None:
        """The GPU is this server's until `rest`."""
        if not self._holds:
            self.turnstile.start_compute()
            self._holds = True

    def rest(self) -> None:
        if self._holds:
            self._holds = False
            self.turnstile.stop_compute()

    @contextmanager
    def meeting(self) -> Iterator[None]:
        """Inside, this rank may wait for others."""
        held = self._holds
        self.rest()
        yield
        if held:
            self.compute()


class TimeSlicedTransport:
    """A transport whose exchanges wait for their turn on the port."""

    def __init__(self, transport: Transport, turnstile: PortArbiter) -> None:
        self._transport, self._turnstile = transport, turnstile
        self.rank, self.ranks = transport.rank, transport.ranks

    def gather(self, row: torch.Tensor) -> torch.Tensor:
        return self._transport.gather(row)

    def exchange(self, order: Order, sends: Sequence[torch.Tensor], recvs: Sequence[torch.Tensor], observe: Observe) -> None:
        with self._turnstile.exchange():
            self._transport.exchange(order, sends, recvs, observe)


def meet(
    store: Any, key: str, rank: int, folder: Path, timeout_s: float, finish: Callable[[], None] = lambda: None
) -> ProcessPortArbiter:
    """This rank's turnstile among the servers of `folder`: rank 0 takes a slot and tells it over `store`, a torch.distributed
    Store. finish: waits for what was handed to the GPU. BadInput where there is no slot for all of this server's ranks.
    """
    if rank == 0:
        slot = ""
        try:
            first = ProcessPortArbiter(folder, 0, TURN_S, None, finish)
            slot = str(first.slot)
        finally:
            store.set(f"{key}/slot", slot)
        return first
    try:
        store.wait([f"{key}/slot"], datetime.timedelta(seconds=timeout_s))
    except RuntimeError:
        raise BadInput(f"colocate: rank 0 told no slot within {timeout_s:g} s") from None
    told = store.get(f"{key}/slot").decode()
    if not told:
        raise BadInput("colocate: rank 0 has no slot")
    return ProcessPortArbiter(folder, rank, TURN_S, int(told), finish)
