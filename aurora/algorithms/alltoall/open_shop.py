"""Dense open-shop schedules: one message per pair, one partner per port at a time, computed in microseconds.

A schedule is dense if it never leaves both a sender and a receiver free while the sender has traffic for the receiver. For
nearly equal traffic, where dense schedules are up to 15 % above the bound, ring schedules are tried too. The loops are in
open_shop_core, which is compiled.
"""

import threading
from typing import NamedTuple

import numpy as np

from aurora.algorithms.alltoall import open_shop_core as core
from aurora.algorithms.network.port_bounds import longest_port, pair_seconds
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


MOST_CUTS = 4
NO_CUTS: FloatArray = locked(np.zeros((0, 4)))
SMALL = 12  # ranks; below this, a single priority can be far from the bound, and trying more is cheap
SMALL_TRIES = 90
DRAWS = 15  # tries that are drawn at once
KEPT = 8  # numbers of ranks of which a thread keeps the arrays that searches work on

_thread = threading.local()


class DenseSchedule(NamedTuple):
    """A schedule in which each port serves one partner at a time; its rows are sorted by start."""

    pairs_X2: IntArray  # (source, destination)
    span_s_X2: FloatArray  # start and end in seconds
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
    seconds_GG = pair_seconds(bytes_GG, network)
    schedule = search(seconds_GG, SMALL_TRIES if len(bytes_GG) < SMALL else 0, longest_port(seconds_GG) * (1 + 1e-12), rng)
    return Order("openshop", locked(with_silent_pairs(schedule.pairs_X2, bytes_GG)))


def search(
    seconds_GG: FloatArray, tries: int, bound_s: float, rng: np.random.Generator, known: DenseSchedule | None = None
) -> DenseSchedule:
    """Searches dense schedules, rings and `known` for the shortest, and returns it; stops at one that takes only bound_s.

    Deterministic for the state of rng.

    Args:
        seconds_GG: (G, G) float64, seconds of each transfer if it is alone; zero for no transfer.
        tries: number of random priorities to try after the rule "largest load first"; also number of random rings.
        bound_s: a lower bound on the makespan, in seconds.
        rng: draws priorities and rings.
        known: a schedule to beat; None: there is none.
    """
    seconds_GG = np.ascontiguousarray(seconds_GG, np.float64)
    work = _workspace(len(seconds_GG))
    pairs_X2, span_s_X2, dense_s, ring_s = core.plain(work, seconds_GG)
    best = DenseSchedule(pairs_X2, span_s_X2, min(dense_s, ring_s))
    if known is not None and known.makespan_s < best.makespan_s:
        best = known
    while tries > 0 and best.makespan_s > bound_s:
        draws_M3G = rng.random((min(tries, DRAWS), 3 * len(seconds_GG)))
        drawn = DenseSchedule(*core.drawn(work, seconds_GG, draws_M3G, bound_s, best.makespan_s, dense_s, ring_s))
        best = min(best, drawn, key=lambda schedule: schedule.makespan_s)
        tries -= DRAWS
    return best


def relieved(seconds_GG: FloatArray, bound_s: float, known: DenseSchedule) -> DenseSchedule:
    """Searches dense schedules by squeaky-wheel optimisation; returns the shortest, or `known` if none is shorter.

    Each schedule gives a higher priority to the ports that ended late in the schedules before it.

    Args: as in `search`.

    Source: Joslin & Clements, "Squeaky wheel optimization", JAIR 10 (1999).
    """
    found = DenseSchedule(*core.relieved(_workspace(len(seconds_GG)), seconds_GG, bound_s))
    return min(known, found, key=lambda schedule: schedule.makespan_s)


def dense(seconds_GG: FloatArray, bias_s: FloatArray, cut_C4: FloatArray, limit_s: float) -> DenseSchedule:
    """Makes a dense schedule: of ports that become free, the one with most remaining load first takes its busiest free partner.

    Args:
        seconds_GG: (G, G) float64, as in `search`.
        bias_s: (2 G,) float64, seconds added to the load of each port, which change the priorities; senders first.
        cut_C4: (C, 4) float64, up to MOST_CUTS transfers that are sent in two parts: source, destination, and the seconds of
            the first and of the second part.
        limit_s: the schedule is given up as soon as a port cannot end before limit_s; infinite: never. Its makespan is then
            infinite.
    """
    seconds_GG = np.ascontiguousarray(seconds_GG, np.float64)
    return DenseSchedule(*core.dense_of(_workspace(len(seconds_GG)), seconds_GG, bias_s, cut_C4, limit_s))


def ring(seconds_GG: FloatArray, ring_G: IntArray, limit_s: float) -> DenseSchedule:
    """Makes a ring schedule, with rows by step: the i-th rank of the ring sends to the ranks i + 1, i + 2, ... of it.

    There are no barriers between the steps: a transfer starts when both of its ports have ended their previous transfer.

    Args:
        seconds_GG: (G, G) float64, as in `search`.
        ring_G: (G,) int64, the ranks in the sequence of the ring.
        limit_s: the schedule is given up once a port is busy until limit_s. Its makespan is then infinite.
    """
    return DenseSchedule(*core.ring_of(_workspace(len(seconds_GG)), seconds_GG, ring_G, limit_s))


def _workspace(ranks: int) -> core.Workspace:
    """This thread's arrays for schedules of so many ranks."""
    kept: dict[int, core.Workspace] = _thread.__dict__.setdefault("workspaces", {})
    if (work := kept.get(ranks)) is None:
        if len(kept) == KEPT:
            kept.clear()
        work = kept[ranks] = core.Workspace(ranks, MOST_CUTS)
    return work
