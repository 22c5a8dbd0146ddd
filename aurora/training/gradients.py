"""Sums of gradients over the ranks that hold a weight: dense weights are on all ranks, an expert's on those of its replicas."""

from collections.abc import Mapping

import torch

from aurora.moe.transport import Transport
from aurora.training.tensor_exchange import exchange_tensors
from aurora.types import Order

Holders = tuple[int, ...]  # ranks that hold the same weights, ascending


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
