"""openshop-best: the shortest open-shop schedule that a search finds, with a few transfers cut in two if that shortens it."""

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

WORTH = 0.002  # time that a further message must save, as a share of the bound
CUT_RUNS = 2000  # schedules that the search for cuts makes at most
AMPLITUDE = 0.1  # of drawn priorities, as a share of the bound
NEAR = 0.06  # a schedule that is longer than the shortest whole one by this share is not cut
MOST_TRIES = 2500
BEST_OPERATIONS = 2e6  # steps of the inner loop that openshop-best takes, about

Cut = tuple[int, int, int]  # source, destination, bytes of the first part


def openshop_best(bytes_GG: IntArray, network: Network, *, rng: np.random.Generator) -> Order:
    """Returns the shortest of many dense open-shop schedules with drawn priorities, with a few transfers split.

    It takes tens of milliseconds.

    Up to branch_and_bound.MOST_RANKS ranks the search starts from the shortest schedule with one message a pair. If the start
    is above the bound, up to open_shop.MOST_CUTS pairs go in two parts, as long as each further message saves WORTH of the
    bound, start-ups counted. The result is never longer than without cuts, and seldom has more than one or two. `openshop`
    always sends one message a pair.

    Args:
        bytes_GG: (G, G) int64 with a zero diagonal, bytes from each rank to each other.
        network: port rates and start-ups.
        rng: for the drawn priorities.
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
    """Returns how many dense schedules openshop-best makes for this number of ranks."""
    return int(np.clip(BEST_OPERATIONS / max(1, ranks) ** 2.4, SMALL_TRIES, MOST_TRIES))


@dataclass(frozen=True)
class SplitSchedule:
    """Transfers by start, some of them parts of a pair's transfer.

    Attributes:
        pairs_X2: (X, 2) int64, (source, destination).
        share_X2: (X, 2) float64, the part of the pair's bytes that a row carries, from and to.
        makespan_s: seconds.
    """

    pairs_X2: IntArray
    share_X2: FloatArray
    makespan_s: float


class CutShop:
    """Dense open shop of one all-to-all in which transfers can be cut in two. One thread at a time.

    Args:
        bytes_GG: (n, n) int64 with a zero diagonal, bytes from each rank to each other.
        network: port rates and start-ups.

    Attributes:
        ranks: number of ranks, n.
        seconds_GG: (n, n) float64, how long each transfer takes alone.
        bound_s: the one-to-one bound.
        dense: the buffers; they hold the last schedule.
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

    def run(self, bias_s: FloatArray, cuts: Sequence[Cut]) -> float:
        """Makes the dense schedule with these cuts.

        Args:
            bias_s: (2 n,) float64, as in DenseShop.run.
            cuts: (source, destination, bytes of the first part) of each transfer that is cut.

        Returns:
            The makespan in seconds.
        """
        for at, (src, dst, first) in enumerate(cuts):
            startup_s, rate_Bps = self._startups[src][dst], self._rates[src][dst]
            self._pair_C2[at] = src, dst
            self._part_s_C2[at] = startup_s + first / rate_Bps, startup_s + (self._bytes[src][dst] - first) / rate_Bps
        return self.dense.run(self.seconds_GG, bias_s, self._pair_C2[: len(cuts)], self._part_s_C2[: len(cuts)])

    def useful_cuts(self, cuts: Sequence[Cut]) -> list[Cut]:
        """Returns cuts that would each remove a wait of one of the two ports that end last; call after `run` with `cuts`.

        A port waits while all partners that it still has traffic with are busy. Cutting a partner's transfer at the instant
        at which the wait begins makes that partner free.
        """
        shop, n = self.dense, self.ranks
        rows = (shop.src_X[: shop.count], shop.dst_X[: shop.count], shop.start_s_X[: shop.count], shop.end_s_X[: shop.count])
        found = _blocking_transfers(n, *rows, 1e-9 * self.bound_s, self._src_X, self._dst_X, self._into_s_X)
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
        """Returns the schedule that `run` has just made.

        Args:
            cuts: the cuts given to `run`.
            makespan_s: the makespan that `run` returned.
        """
        pairs_X2 = np.stack([self.dense.src_X[: self.dense.count], self.dense.dst_X[: self.dense.count]], axis=1)
        share_X2 = np.tile([0.0, 1.0], (len(pairs_X2), 1))
        for src, dst, first in cuts:
            before, after = np.flatnonzero((pairs_X2 == (src, dst)).all(axis=1))
            share_X2[before, 1] = share_X2[after, 0] = first / self._bytes[src][dst]
        return SplitSchedule(pairs_X2, share_X2, makespan_s)


