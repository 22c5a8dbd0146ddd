"""Base of transports over buffers of fixed size: large tensors take several rounds, as many for all ranks and all exchanges."""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from aurora.errors import BadInput
from aurora.moe.transport import Observe, row_slices
from aurora.types import Order


class RoundsTransport(ABC):
    """A Transport whose back end carries one round: of each tensor as much as a buffer holds.

    Args:
        rank, ranks: this rank, and how many there are.
        most_bytes: most bytes of a tensor.
        round_bytes: most bytes of a tensor in one round.
        device: where the tensors are.

    Attributes:
        queues: whether an exchange is queued on a stream, and not done when it returns.
    """

    has_collective = False
    queues = True

    def __init__(self, rank: int, ranks: int, most_bytes: int, round_bytes: int, device: torch.device | str) -> None:
        self.rank, self.ranks, self._device = rank, ranks, torch.device(device)
        self._most_bytes, self._round_bytes = most_bytes, round_bytes
        self._all_at_once = Order.all_at_once(ranks)
        self._half = 0  # of the buffers, which rounds use in turn

    @abstractmethod
    def _exchange_round(self, order: Order, outs: Sequence[torch.Tensor], intos: Sequence[torch.Tensor], half: int) -> None:
        """Queues one round: for each rank, the bytes (round_bytes or less) to send to it and to fill; none for this rank."""

    @abstractmethod
    def wait(self) -> None:
        """Waits until this rank's transfers are done; see `Transport.wait`."""

    def gather(self, row: torch.Tensor) -> torch.Tensor:
        """Gathers every rank's small tensor; see `Transport.gather`."""
        mine = row.contiguous().view(-1).to(self._device)
        rows = [torch.empty_like(mine) for _ in range(self.ranks)]
        self.exchange(self._all_at_once, [mine] * self.ranks, rows, lambda *_: None)
        self.wait()
        rows[self.rank].copy_(mine)
        return torch.stack(rows).view(self.ranks, *row.shape).cpu()

    def exchange(
        self, order: Order | None, sends: Sequence[torch.Tensor], recvs: Sequence[torch.Tensor], observe: Observe
    ) -> None:
        """Performs one all-to-all in `order`; see `Transport.exchange`. The times of a transfer are those of the exchange."""
        assert order is not None, "it has no all-to-all of its own"
        row_slices(order, self.rank, sends, True)  # which says what the order leaves out
        outs, intos = ([tensor.view(-1).view(torch.uint8) for tensor in tensors] for tensors in (sends, recvs))
        for tensors in (outs, intos):
            tensors[self.rank] = tensors[self.rank][:0]
        largest = max(len(each) for each in (*outs, *intos))
        if largest > self._most_bytes:
            raise BadInput(f"expected tensors of at most {self._most_bytes} bytes, as buffers were made for, found {largest}")
        began_s = time.perf_counter()
        for begin in range(0, self._most_bytes, self._round_bytes):
            part = slice(begin, begin + self._round_bytes)
            self._exchange_round(order, [out[part] for out in outs], [into[part] for into in intos], self._half)
            self._half = 1 - self._half
        if not self.queues:
            self.wait()
        ended_s = time.perf_counter()
        for sent, tensors in ((True, outs), (False, intos)):
            for peer, tensor in enumerate(tensors):
                if len(tensor):
                    observe(peer, sent, len(tensor), began_s, ended_s)
