"""Birkhoff decomposition: an integer matrix is split into slots of one-to-one transfers, largest first. Compiled."""

import numpy as np

from aurora.types.arrays import IntArray
from aurora.types.compiled import njit


@njit(cache=True)
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
    left_GG, total_GG = work_GG.copy(), work_GG + _padding(work_GG)
    todo = work_GG.sum()
    partner_G, sender_G, width_G, from_G = np.full((4, n), -1)
    length, slot = total_GG.max() if n else 0, 0
    while todo > 0 and slot < most:
        for src in range(n):
            if partner_G[src] >= 0 and total_GG[src, partner_G[src]] < length:
                sender_G[partner_G[src]] = partner_G[src] = -1
        for src in range(n):
            if partner_G[src] < 0:
                length = _augment(total_GG, partner_G, sender_G, src, length, width_G, from_G)
        for src in range(n):
            dst = partner_G[src]
            units = min(left_GG[src, dst], length)  # the work first, then the padding
            left_GG[src, dst] -= units
            total_GG[src, dst] -= length
            todo -= units
            partner_XG[slot, src], units_XG[slot, src] = dst, units
        length_X[slot] = length
        slot += 1
    return length_X[:slot], partner_XG[:slot], units_XG[:slot]


@njit(cache=True)
def _augment(total_GG, partner_G, sender_G, src, length, width_G, from_G):
    """Gives a sender a partner along an augmenting path; returns the path's smallest entry or `length`, whichever is less.

    Of the entries of at least `length` the path takes small ones, which leaves fewer parts. If there are none, it takes the
    largest there is, so that the result is as large as possible. width_G and from_G (n,) are scratch memory: each receiver's
    largest entry on a path to it, -1 once it has been seen, and the last sender of that path.
    """
    n = len(total_GG)
    for dst in range(n):
        width_G[dst], from_G[dst] = total_GG[src, dst], src
    while True:
        dst = widest = -1
        for receiver in range(n):
            if width_G[receiver] >= length and (dst < 0 or width_G[receiver] < width_G[dst]):
                dst = receiver
            if widest < 0 or width_G[receiver] > width_G[widest]:
                widest = receiver
        if dst < 0:
            dst, length = widest, width_G[widest]
        if sender_G[dst] < 0:
            break
        width_G[dst] = -1
        sender = sender_G[dst]
        for receiver in range(n):
            if 0 <= width_G[receiver] < total_GG[sender, receiver]:
                width_G[receiver], from_G[receiver] = total_GG[sender, receiver], sender
    while dst >= 0:
        sender_G[dst] = from_G[dst]
        partner_G[from_G[dst]], dst = dst, partner_G[from_G[dst]]
    return length


@njit(cache=True)
def _padding(work_GG):
    """(n, n) what to add so that all rows and columns have the largest sum."""
    rows, columns = work_GG.sum(axis=1), work_GG.sum(axis=0)
    most = max(rows.max(), columns.max()) if len(work_GG) else 0
    return north_west(most - rows, most - columns)


@njit(cache=True)
def north_west(lacks_row: IntArray, lacks_column: IntArray) -> IntArray:
    """Returns (n, n) int64 with the given row and column sums, of equal totals, by the north-west corner rule."""
    lacks_row, lacks_column = lacks_row.copy(), lacks_column.copy()
    padding_GG = np.zeros((len(lacks_row), len(lacks_column)), np.int64)
    i = j = 0
    while i < len(lacks_row) and j < len(lacks_column):
        amount = min(lacks_row[i], lacks_column[j])
        padding_GG[i, j] += amount
        lacks_row[i] -= amount
        lacks_column[j] -= amount
        if lacks_row[i] == 0:
            i += 1
        else:
            j += 1
    return padding_GG
