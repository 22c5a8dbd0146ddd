"""The order `openshop-best`: searches for a short open-shop schedule, and cuts a few transfers in two if that shortens it.

If all transfers take nearly equally long, rounds of perfect matchings without barriers are tried too. The order `matchings`
runs such rounds as stages, for NCCL.
"""

import math
from collections.abc import Sequence

import numpy as np
from scipy.optimize import linear_sum_assignment

from aurora.algorithms.alltoall import split_transfers_core as core
from aurora.algorithms.alltoall.open_shop import (
    DRAWS,
    MOST_CUTS,
    SMALL_TRIES,
    DenseSchedule,
    dense,
    relieved,
    search,
    with_silent_pairs,
)
from aurora.algorithms.network.port_bounds import longest_port, pair_rates, pair_seconds
from aurora.types import Network, Order
from aurora.types.arrays import FloatArray, IntArray

MOST_SPREAD = 3.0  # longest transfer over shortest up to which rounds are tried; beyond, dense schedules are shorter
LEAST_SLACK = 0.4  # of a port, in standard deviations of the transfers' durations: what a wait is divided by at least
PACE = 0.3  # cost of ending a standard deviation before or after the pace
NOISE = 0.05  # drawn costs, at most
MATCHED_TRIES = 200
OPERATIONS = 2e6  # cubes of ranks over all tries, about
ENOUGH = 5e-4  # above the bound, as a share of it: nearer is not searched for


def matched_rounds(seconds_GG: FloatArray, bound_s: float, rng: np.random.Generator) -> DenseSchedule | None:
    """Searches for a short schedule of n - 1 rounds in which each of n ranks has a partner, and returns it.

    Returns None below three ranks, or if the longest transfer takes more than MOST_SPREAD times the shortest one.

    There are no barriers: a transfer starts when both of its ports have ended their previous transfer. Each round is the
    perfect matching of least cost among the remaining pairs. The cost of a pair has two terms:

    - The wait of a port, squared, relative to its slack, the time that the port can lose without exceeding the bound. So the
      ports with the largest load hardly wait.
    - The distance of the transfer's end in round r from r x bound / (n - 1), the common pace. So ports end a round at about
      the same time, and later rounds have free partners.

    The first try is deterministic; the others add noise to the costs.

    Args:
        seconds_GG: (G, G) float64, how long each transfer takes alone.
        bound_s: a lower bound on the makespan, in seconds.
        rng: draws the noise.
    """
    n = len(seconds_GG)
    took_X = seconds_GG[~np.eye(n, dtype=np.bool_)]
    if n < 3 or not 0 < took_X.max() <= MOST_SPREAD * took_X.min():
        return None
    unit_s = float(took_X.std()) or bound_s
    best: DenseSchedule | None = None
    for number in range(int(np.clip(OPERATIONS / n**3, 1, MATCHED_TRIES))):
        schedule = _matched(seconds_GG, bound_s, unit_s, NOISE * (number > 0), rng)
        if best is None or schedule.makespan_s < best.makespan_s:
            best = schedule
        if best.makespan_s <= bound_s * (1 + ENOUGH):
            break
    return best


