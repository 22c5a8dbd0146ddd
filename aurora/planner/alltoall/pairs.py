"""Ordered pairs of ranks, as rows of orders."""

import numpy as np

from aurora.types import Order
from aurora.types.arrays import IntArray


def all_pairs(ranks: int) -> list[tuple[int, int]]:
    """Every (source, destination), by source."""
    return [(src, dst) for src in range(ranks) for dst in range(ranks) if src != dst]


def silent_pairs(bytes_GG: IntArray) -> IntArray:
    """(X, 2) int64: the pairs that have nothing to send in this batch. Orders name them last, because they serve any batch."""
    return np.argwhere((bytes_GG == 0) & ~np.eye(len(bytes_GG), dtype=np.bool_))


def order_of(method: str, pairs: list[tuple[int, int]], sends_open: int = 1, recvs_open: int = 1) -> Order:
    """An Order of these pairs, each whole."""
    return Order(method, np.array(pairs, dtype=np.int64).reshape(-1, 2), sends_open, recvs_open)
