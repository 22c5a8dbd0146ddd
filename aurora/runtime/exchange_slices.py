"""An exchange of a batch model in several time slices of the port, between which interactive models have theirs."""

from collections.abc import Sequence

import torch

from aurora.moe.transport import ExchangeStep, Transport
from aurora.planner.slice_sequence import piece
from aurora.runtime.port_arbiter import PortArbiter


def in_slices(transport: Transport, arbiter: PortArbiter, pieces: int, exchange: ExchangeStep) -> ExchangeStep:
    """Returns what performs an exchange in pieces, each in a time slice of its own.

    Args:
        transport: carries tensors between the model's ranks.
        arbiter: the model's access to this rank's port.
        pieces: into how many the exchange is cut, the same on all ranks.
        exchange: performs one piece.
    """

    def perform(sends: Sequence[torch.Tensor], recvs: Sequence[torch.Tensor]) -> None:
        for number in range(pieces):
            if number % arbiter.most_ahead == arbiter.most_ahead - 1:
                transport.gather(torch.zeros(1, dtype=torch.long))  # no rank falls behind
            out, into = ([each[piece(len(each), number, pieces)] for each in tensors] for tensors in (sends, recvs))
            with arbiter.exchange():
                exchange(out, into)

    return perform