def _matched(seconds_GG: FloatArray, bound_s: float, unit_s: float, noise: float, rng: np.random.Generator) -> DenseSchedule:
    """One schedule; unit_s is the standard deviation of the transfers' durations."""
    n = len(seconds_GG)
    free_out_s, free_in_s = np.zeros(n), np.zeros(n)
    slack_out_s, slack_in_s = bound_s - seconds_GG.sum(axis=1), bound_s - seconds_GG.sum(axis=0)
    done_GG = np.where(np.eye(n), 1e6, 0.0)  # what a pair that is not left costs more
    pairs_RG2, span_s_RG2 = np.zeros((n - 1, n, 2), np.int64), np.zeros((n - 1, n, 2))
    src_G = np.arange(n)
    for number in range(n - 1):
        wait_s_GG = free_in_s - free_out_s[:, None]
        out_GG = np.maximum(wait_s_GG, 0) / np.maximum(slack_out_s, LEAST_SLACK * unit_s)[:, None]
        in_GG = np.maximum(-wait_s_GG, 0) / np.maximum(slack_in_s, LEAST_SLACK * unit_s)
        off_s_GG = np.maximum(free_out_s[:, None], free_in_s) + seconds_GG - (number + 1) * bound_s / (n - 1)
        cost_GG = out_GG**2 + in_GG**2 + PACE / unit_s * np.abs(off_s_GG) + done_GG
        dst_G = linear_sum_assignment(cost_GG + noise * rng.random((n, n)) if noise else cost_GG)[1]
        start_s_G = np.maximum(free_out_s, free_in_s[dst_G])
        slack_out_s -= start_s_G - free_out_s
        slack_in_s[dst_G] -= start_s_G - free_in_s[dst_G]
        free_out_s = start_s_G + seconds_GG[src_G, dst_G]
        free_in_s[dst_G] = free_out_s
        done_GG[src_G, dst_G] = 1e6
        pairs_RG2[number], span_s_RG2[number] = np.stack([src_G, dst_G], axis=1), np.stack([start_s_G, free_out_s], axis=1)
    by_start = np.argsort(span_s_RG2[:, :, 0], axis=None, kind="stable")
    return DenseSchedule(pairs_RG2.reshape(-1, 2)[by_start], span_s_RG2.reshape(-1, 2)[by_start], float(free_out_s.max()))


POWERS = (1.0, 2.0, 4.0)  # how much more a long transfer counts than a short one, in turn


def matchings(bytes_GG: IntArray, network: Network, *, rng: np.random.Generator) -> Order:
    """Orders transfers in rounds of matchings, long transfers first: each pair has one message, and each round is a stage.

    A round is the matching of largest weight among the remaining pairs. The weight of a pair grows with a power of its seconds,
    so that the transfers of a round take nearly equally long; and with its ports' remaining seconds, so that the busiest ports
    have no idle round. Of the orders for several POWERS, the fastest in stages is kept.

    Args: as in `registry.OrderStrategy`; `rng` is not used.
    """
    from aurora.algorithms.network.switch import timed  # loads the switch, which no other order needs

    seconds_GG = pair_seconds(bytes_GG, network)
    orders = [Order("matchings", with_silent_pairs(_heaviest_rounds(seconds_GG, power), bytes_GG)) for power in POWERS]
    return min(orders, key=lambda order: timed(order, bytes_GG, network, staged=True).makespan_s)


def _heaviest_rounds(seconds_GG: FloatArray, power: float) -> IntArray:
    """(X, 2) the pairs that have traffic, round by round."""
    left_s_GG = seconds_GG.copy()
    rounds = [np.zeros((0, 2), np.int64)]
    while (longest_s := left_s_GG.max(initial=0.0)) > 0:
        out_s_G, in_s_G = left_s_GG.sum(axis=1), left_s_GG.sum(axis=0)
        busy_GG = (out_s_G[:, None] + in_s_G) / (2 * max(out_s_G.max(), in_s_G.max()))
        weight_GG = np.where(left_s_GG > 0, (left_s_GG / longest_s) ** power + busy_GG, 0.0)
        pairs_X2 = np.stack(linear_sum_assignment(weight_GG, maximize=True), axis=1)
        rounds.append(pairs_X2[left_s_GG[*pairs_X2.T] > 0])
        left_s_GG[*rounds[-1].T] = 0.0
    return np.concatenate(rounds)


