"""Birkhoff decomposition: splits an integer matrix into slots in which each rank has one partner, largest slot first."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import maximum_bipartite_matching

from aurora.planner.alltoall.open_shop import NO_CUTS, dense
from aurora.planner.alltoall.pairs import silent_pairs
from aurora.planner.network.lower_bounds import one_to_one_bound, pair_seconds
from aurora.types import Network, Order, SubChannels
from aurora.types.arrays import FloatArray, IntArray

SLOTS = 8  # slots per rank at most; Birkhoff's largest-first matchings need fewer on most traffic


def birkhoff(bytes_GG: IntArray, network: Network, *, rng: np.random.Generator, most: int | None = None) -> Order:
    """Decomposes the traffic (Birkhoff) into slots with one partner per rank; transfers are split between slots.

    It meets the one-to-one bound exactly: on equal ports in bytes, on mixed ports in units of a 2^40th of the bound. Every slot
    costs a start-up.

    Args: as in `registry.OrderStrategy`; `rng` is not used.
        most: slots to make at most; None: SLOTS * G. What is left after them goes last, in dense open-shop order.

    Source: Aurora Thm 4.2.
    """
    work_GG = bytes_GG
    if not network.equal_ports:
        free = network.without_startup
        work_GG = ticks(pair_seconds(bytes_GG, free), one_to_one_bound(bytes_GG, free))
    rows = SplitRows(work_GG)
    for _, partner_G, units_G in slots(work_GG, SLOTS * len(bytes_GG) if most is None else most):
        for src in np.flatnonzero(units_G).tolist():
            rows.serve(src, int(partner_G[src]), int(units_G[src]))
    return rows.order("birkhoff")


def slots(work_GG: IntArray, most: int) -> Iterator[tuple[int, IntArray, IntArray]]:
    """Yields the slots of a Birkhoff decomposition.

    The slots' lengths sum to the largest row or column sum, exactly, and every unit of work is served once. Each slot is the
    perfect matching whose smallest entry is largest, which takes about 4-5 n slots instead of up to n^2 - 2n + 2.

    Args:
        work_GG: (n, n) int64, units of work from each sender to each receiver.
        most: slots to make at most; the caller serves what is left.

    Yields:
        (length, partner_G, units_G): in this slot sender i serves units_G[i] <= length units of its work for partner_G[i].

    Source: Birkhoff 1946; Aurora Thm 4.2.
    """
    left_GG = work_GG.copy()
    padding_GG = _padding(work_GG)
    senders = np.arange(len(work_GG))
    for _ in range(most):
        if not left_GG.any():
            return
        total_GG = left_GG + padding_GG
        partner_G = _fattest_matching(total_GG)
        length = int(total_GG[senders, partner_G].min())
        units_G = np.minimum(left_GG[senders, partner_G], length)  # the work first, then the padding
        left_GG[senders, partner_G] -= units_G
        padding_GG[senders, partner_G] -= length - units_G
        yield length, partner_G, units_G


def _padding(work_GG: IntArray) -> IntArray:
    """(n, n) what to add so that all rows and columns have the largest sum."""
    rows, columns = work_GG.sum(axis=1), work_GG.sum(axis=0)
    most = max(rows.max(initial=0), columns.max(initial=0))
    return north_west(most - rows, most - columns)


def north_west(lacks_row: IntArray, lacks_column: IntArray) -> IntArray:
    """Returns (n, n) int64 with the given row and column sums, whose totals are equal, by the north-west corner rule."""
    lacks_row, lacks_column = lacks_row.copy(), lacks_column.copy()
    padding_GG = np.zeros((len(lacks_row), len(lacks_column)), dtype=np.int64)
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


def _fattest_matching(total_GG: IntArray) -> IntArray:
    """(n,) the perfect matching whose smallest entry is largest; one exists because all rows and columns have the same sum."""
    levels = np.unique(total_GG[total_GG > 0])
    low, high = 0, len(levels) - 1
    best = None
    while low <= high:
        middle = (low + high) // 2
        match = maximum_bipartite_matching(csr_matrix(total_GG >= levels[middle]), perm_type="column")
        if (match < 0).any():
            high = middle - 1
        else:
            best, low = match, middle + 1
    assert best is not None, "a matrix with equal row and column sums has a perfect matching"
    return np.asarray(best, dtype=np.int64)


class SplitRows:
    """Collects the rows of an order that splits transfers: parts of work_GG (n, n), units from each sender to each receiver."""

    def __init__(self, work_GG: IntArray) -> None:
        self._work_GG, self._done_GG = work_GG, np.zeros_like(work_GG)
        self._rows: list[tuple[int, int, float, float, int]] = []  # source, destination, share from and to, sub-channels

    def serve(self, src: int, dst: int, units: int, sub_channels: int = 1) -> None:
        """Appends a row that carries the next `units` of the pair's work over `sub_channels` sub-channels of both ports."""
        before, whole = int(self._done_GG[src, dst]), int(self._work_GG[src, dst])
        self._done_GG[src, dst] += units
        self._rows.append((src, dst, before / whole, (before + units) / whole, sub_channels))

    def order(self, method: str, sub_channels: tuple[IntArray, IntArray] | None = None) -> Order:
        """Returns an order of the rows served so far, then of the work that is left, in dense open-shop order.

        Args:
            method: the order's name.
            sub_channels: (n,) int64 each, of the sending and of the receiving ports; None: one partner at a time. What is left
                takes all sub-channels that both of its ports have.
        """
        n = len(self._work_GG)
        width_GG = np.ones((n, n)) if sub_channels is None else np.minimum(sub_channels[0][:, None], sub_channels[1][None, :])
        left_GG = self._work_GG - self._done_GG
        if left_GG.any():
            for src, dst in dense(left_GG / width_GG, np.zeros(2 * n), NO_CUTS)[0].tolist():
                self.serve(src, dst, int(left_GG[src, dst]), int(width_GG[src, dst]))
        silent = [(src, dst, 0.0, 1.0, 1) for src, dst in silent_pairs(self._work_GG).tolist()]
        row_X5 = np.array(self._rows + silent).reshape(-1, 5)
        made = Order(method, row_X5[:, :2].astype(np.int64), share_X2=row_X5[:, 2:4])
        return (
            made
            if sub_channels is None
            else replace(made, sub_channels=SubChannels(row_X5[:, 4].astype(np.int64), *sub_channels))
        )


def ticks(work_GG: IntArray | FloatArray, whole: float) -> IntArray:
    """Returns work as integers, in units of a 2^40th of a whole, rounded up."""
    return np.ceil(work_GG / max(whole, 1e-300) * 2**40).astype(np.int64)
