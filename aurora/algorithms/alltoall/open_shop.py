"""Dense open-shop schedules: one message per pair, one partner per port at a time, computed in microseconds.

A schedule is dense if it never leaves both a sender and a receiver free while the sender has traffic for the receiver. For
nearly equal traffic, where dense schedules are up to 15 % above the bound, ring schedules are tried too. The loops are in
open_shop_core, which is compiled.
"""

import threading
from typing import NamedTuple

import numpy as np

from aurora.algorithms.alltoall import open_shop_core as core
from aurora.algorithms.network.port_bounds import pair_seconds
from aurora.types import Network, Order
from aurora.types.arrays import FloatArray, IntArray, locked


def all_pairs(ranks: int) -> IntArray:
    """Returns (X, 2) int64, every pair (source, destination) of different ranks, sorted by source."""
    return np.argwhere(~np.eye(ranks, dtype=np.bool_))


def with_silent_pairs(pairs_X2: IntArray, bytes_GG: IntArray) -> IntArray:
    """Returns the rows pairs_X2 (X, 2), followed by every pair that has no bytes in bytes_GG (G, G).

    An order needs all pairs, because other batches may have bytes for them.
    """
    if np.count_nonzero(bytes_GG) < len(bytes_GG) * (len(bytes_GG) - 1):
        silent_X2 = np.argwhere((bytes_GG == 0) & ~np.eye(len(bytes_GG), dtype=np.bool_))
        pairs_X2 = np.concatenate([pairs_X2, silent_X2])
    return pairs_X2


SMALL = 12  # ranks; below this, a single priority can be far from the bound, and trying more is cheap
SMALL_TRIES = 90
KEPT = 8  # numbers of ranks of which a thread keeps the arrays that searches work on

_thread = threading.local()


class DenseSchedule(NamedTuple):
    """A schedule in which each port serves one partner at a time; its rows are sorted by start."""

    pairs_X2: IntArray  # (source, destination)
    makespan_s: float


def openshop(bytes_GG: IntArray, network: Network, *, rng: np.random.Generator) -> Order:
    """Dense open shop: starts a transfer whenever a sender and a receiver are both free and have traffic for each other.

    Each pair has one message and each rank one partner at a time, without splits or barriers. Of the ports that become free,
    the one with the largest remaining load chooses first, and takes the free partner with the largest remaining load. Below
    SMALL ranks, up to SMALL_TRIES further priorities are drawn at random, and the shortest schedule is kept. Like any dense
    schedule it is shorter than twice the one-to-one bound.

    Args: as in `registry.OrderStrategy`.

    Source: Gonzalez & Sahni 1976.
    """
    schedule = search(pair_seconds(bytes_GG, network), SMALL_TRIES if len(bytes_GG) < SMALL else 0, rng)
    return Order.made("openshop", locked(with_silent_pairs(schedule.pairs_X2, bytes_GG)))


def search(seconds_GG: FloatArray, tries: int, rng: np.random.Generator, limit_s: float = np.inf) -> DenseSchedule:
    """Searches dense schedules and rings for the shortest, and returns it; stops at one that meets the one-to-one bound.

    Deterministic for the state of rng.

    Args:
        seconds_GG: (G, G) float64, seconds of each transfer if it is alone; zero for no transfer.
        tries: number of random priorities to try after the rule "largest load first"; also number of random rings.
        rng: draws priorities and rings.
        limit_s: the makespan of a known schedule; those that are drawn are given up as soon as they cannot be shorter.
    """
    seconds_GG, seed = np.ascontiguousarray(seconds_GG, np.float64), rng.bit_generator.random_raw() >> 1 if tries else 0
    return DenseSchedule(*core.search(_workspace(len(seconds_GG)), seconds_GG, tries, seed, limit_s))


def _workspace(ranks: int) -> core.Workspace:
    """This thread's arrays for schedules of so many ranks."""
    kept: dict[int, core.Workspace] = _thread.__dict__.setdefault("workspaces", {})
    if (work := kept.get(ranks)) is None:
        if len(kept) == KEPT:
            kept.clear()
        work = kept[ranks] = core.Workspace(ranks)
    return work