WORTH = 0.002  # time that a further message must save, as a share of the bound
CUT_RUNS = 4000  # schedules that the search for cuts makes at most
AMPLITUDE = 0.1  # of drawn priorities, as a share of the bound
NEAR = 0.06  # a schedule that is longer than the shortest whole one by this share is not cut
MOST_TRIES = 6000
MANY_RANKS = 32  # of more, traffic with a schedule that TIGHT says is searched otherwise, in a fifth of the time
TIGHT = 0.02  # above the bound, as a share: ports that all have about as much to do, which neither draws nor cuts shorten much
BEST_OPERATIONS = 4e6  # steps of the inner loop that openshop-best takes at most, about; most tries are given up early

Cut = tuple[int, int, int]  # source, destination, bytes of the first part


def openshop_best(bytes_GG: IntArray, network: Network, *, rng: np.random.Generator) -> Order:
    """Orders by the shortest of many dense open-shop schedules with random priorities, with a few transfers split.

    If all transfers take nearly equally long, `matched_rounds` are tried too. The search takes tens of milliseconds.

    If the shortest with one message per pair takes longer than the bound, up to open_shop.MOST_CUTS pairs are cut in two
    messages, as long as each further message saves WORTH of the bound, start-ups included. Cuts never make the result longer,
    and are seldom more than two. Where `CutShop.tight` is true, nothing is cut.

    Args: as in `registry.OrderStrategy`.
    """
    shop, tries = CutShop(bytes_GG, network), search_tries(len(bytes_GG))
    schedule, cuts = best_whole(shop, tries, rng), list[Cut]()
    if not shop.tight(schedule.makespan_s):
        schedule, cuts = best_split(shop, schedule, min(CUT_RUNS, tries // 2), rng)
    pairs_X2 = with_silent_pairs(schedule.pairs_X2, bytes_GG)
    return Order("openshop-best", pairs_X2, share_X2=shop.shares(pairs_X2, cuts) if cuts else None)


def search_tries(ranks: int) -> int:
    """Returns the number of dense schedules that openshop-best tries for this number of ranks."""
    return int(np.clip(BEST_OPERATIONS / max(1, ranks) ** 2.4, SMALL_TRIES, MOST_TRIES))


class CutShop:
    """Makes dense open-shop schedules of one all-to-all, bytes_GG (n, n) int64, with some transfers cut in two.

    A Cut is (source, destination, bytes of the first part).
    """

    def __init__(self, bytes_GG: IntArray, network: Network) -> None:
        self.ranks = len(bytes_GG)
        self.seconds_GG = pair_seconds(bytes_GG, network)
        self.bound_s = longest_port(self.seconds_GG)
        self._bytes = bytes_GG.tolist()
        self._rates = pair_rates(network).tolist()
        self._startups = network.pair_startup_s_GG.tolist()

    def tight(self, makespan_s: float) -> bool:
        """Returns whether cuts are not worth a search: above MANY_RANKS ranks, if the makespan is over (1 + TIGHT) x bound."""
        return self.ranks > MANY_RANKS and makespan_s > self.bound_s * (1 + TIGHT)

    def run(self, bias_s: FloatArray, cuts: Sequence[Cut], limit_s: float = np.inf) -> DenseSchedule:
        """Returns the DenseSchedule with the transfers of `cuts` cut in two; bias_s (2 n,) and limit_s as in `dense`."""
        cut_C4 = np.empty((len(cuts), 4))
        for at, (src, dst, first) in enumerate(cuts):
            startup_s, rate_Bps = self._startups[src][dst], self._rates[src][dst]
            rest = self._bytes[src][dst] - first
            cut_C4[at] = src, dst, startup_s + first / rate_Bps, startup_s + rest / rate_Bps
        return dense(self.seconds_GG, bias_s, cut_C4, limit_s)

    def useful_cuts(self, schedule: DenseSchedule, cuts: Sequence[Cut]) -> list[Cut]:
        """Returns further cuts for a schedule with `cuts`; each would remove a wait of a port that ends last.

        A port waits while all partners that it still has traffic with are busy. Cutting a partner's transfer at the instant
        at which the wait begins makes that partner free.
        """
        cut_pairs = {cut[:2] for cut in cuts}
        more: list[Cut] = []
        for src, dst, into_s in core.blocking_transfers(self.ranks, schedule.pairs_X2, schedule.span_s_X2, 1e-9 * self.bound_s):
            first = math.ceil((into_s - self._startups[src][dst]) * self._rates[src][dst] - 1e-6)
            if 0 < first < self._bytes[src][dst] and (src, dst) not in cut_pairs:
                more.append((src, dst, first))
        return more

    def shares(self, pairs_X2: IntArray, cuts: Sequence[Cut]) -> FloatArray:
        """Returns (X, 2) float64, the part of its pair's bytes that each row of an order with `cuts` carries, from and to."""
        share_X2 = np.tile([0.0, 1.0], (len(pairs_X2), 1))
        for src, dst, first in cuts:
            before, after = np.flatnonzero((pairs_X2 == (src, dst)).all(axis=1))
            share_X2[before, 1] = share_X2[after, 0] = first / self._bytes[src][dst]
        return share_X2


def best_whole(shop: CutShop, tries: int, rng: np.random.Generator) -> DenseSchedule:
    """Searches for the shortest schedule with one message per pair, and returns it.

    Args:
        shop: the all-to-all.
        tries: number of dense schedules to try.
        rng: draws random priorities.
    """
    bound_s = shop.bound_s * (1 + 1e-12)
    first = min(tries, DRAWS)
    schedule = search(shop.seconds_GG, first, bound_s, rng, matched_rounds(shop.seconds_GG, bound_s, rng))
    if shop.tight(schedule.makespan_s):
        schedule = relieved(shop.seconds_GG, bound_s, schedule)
    elif schedule.makespan_s > bound_s:
        schedule = search(shop.seconds_GG, tries - first, bound_s, rng, schedule)
    return schedule


def best_split(shop: CutShop, whole: DenseSchedule, tries: int, rng: np.random.Generator) -> tuple[DenseSchedule, list[Cut]]:
    """Shortens a schedule by cutting the transfers of up to MOST_CUTS pairs in two messages each.

    Each further message must save WORTH of the bound. For each of many random priorities, cuts are made one after the other,
    each time the one that shortens the schedule most. Candidates are transfers that occupy a partner for which a port that ends
    last waits; the cut is at the instant at which the wait begins. Each part pays the start-up. Deterministic for the state of
    rng.

    Args:
        shop: the all-to-all.
        whole: the schedule to shorten.
        tries: maximum number of schedules to make.
        rng: draws random priorities.

    Returns:
        (schedule, cuts): the shortest schedule and its cuts; `whole` and none if no cut saves enough.
    """
    price_s, near_s = WORTH * shop.bound_s, whole.makespan_s * (1 + NEAR)
    best, best_s, best_cuts = whole, whole.makespan_s, list[Cut]()
    runs = 0
    while runs < tries and best_s > (shop.bound_s + price_s) * (1 + 1e-12):
        bias_s = (rng.random(2 * shop.ranks) - 0.5) * AMPLITUDE * shop.bound_s
        cuts: list[Cut] = []
        now = shop.run(bias_s, cuts, near_s)
        while runs < tries and len(cuts) < MOST_CUTS:
            runs += 1
            if now.makespan_s == np.inf:
                break
            shorter = None
            for cut in shop.useful_cuts(now, cuts)[: tries - runs]:
                runs += 1
                drawn = shop.run(bias_s, [*cuts, cut], (now if shorter is None else shorter[0]).makespan_s)
                if drawn.makespan_s < np.inf:
                    shorter = drawn, cut
            if shorter is None:
                break
            now = shorter[0]
            cuts.append(shorter[1])
            if now.makespan_s + len(cuts) * price_s < best_s:
                best, best_s, best_cuts = now, now.makespan_s + len(cuts) * price_s, list(cuts)
    return best, best_cuts