def best_whole(shop: CutShop, tries: int, rng: np.random.Generator) -> SplitSchedule:
    """Finds a short schedule with one message a pair.

    Args:
        shop: the all-to-all.
        tries: dense schedules to try; up to MOST_RANKS ranks the result is the shortest of all schedules.
        rng: for the drawn priorities.
    """
    makespan_s = shop.dense.search(shop.seconds_GG, tries, shop.bound_s * (1 + 1e-12), rng)
    few = shop.ranks <= MOST_RANKS
    if few and (best := shortest_whole(shop.seconds_GG, makespan_s)) is not None:
        pairs_X2, makespan_s = best
        return SplitSchedule(pairs_X2, np.tile([0.0, 1.0], (len(pairs_X2), 1)), makespan_s)
    return shop.rows([], makespan_s)


def best_split(shop: CutShop, whole: SplitSchedule, tries: int, rng: np.random.Generator) -> SplitSchedule:
    """Shortens a schedule by sending up to MOST_CUTS pairs in two parts each; every further message saves WORTH of the bound.

    For each of many drawn priorities it cuts, one after the other, the transfer whose cut shortens the schedule most: a
    transfer that keeps a partner from the port that ends last, cut at the instant at which that port begins to wait. Start-ups
    count for each part. Deterministic for the state of rng.

    Args:
        shop: the all-to-all.
        whole: the schedule to shorten; returned if no cut saves enough.
        tries: schedules to make at most.
        rng: for the drawn priorities.
    """
    price_s, near_s = WORTH * shop.bound_s, whole.makespan_s * (1 + NEAR)
    best_s, best_cuts, best_bias_s = whole.makespan_s, [], np.zeros(0)
    runs = 0
    while runs < tries and best_s > (shop.bound_s + price_s) * (1 + 1e-12):
        bias_s = (rng.random(2 * shop.ranks) - 0.5) * AMPLITUDE * shop.bound_s
        cuts: list[Cut] = []
        while runs < tries and len(cuts) < MOST_CUTS:
            makespan_s = shop.run(bias_s, cuts)
            runs += 1
            if makespan_s > near_s:
                break
            found = None
            for cut in shop.useful_cuts(cuts)[: tries - runs]:
                runs += 1
                if (drawn_s := shop.run(bias_s, [*cuts, cut])) < makespan_s:
                    makespan_s, found = drawn_s, cut
            if found is None:
                break
            cuts.append(found)
            if makespan_s + len(cuts) * price_s < best_s:
                best_s, best_cuts, best_bias_s = makespan_s + len(cuts) * price_s, list(cuts), bias_s
    if not best_cuts:
        return whole
    return shop.rows(best_cuts, shop.run(best_bias_s, best_cuts))


def warm_up() -> None:
    """Compiles the search's functions now (seconds, once on a machine) instead of in the first search."""
    shop = CutShop(np.array([[0, 2, 1, 1], [0, 0, 2, 2], [0, 2, 0, 0], [2, 0, 1, 0]]), Network.equal(4))
    rng = np.random.default_rng(0)
    best_split(shop, best_whole(shop, 1, rng), 2, rng)


@njit(cache=True)
def _blocking_transfers(
    n: int, src_X: IntArray, dst_X: IntArray, start_s_X: FloatArray, end_s_X: FloatArray, least_s: float,
    to_src_X: IntArray, to_dst_X: IntArray, into_s_X: FloatArray,
) -> int:  # fmt: skip
    """Finds the transfers that make the last ports to end wait for least_s or longer; returns how many there are.

    Fills the source, the destination and the seconds into the transfer at which the wait begins.
    """
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
