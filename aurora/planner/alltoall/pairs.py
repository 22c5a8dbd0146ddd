"""Ordered pairs of ranks: the rows of orders."""

import numpy as np

from aurora.types.arrays import IntArray


def all_pairs(ranks: int) -> IntArray:
    """Returns (X, 2) int64, every (source, destination) with different ranks, by source."""
    return np.argwhere(~np.eye(ranks, dtype=np.bool_))


def silent_pairs(bytes_GG: IntArray) -> IntArray:
    """Returns (X, 2) int64, the pairs without bytes in bytes_GG (G, G).

    Orders name them last, because an order serves any batch.
    """
    return np.argwhere((bytes_GG == 0) & ~np.eye(len(bytes_GG), dtype=np.bool_))
