"""Birkhoff decomposition: an integer matrix is split into slots of one-to-one transfers, largest first."""

import numpy as np

from aurora.algorithms.alltoall import decomposition_core as core
from aurora.types.arrays import IntArray


def slots(work_GG: IntArray, most: int) -> tuple[IntArray, IntArray, IntArray]:
    """Decomposes work (Birkhoff) into slots: rounds of one-to-one transfers.

    In a slot every sender serves one receiver, and no receiver has two senders. The slots' lengths sum exactly to the largest
    row or column sum, and every unit of work is served once. Each slot is the perfect matching whose smallest entry is largest;
    that takes about 4-5 n slots instead of up to n^2 - 2n + 2. The search for a matching begins with those pairs of the
    previous slot that are still large enough, and completes it by augmenting paths.

    Args:
        work_GG: (n, n) int64, units of work from each sender to each receiver.
        most: maximum number of slots; the remaining work is left to the caller.

    Returns:
        (length_X, partner_XG, units_XG): in slot x, of length_X[x] units, sender i serves units_XG[x, i] <= length_X[x] units
        of its work for receiver partner_XG[x, i].

    Source: Birkhoff 1946; Aurora Thm 4.2; Derigs & Zimmermann 1978 (bottleneck assignment).
    """
    n = len(work_GG)
    most = min(most, n * n)  # each slot uses up an entry
    length_X, partner_XG, units_XG = np.empty(most, np.int64), np.empty((most, n), np.int64), np.empty((most, n), np.int64)
    found = core.fill_slots(work_GG.copy(), work_GG + _padding(work_GG), length_X, partner_XG, units_XG)
    return length_X[:found], partner_XG[:found], units_XG[:found]


def _padding(work_GG: IntArray) -> IntArray:
    """(n, n) what to add so that all rows and columns have the largest sum, by the north-west corner rule."""
    row_G, column_G = work_GG.sum(axis=1), work_GG.sum(axis=0)
    most = max(row_G.max(initial=0), column_G.max(initial=0))
    row_G, column_G = most - row_G, most - column_G
    upto_G1, upto_G = row_G.cumsum()[:, None], column_G.cumsum()
    padding_GG = np.minimum(upto_G1, upto_G) - np.maximum(upto_G1 - row_G[:, None], upto_G - column_G)
    return np.asarray(padding_GG.clip(min=0))
