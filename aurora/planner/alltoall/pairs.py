"""Ordered pairs of ranks: the rows of orders."""

import numpy as np
from numba import njit

from aurora.types.arrays import IntArray


def all_pairs(ranks: int) -> IntArray:
    """Returns (X, 2) int64, every (source, destination) with different ranks, by source."""
    return np.argwhere(~np.eye(ranks, dtype=np.bool_))


def rotated_pairs(ranks: int) -> IntArray:
    """Returns the rows of `all_pairs` in the sequence (i, i + 1), (i, i + 2), ... mod ranks, all ranks i in each step.

    Ranks that post their messages in this sequence send to different ranks first, as engines' own all-to-alls do.
    """
    src_X, step_X = np.tile(np.arange(ranks), max(ranks - 1, 0)), np.repeat(np.arange(1, ranks), ranks)
    return np.stack([src_X, (src_X + step_X) % ranks], axis=1)


def with_silent_pairs(pairs_X2: IntArray, bytes_GG: IntArray) -> IntArray:
    """Returns the rows pairs_X2 (X, 2), then every pair without bytes in bytes_GG (G, G), because an order serves any batch."""
    return np.asarray(_with_silent_pairs(np.ascontiguousarray(pairs_X2), np.ascontiguousarray(bytes_GG)))


@njit(cache=True)
def _with_silent_pairs(pairs_X2, bytes_GG):
    """See `with_silent_pairs`; each layout of memory would be compiled anew."""
    n, at = len(bytes_GG), len(pairs_X2)
    rows_X2 = np.empty((at + n * n, 2), np.int64)
    rows_X2[:at] = pairs_X2
    for src in range(n):
        for dst in range(n):
            if bytes_GG[src, dst] == 0 and src != dst:
                rows_X2[at] = src, dst
                at += 1
    return rows_X2[:at]
