"""Rounds of perfect matchings: for transfers that take about as long, without barriers; and in stages, as on NCCL."""

import numpy as np
from scipy.optimize import linear_sum_assignment

from aurora.planner.alltoall.open_shop import DenseSchedule, with_silent_pairs
from aurora.planner.network.bounds import pair_seconds
from aurora.types import Network, Order
from aurora.types.arrays import FloatArray, IntArray

MOST_SPREAD = 3.0  # longest transfer over shortest up to which rounds are tried; beyond, dense schedules are shorter
LEAST_SLACK = 0.4  # of a port, in standard deviations of the transfers' durations: what a wait is divided by at least
PACE = 0.3  # cost of ending a standard deviation before or after the pace
NOISE = 0.05  # drawn costs, at most
MOST_TRIES = 200
OPERATIONS = 2e6  # cubes of ranks over all tries, about
ENOUGH = 5e-4  # above the bound, as a share of it: nearer is not searched for


def matched_rounds(seconds_GG: FloatArray, bound_s: float, rng: np.random.Generator) -> DenseSchedule | None:
    """Returns the shortest schedule found in which each rank has a partner in each of n - 1 rounds; None if none is tried.

    There are no barriers: a transfer starts when both of its ports have ended the one before. Each round is the perfect
    matching of least cost of the pairs that are left. A wait costs the square of its share of the port's slack, which is the
    time that the port can lose without passing the bound; so the ports with the largest load hardly wait. Ends off a pace that
    all ports share cost too, so that ports stay close together and later rounds find partners that are free at the same time.
    The costs of all tries but the first have noise.

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
    for number in range(int(np.clip(OPERATIONS / n**3, 1, MOST_TRIES))):
        made = _matched(seconds_GG, bound_s, unit_s, NOISE * (number > 0), rng)
        if best is None or made.makespan_s < best.makespan_s:
            best = made
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
    """Rounds of matchings, long transfers first: each pair has one message, and each round is a stage.

    A round is the matching of the pairs that are left with the largest weight. A pair weighs a power of its seconds, and the
    seconds that both of its ports have left: so the transfers of a round take about as long, and the busiest ports have no idle
    round. Of the orders by several POWERS, the one is kept that takes least in stages.

    Args: as in `registry.OrderStrategy`; `rng` is not used.
    """
    from aurora.planner.network.switch import timed  # loads the switch, which no other order needs

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
