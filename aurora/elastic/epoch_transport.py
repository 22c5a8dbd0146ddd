"""gloo transport of an elastic run: calls end when the epoch is over."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from aurora.moe.transport import Observe
from aurora.runtime.transports.gloo import GlooTransport
from aurora.types import Order


class EpochTransport(GlooTransport):
    """A gloo transport over a process group of an epoch. A call ends by RankFailed when the epoch is over.

    Each call runs in a thread that may be left behind, so that what calls it, in the member's own thread, never is: no two
    threads change a member's state.

    Args:
        group: a process group of the epoch.
        perform: performs a collective, and ends it by RankFailed when the epoch is over; see `Member.perform`.
    """

    def __init__(self, group: Any, perform: Callable[[Callable[[], Any]], None]) -> None:
        super().__init__(group)
        self._until_over = perform

    def gather(self, row: torch.Tensor) -> torch.Tensor:
        """Gathers every rank's small tensor; see `Transport.gather`."""
        found: list[torch.Tensor] = []
        call = super().gather
        self._until_over(lambda: found.append(call(row)))
        return found[0]

    def exchange(
        self, order: Order | None, sends: Sequence[torch.Tensor], recvs: Sequence[torch.Tensor], observe: Observe
    ) -> None:
        """Performs one all-to-all in `order`; see `Transport.exchange`."""
        call = super().exchange
        self._until_over(lambda: call(order, sends, recvs, observe))
