"""Tensors between ranks, one message for each pair in a planned order; and sums of gradients over the ranks that hold a weight.

Dense weights are on all ranks, an expert's on those of its replicas.
"""

from collections.abc import Mapping, Sequence

import torch

from aurora.moe.transport import Transport
from aurora.types import Order

Holders = tuple[int, ...]  # ranks that hold the same weights, ascending


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


def sum_over_holders(transport: Transport, order: Order, flats: Mapping[Holders, torch.Tensor]) -> float:
    """Replaces each gradient by its sum over the ranks that hold the weights; it is the same on all of them, bit by bit.

    Two all-to-alls do it, without process groups: each holder gets one part of the gradient from all others and sums it, in the
    sequence of ranks; then it sends the sum to the others. A collective call: all ranks make it.

    Args:
        transport: carries tensors between the ranks.
        order: the order of the first all-to-all; the second is in the reversed order.
        flats: by the ranks that hold them, the gradients (X,) of all weights that these and no others hold, of one dtype; only
            those that this rank holds. They are overwritten.

    Returns:
        The sum of the squares of those parts that this rank has summed; over all ranks each element counts once.
    """
    rank, ranks = transport.rank, transport.ranks
    parts = {holders: flats[holders].tensor_split(len(holders)) for holders in sorted(flats)}  # views: one for each holder
    shared_R = [[holders for holders in parts if peer in holders and peer != rank] for peer in range(ranks)]
    theirs_R = [[parts[holders][holders.index(peer)] for holders in shared] for peer, shared in enumerate(shared_R)]
    mine_R = [[parts[holders][holders.index(rank)] for holders in shared] for shared in shared_R]
    empty = next(iter(flats.values()))
    arrived_R = exchange_tensors(transport, order, theirs_R, mine_R, empty)
    parts_of_R = [dict(zip(shared, arrived, strict=True)) for shared, arrived in zip(shared_R, arrived_R, strict=True)]
    squares = 0.0
    for holders, own in parts.items():
        mine = own[holders.index(rank)]
        first, *others = (mine.clone() if peer == rank else parts_of_R[peer][holders] for peer in holders)
        for other in others:
            first += other
        mine.copy_(first)
        squares += float(mine.double().square().sum())
    totals_R = exchange_tensors(transport, order.reversed, mine_R, theirs_R, empty)
    for theirs, totals in zip(theirs_R, totals_R, strict=True):
        for part, total in zip(theirs, totals, strict=True):
            part.copy_(total)
    return squares
