"""ORDER: strategies that order one all-to-all, by name. A new one is a function like OrderStrategy and one line here.

This module also has the strategies that need no search: Birkhoff's slots, paced transfers, and the baselines of papers.
`switch.timed` computes how long an order takes, so that all orders are timed by one model of the network.
"""

from dataclasses import replace
from typing import Protocol

import numpy as np

from aurora.algorithms.alltoall.decomposition import slots
from aurora.algorithms.alltoall.hierarchical_order import hierarchical
from aurora.algorithms.alltoall.matchings import matchings, openshop_best
from aurora.algorithms.alltoall.open_shop import all_pairs, openshop, search, with_silent_pairs
from aurora.algorithms.network.port_bounds import one_to_one_bound, pair_seconds
from aurora.types import Network, Order
from aurora.types.arrays import FloatArray, IntArray
from aurora.types.schedule import rotated_pairs


def all_at_once(bytes_GG: IntArray, network: Network, *, rng: np.random.Generator) -> Order:
    """Starts every transfer at once, so that transfers share ports. Rank i posts its message to i + 1 first."""
    return Order.all_at_once(len(bytes_GG))


def paced(bytes_GG: IntArray, network: Network, *, rng: np.random.Generator) -> Order:
    """Starts every transfer at once, each held to the rate bytes / T, where T is the fluid bound (coflow MADD).

    All transfers end at T, on any ports.
    """
    return replace(Order.all_at_once(len(bytes_GG)), method="paced", paced=True)


def smallest_first(bytes_GG: IntArray, network: Network, *, rng: np.random.Generator) -> Order:
    """Orders each sender's transfers by rising size, one at a time (SJF); a receiver takes any number at once.

    Source: Aurora §8.1.
    """
    pairs_X2 = all_pairs(len(bytes_GG))
    return _by_sender("sjf", pairs_X2[np.argsort(bytes_GG[*pairs_X2.T], kind="stable")], len(bytes_GG))


def random_order(bytes_GG: IntArray, network: Network, *, rng: np.random.Generator) -> Order:
    """Orders each sender's transfers at random, one at a time (RCS); a receiver takes any number at once.

    Source: Aurora §8.1.
    """
    pairs_X2 = all_pairs(len(bytes_GG))
    return _by_sender("random", pairs_X2[rng.permutation(len(pairs_X2))], len(bytes_GG))


def spread_out(bytes_GG: IntArray, network: Network, *, rng: np.random.Generator) -> Order:
    """Orders rank i's transfers to i + 1, i + 2, ... (mod G), one at a time; a receiver takes any number at once."""
    return _by_sender("spread-out", rotated_pairs(len(bytes_GG)), len(bytes_GG))


def _by_sender(method: str, pairs_X2: IntArray, ranks: int) -> Order:
    """An order in which senders have one transfer under way and receivers any number."""
    return Order(method, pairs_X2, recvs_open=max(1, ranks - 1))


SLOTS = 8  # slots per rank at most; Birkhoff's largest-first matchings need fewer on most traffic


def birkhoff(bytes_GG: IntArray, network: Network, *, rng: np.random.Generator) -> Order:
    """Decomposes the traffic (Birkhoff) into slots: rounds in which each rank has one partner. Pairs may be split over slots.

    Without start-ups, of which every slot has one, it meets the one-to-one bound: exactly on equal ports, and up to rounding by
    a 2^40th of the bound on mixed ports.

    Args: as in `OrderStrategy`; `rng` is not used. Bytes left after SLOTS * G slots are sent last, in the order `openshop`.

    Source: Aurora Thm 4.2.
    """
    work_GG, n = bytes_GG, len(bytes_GG)
    if not network.equal_ports:
        free = network.without_startup
        tick_s = max(one_to_one_bound(bytes_GG, free), 1e-300) / 2**40
        work_GG = np.ceil(pair_seconds(bytes_GG, free) / tick_s).astype(np.int64)
    _, partner_XG, units_XG = slots(work_GG, SLOTS * n)
    slot_X, src_X = np.nonzero(units_XG)
    row_X3 = np.stack([src_X, partner_XG[slot_X, src_X], units_XG[slot_X, src_X]], axis=1)
    left_GG = work_GG.copy()
    np.subtract.at(left_GG, (row_X3[:, 0], row_X3[:, 1]), row_X3[:, 2])
    if left_GG.any():
        src_X, dst_X = search(left_GG.astype(np.float64), 0, rng).pairs_X2.T
        row_X3 = np.concatenate([row_X3, np.stack([src_X, dst_X, left_GG[src_X, dst_X]], axis=1)])
    pairs_X2 = with_silent_pairs(row_X3[:, :2], work_GG)
    silent_X2 = np.full((len(pairs_X2) - len(row_X3), 2), (0.0, 1.0))
    return Order("birkhoff", pairs_X2, share_X2=np.concatenate([_shares(work_GG, row_X3), silent_X2]))


def _shares(work_GG: IntArray, row_X3: IntArray) -> FloatArray:
    """(X, 2) the part of its pair's work that each row carries, from and to; the rows of a pair carry all of it."""
    pair_X = row_X3[:, 0] * len(work_GG) + row_X3[:, 1]
    by_pair = np.argsort(pair_X, kind="stable")
    work_P, pair_X, units_X = work_GG.ravel(), pair_X[by_pair], row_X3[by_pair, 2]
    upto_X = units_X.cumsum() - (work_P.cumsum() - work_P)[pair_X]
    share_X2 = np.empty((len(row_X3), 2))
    share_X2[by_pair] = np.stack([upto_X - units_X, upto_X], axis=1) / work_P[pair_X, None]
    return share_X2


class OrderStrategy(Protocol):
    """Signature of every entry of ORDER.

    Args:
        bytes_GG: (G, G) int64 with a zero diagonal, bytes from each rank to each other.
        network: the network that carries them.
        rng: draws random choices; equal generator states give equal orders.

    Returns:
        An Order of all ordered pairs of ranks.
    """

    def __call__(self, bytes_GG: IntArray, network: Network, *, rng: np.random.Generator) -> Order: ...


ORDER: dict[str, OrderStrategy] = {
    "openshop": openshop,
    "openshop-best": openshop_best,
    "birkhoff": birkhoff,
    "matchings": matchings,
    "paced": paced,
    "hierarchical": hierarchical,
    "sjf": smallest_first,
    "random": random_order,
    "spread-out": spread_out,
    "all-at-once": all_at_once,
}
