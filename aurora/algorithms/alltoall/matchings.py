"""Orders in rounds of perfect matchings: `matchings` runs them as stages, for NCCL; `openshop-best` without barriers.

`openshop-best` searches dense open-shop schedules too, and keeps the shortest.
"""

import numpy as np
from scipy.optimize import linear_sum_assignment

from aurora.algorithms.alltoall.open_shop import SMALL_TRIES, DenseSchedule, search, with_silent_pairs
from aurora.algorithms.network.port_bounds import longest_port, pair_seconds
from aurora.types import Network, Order
from aurora.types.arrays import FloatArray, IntArray

MOST_TRIES = 6000
OPEN_SHOP_OPERATIONS = 4e6  # steps of the inner loop that openshop-best takes at most, about; most tries are given up early


def openshop_best(bytes_GG: IntArray, network: Network, *, rng: np.random.Generator) -> Order:
    """Orders by the shortest of many dense open-shop schedules with random priorities, in tens of milliseconds.

    If all transfers take nearly equally long, `matched_rounds` are tried too.

    Args: as in `registry.OrderStrategy`.
    """
    seconds_GG = pair_seconds(bytes_GG, network)
    tries = int(np.clip(OPEN_SHOP_OPERATIONS / max(1, len(bytes_GG)) ** 2.4, SMALL_TRIES, MOST_TRIES))
    rounds = matched_rounds(seconds_GG, longest_port(seconds_GG), rng)
    schedule = search(seconds_GG, tries, rng, np.inf if rounds is None else rounds.makespan_s)
    if rounds is not None and rounds.makespan_s < schedule.makespan_s:
        schedule = rounds
    return Order("openshop-best", with_silent_pairs(schedule.pairs_X2, bytes_GG))


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
    pairs_RG2, start_s_RG = np.zeros((n - 1, n, 2), np.int64), np.zeros((n - 1, n))
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
        pairs_RG2[number], start_s_RG[number] = np.stack([src_G, dst_G], axis=1), start_s_G
    by_start = np.argsort(start_s_RG, axis=None, kind="stable")
    return DenseSchedule(pairs_RG2.reshape(-1, 2)[by_start], float(free_out_s.max()))


POWER = 4.0  # of a transfer's seconds in its weight: how much more a long transfer counts than a short one


def matchings(bytes_GG: IntArray, network: Network, *, rng: np.random.Generator) -> Order:
    """Orders transfers in rounds of matchings, long transfers first: each pair has one message, and each round is a stage.

    A round is the matching of largest weight among the remaining pairs. The weight of a pair grows with a power of its seconds,
    so that the transfers of a round take nearly equally long; and with its ports' remaining seconds, so that the busiest ports
    have no idle round.

    Args: as in `registry.OrderStrategy`; `rng` is not used.
    """
    left_s_GG = pair_seconds(bytes_GG, network)
    rounds = [np.zeros((0, 2), np.int64)]
    while (longest_s := left_s_GG.max(initial=0.0)) > 0:
        out_s_G, in_s_G = left_s_GG.sum(axis=1), left_s_GG.sum(axis=0)
        busy_GG = (out_s_G[:, None] + in_s_G) / (2 * max(out_s_G.max(), in_s_G.max()))
        weight_GG = np.where(left_s_GG > 0, (left_s_GG / longest_s) ** POWER + busy_GG, 0.0)
        pairs_X2 = np.stack(linear_sum_assignment(weight_GG, maximize=True), axis=1)
        rounds.append(pairs_X2[left_s_GG[*pairs_X2.T] > 0])
        left_s_GG[*rounds[-1].T] = 0.0
    return Order("matchings", with_silent_pairs(np.concatenate(rounds), bytes_GG))
