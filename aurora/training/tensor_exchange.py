"""Tensors on their way between ranks: one message for each pair, in a planned order."""

from collections.abc import Sequence

import torch

from aurora.moe.transport import Transport
from aurora.types import Order


def exchange_tensors(
    transport: Transport,
    order: Order,
    outgoing_R: Sequence[Sequence[torch.Tensor]],
    like_R: Sequence[Sequence[torch.Tensor]],
    empty: torch.Tensor,
) -> list[list[torch.Tensor]]:
    """Sends tensors to other ranks, and returns what comes from each. A collective call: all ranks make it.

    Args:
        transport: carries the messages.
        order: the order of the messages.
        outgoing_R: for each rank, the tensors to send to it; none for this rank.
        like_R: for each rank, tensors of the shapes that come from it; none for this rank.
        empty: any tensor of the dtype and on the device of all tensors.

    Returns:
        For each rank, the tensors that came from it: views of one message.

    Raises:
        RankFailed: if a rank is lost.
    """
    sends = [torch.cat([each.reshape(-1) for each in tensors]) if tensors else empty.new_empty(0) for tensors in outgoing_R]
    sizes_R = [[each.numel() for each in likes] for likes in like_R]
    recvs = [empty.new_empty(sum(sizes)) for sizes in sizes_R]
    transport.exchange(order, sends, recvs, lambda *_: None)
    transport.wait()
    return [
        [part.view(like.shape) for part, like in zip(message.split_with_sizes(sizes), likes, strict=True)]
        for message, sizes, likes in zip(recvs, sizes_R, like_R, strict=True)
    ]
