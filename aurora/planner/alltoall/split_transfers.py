"""The shortest open-shop schedule that a search finds, with a few transfers cut in two where that pays."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numba import njit

from aurora.planner.alltoall.branch_and_bound import MOST_RANKS, shortest_whole
from aurora.planner.alltoall.open_shop import MOST_CUTS, SMALL_TRIES, DenseShop
from aurora.planner.alltoall.pairs import silent_pairs
from aurora.planner.network.lower_bounds import one_to_one_bound, pair_seconds
from aurora.types import Network, Order
from aurora.types.arrays import FloatArray, IntArray

WORTH = 0.002  # of the bound: what a further message must gain
CUT_RUNS = 2000  # schedules, at most, that the search for cuts looks at
AMPLITUDE = 0.1  # of drawn priorities, as a share of the bound
NEAR = 0.06  # a schedule that is longer than the shortest whole one by this share is not cut
MOST_TRIES = 2500
BEST_OPERATIONS = 2e6  # what openshop-best may spend, in steps of the inner loop

Cut = tuple[int, int, int]  # source, destination, bytes of the first part


def openshop_best(bytes_GG: IntArray, network: Network, *, rng: np.random.Generator) -> Order:
    """The shortest of many dense open-shop schedules with drawn priorities, some tens of milliseconds' worth; splits a little.

    Up to branch_and_bound.MOST_RANKS ranks it starts from the shortest schedule with one message a pair. Where what it starts
    from is above the bound, up to open_shop.MOST_CUTS pairs go in two parts, as long as each further message gains WORTH of the
    bound, start-ups counted: never longer than without, and seldom more than one or two. `openshop` always sends one a pair.
    """
    n, tries = len(bytes_GG), search_tries(len(bytes_GG))
    shop = CutShop(bytes_GG, network)
    found = best_split(shop, best_whole(shop, tries, rng), min(CUT_RUNS, tries), rng)
    silent_X2 = silent_pairs(bytes_GG)
    order = Order("openshop-best", np.concatenate([found.pairs_X2, silent_X2]))
    if len(order.pairs_X2) == n * (n - 1):
        return order
    return replace(order, share_X2=np.concatenate([found.share_X2, np.tile([0.0, 1.0], (len(silent_X2), 1))]))


def search_tries(ranks: int) -> int:
    """How many dense schedules openshop-best looks at."""
    return int(np.clip(BEST_OPERATIONS / max(1, ranks) ** 2.4, SMALL_TRIES, MOST_TRIES))


@dataclass(frozen=True)
class SplitSchedule:
    """Transfers by start: pairs_X2 (X, 2) int64; share_X2 (X, 2) float64, which part of its pair a row carries."""

    pairs_X2: IntArray
    share_X2: FloatArray
    makespan_s: float


class CutShop:
    """A dense shop for one all-to-all, bytes_GG (n, n) int64 with a zero diagonal, in which pairs can be cut in two.

    One thread at a time.
    """

    def __init__(self, bytes_GG: IntArray, network: Network) -> None:
        self.ranks = len(bytes_GG)
        self.seconds_GG = pair_seconds(bytes_GG, network)
        self.bound_s = one_to_one_bound(bytes_GG, network)
        self.dense = DenseShop(self.ranks)
        self._bytes = bytes_GG.tolist()
        self._rates = network.pair_Bps_GG.tolist()
        self._startups = network.pair_startup_s_GG.tolist()
        self._pair_C2 = np.zeros((MOST_CUTS, 2), dtype=np.int64)
        self._part_s_C2 = np.zeros((MOST_CUTS, 2))
        self._src_X, self._dst_X = np.zeros((2, 2 * self.ranks**2), dtype=np.int64)
        self._into_s_X = np.zeros(2 * self.ranks**2)

    def run(self, favour: FloatArray, cuts: Sequence[Cut]) -> float:
        """The makespan in seconds with these pairs cut, and favour (2 n,) as in DenseShop.run."""
        for at, (src, dst, first) in enumerate(cuts):
            startup_s, rate_Bps = self._startups[src][dst], self._rates[src][dst]
            self._pair_C2[at] = src, dst
            self._part_s_C2[at] = startup_s + first / rate_Bps, startup_s + (self._bytes[src][dst] - first) / rate_Bps
        return self.dense.run(self.seconds_GG, favour, self._pair_C2[: len(cuts)], self._part_s_C2[: len(cuts)])

    def sparing(self, cuts: Sequence[Cut]) -> list[Cut]:
        """One more cut each, after `run` with these: those that spare a wait of one of the two ports that end last.

        While that port waits, the partners that it still has are busy with others; a cut as it begins to wait hands one over.
        """
        shop, n = self.dense, self.ranks
        rows = (shop.src_X[: shop.count], shop.dst_X[: shop.count], shop.start_s_X[: shop.count], shop.end_s_X[: shop.count])
        found = _in_the_way(n, *rows, 1e-9 * self.bound_s, self._src_X, self._dst_X, self._into_s_X)
        taken = {cut[:2] for cut in cuts}
        more: list[Cut] = []
        for src, dst, into_s in zip(
            *(column[:found].tolist() for column in (self._src_X, self._dst_X, self._into_s_X)), strict=True
        ):
            first = math.ceil((into_s - self._startups[src][dst]) * self._rates[src][dst] - 1e-6)
            if 0 < first < self._bytes[src][dst] and (src, dst) not in taken:
                more.append((src, dst, first))
        return more

    def rows(self, cuts: Sequence[Cut], makespan_s: float) -> SplitSchedule:
        """What `run` with these cuts has scheduled."""
        pairs_X2 = np.stack([self.dense.src_X[: self.dense.count], self.dense.dst_X[: self.dense.count]], axis=1)
        share_X2 = np.tile([0.0, 1.0], (len(pairs_X2), 1))
        for src, dst, first in cuts:
            before, after = np.flatnonzero((pairs_X2 == (src, dst)).all(axis=1))
            share_X2[before, 1] = share_X2[after, 0] = first / self._bytes[src][dst]
        return SplitSchedule(pairs_X2, share_X2, makespan_s)


def best_whole(shop: CutShop, tries: int, rng: np.random.Generator) -> SplitSchedule:
    """One message a pair: the shortest of `tries` dense schedules; up to MOST_RANKS ranks the shortest that there is."""
    makespan_s = shop.dense.search(shop.seconds_GG, tries, shop.bound_s * (1 + 1e-12), rng)
    few = shop.ranks <= MOST_RANKS
    if few and (best := shortest_whole(shop.seconds_GG, makespan_s)) is not None:
        pairs_X2, makespan_s = best
        return SplitSchedule(pairs_X2, np.tile([0.0, 1.0], (len(pairs_X2), 1)), makespan_s)
    return shop.rows([], makespan_s)


def best_split(shop: CutShop, whole: SplitSchedule, tries: int, rng: np.random.Generator) -> SplitSchedule:
    """`whole`, or a schedule with up to MOST_CUTS pairs in two parts each; every further message gains WORTH of the bound.

    For each of many drawn priorities it cuts, one after the other, the transfer whose cut shortens the schedule most: one
    that keeps a partner from the port that ends last, at the instant at which that port begins to wait. Start-ups count for
    each part. Looks at `tries` schedules at most. Deterministic for rng.
    """
    price_s, near_s = WORTH * shop.bound_s, whole.makespan_s * (1 + NEAR)
    best_s, best_cuts, best_favour = whole.makespan_s, [], np.zeros(0)
    runs = 0
    while runs < tries and best_s > (shop.bound_s + price_s) * (1 + 1e-12):
        favour = (rng.random(2 * shop.ranks) - 0.5) * AMPLITUDE * shop.bound_s
        cuts: list[Cut] = []
        while runs < tries and len(cuts) < MOST_CUTS:
            makespan_s = shop.run(favour, cuts)
            runs += 1
            if makespan_s > near_s:
                break
            found = None
            for cut in shop.sparing(cuts)[: tries - runs]:
                runs += 1
                if (drawn_s := shop.run(favour, [*cuts, cut])) < makespan_s:
                    makespan_s, found = drawn_s, cut
            if found is None:
                break
            cuts.append(found)
            if makespan_s + len(cuts) * price_s < best_s:
                best_s, best_cuts, best_favour = makespan_s + len(cuts) * price_s, list(cuts), favour
    if not best_cuts:
        return whole
    return shop.rows(best_cuts, shop.run(best_favour, best_cuts))


def warm_up() -> None:
    """Compile what searches, now (seconds, once on a machine) instead of in the first search."""
    shop = CutShop(np.array([[0, 2, 1, 1], [0, 0, 2, 2], [0, 2, 0, 0], [2, 0, 1, 0]]), Network.equal(4))
    rng = np.random.default_rng(0)
    best_split(shop, best_whole(shop, 1, rng), 2, rng)


@njit(cache=True)
def _in_the_way(
    n: int, src_X: IntArray, dst_X: IntArray, start_s_X: FloatArray, end_s_X: FloatArray, least_s: float,
    to_src_X: IntArray, to_dst_X: IntArray, into_s_X: FloatArray,
) -> int:  # fmt: skip
    """Fills (source, destination, seconds into it) of what keeps the last ports to end waiting for least_s; gives how many."""
    found = 0
    last = np.argmax(end_s_X)
    latest_s = np.zeros(n)
    for side in range(2):
        own_X, other_X = (src_X, dst_X) if side == 0 else (dst_X, src_X)
        port = own_X[last]
        latest_s[:] = -1.0  # when the port begins its last transfer with each partner
        for row in range(len(own_X)):
            if own_X[row] == port:
                latest_s[other_X[row]] = start_s_X[row]
        free_s = 0.0
        for row in range(len(own_X)):
            if own_X[row] != port:
                continue
            if start_s_X[row] - free_s > least_s:
                for busy in range(row):
                    begun = start_s_X[busy] < free_s < end_s_X[busy]
                    if begun and own_X[busy] != port and latest_s[other_X[busy]] > free_s and found < len(into_s_X):
                        to_src_X[found] = src_X[busy]
                        to_dst_X[found] = dst_X[busy]
                        into_s_X[found] = free_s - start_s_X[busy]
                        found += 1
            free_s = end_s_X[row]
    return found
