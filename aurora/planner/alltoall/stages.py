"""An order for transfers that run in stages, as on NCCL, where a rank's send and receive of one stage end together."""

import numpy as np
from scipy.optimize import linear_sum_assignment

from aurora.planner.alltoall.pairs import with_silent_pairs
from aurora.planner.network.lower_bounds import pair_seconds
from aurora.planner.network.schedule_time import timed
from aurora.types import Network, Order
from aurora.types.arrays import FloatArray, IntArray

POWERS = (1.0, 2.0, 4.0)  # how much more a long transfer counts than a short one, in turn


def matchings(bytes_GG: IntArray, network: Network, *, rng: np.random.Generator) -> Order:
    """Rounds of matchings, long transfers first: each pair has one message, and each round is a stage.

    A round is the matching of the pairs that are left with the largest weight. A pair weighs a power of its seconds, and the
    seconds that both of its ports have left: so the transfers of a round take about as long, and the busiest ports have no idle
    round. Of the orders by several POWERS, the one is kept that takes least in stages.

    Args: as in `registry.OrderStrategy`; `rng` is not used.
    """
    seconds_GG = pair_seconds(bytes_GG, network)
    orders = [Order("matchings", with_silent_pairs(_rounds(seconds_GG, power), bytes_GG)) for power in POWERS]
    return min(orders, key=lambda order: timed(order, bytes_GG, network, staged=True).makespan_s)


def _rounds(seconds_GG: FloatArray, power: float) -> IntArray:
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
