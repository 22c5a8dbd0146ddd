"""Ordered pairs of ranks: the rows of orders."""

import numpy as np

from aurora.types import Order
from aurora.types.arrays import IntArray


def all_pairs(ranks: int) -> list[tuple[int, int]]:
    """Returns every (source, destination) with different ranks, by source."""
    return [(src, dst) for src in range(ranks) for dst in range(ranks) if src != dst]


def silent_pairs(bytes_GG: IntArray) -> IntArray:
    """Returns (X, 2) int64, the pairs without bytes in bytes_GG (G, G).

    Orders name them last, because an order serves any batch.
    """
    return np.argwhere((bytes_GG == 0) & ~np.eye(len(bytes_GG), dtype=np.bool_))


def order_of(method: str, pairs: list[tuple[int, int]], sends_open: int = 1, recvs_open: int = 1) -> Order:
    """Returns an Order of these pairs, in this sequence, none of them split.

    Args:
        method: the order's name.
        pairs: (source, destination) of each row.
        sends_open: transfers that a rank may have under way when sending.
        recvs_open: transfers that a rank may have under way when receiving.
    """
    return Order(method, np.array(pairs, dtype=np.int64).reshape(-1, 2), sends_open, recvs_open)
