"""The order that divides an all-to-all into slots by Birkhoff decomposition, with one partner at a time.

A slot is a set of transfers that run at the same time.
"""

import numpy as np

from aurora.planner.alltoall.decomposition import slots
from aurora.planner.alltoall.open_shop import NO_CUTS, dense, with_silent_pairs
from aurora.planner.network.bounds import one_to_one_bound, pair_seconds
from aurora.types import Network, Order
from aurora.types.arrays import FloatArray, IntArray, read_only
from aurora.types.compiled import njit

SLOTS = 8  # slots per rank at most; Birkhoff's largest-first matchings need fewer on most traffic


def birkhoff(bytes_GG: IntArray, network: Network, *, rng: np.random.Generator, most: int | None = None) -> Order:
    """Decomposes the traffic (Birkhoff) into slots: rounds in which each rank has one partner. Pairs may be split over slots.

    Without start-ups, of which every slot has one, it meets the one-to-one bound: exactly on equal ports, and up to rounding by
    a 2^40th of the bound on mixed ports.

    Args: as in `registry.OrderStrategy`; `rng` is not used.
        most: maximum number of slots; None: SLOTS * G. Bytes left after them are sent last, in the order `openshop`.

    Source: Aurora Thm 4.2.
    """
    work_GG, n = bytes_GG, len(bytes_GG)
    if not network.equal_ports:
        free = network.without_startup
        work_GG = ticks(pair_seconds(bytes_GG, free), one_to_one_bound(bytes_GG, free))
    _, partner_XG, units_XG = slots(read_only(work_GG), SLOTS * n if most is None else most)
    slot_X, src_X = np.nonzero(units_XG)
    row_X3 = np.stack([src_X, partner_XG[slot_X, src_X], units_XG[slot_X, src_X]], axis=1)
    left_GG = work_GG.copy()
    np.subtract.at(left_GG, (row_X3[:, 0], row_X3[:, 1]), row_X3[:, 2])
    if left_GG.any():
        src_X, dst_X = dense(left_GG.astype(np.float64), np.zeros(2 * n), NO_CUTS, np.inf)[0].T
        row_X3 = np.concatenate([row_X3, np.stack([src_X, dst_X, left_GG[src_X, dst_X]], axis=1)])
    pairs_X2 = with_silent_pairs(row_X3[:, :2], work_GG)
    return Order("birkhoff", pairs_X2, share_X2=_shares(read_only(work_GG), row_X3, len(pairs_X2)))


@njit(cache=True)
def _shares(work_GG, row_X3, rows):
    """(rows, 2) the part of its pair's work that each row carries, from and to; rows beyond row_X3 carry all of it."""
    share_X2 = np.zeros((rows, 2))
    share_X2[:, 1] = 1.0
    done_GG = np.zeros_like(work_GG)
    for row in range(len(row_X3)):
        src, dst, units = row_X3[row, 0], row_X3[row, 1], row_X3[row, 2]
        share_X2[row, 0] = done_GG[src, dst] / work_GG[src, dst]
        done_GG[src, dst] += units
        share_X2[row, 1] = done_GG[src, dst] / work_GG[src, dst]
    return share_X2


def ticks(work_GG: IntArray | FloatArray, whole: float) -> IntArray:
    """Returns work_GG as integers in units of whole / 2^40, rounded up."""
    return np.ceil(work_GG / max(whole, 1e-300) * 2**40).astype(np.int64)
