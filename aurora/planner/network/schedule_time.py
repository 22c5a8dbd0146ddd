"""Times an order: its schedule for given bytes on a network."""

import numpy as np
from numba import njit

from aurora.planner.network.fabric_bounds import cut_bound
from aurora.planner.network.lower_bounds import fluid_bound, one_to_one_bound
from aurora.planner.network.switch import Pieces, Switch
from aurora.types import Network, Order, Schedule
from aurora.types.arrays import IntArray


def timed(order: Order, bytes_GG: IntArray, network: Network) -> Schedule:
    """Computes the schedule of an order when all ranks begin at once.

    On a fabric, transfers share links as well as ports, and the schedule names the cut that limits it.

    Args:
        order: the order.
        bytes_GG: (G, G) int64 with a zero diagonal, bytes from each rank to each other.
        network: ports, start-ups, fabric and incast.
    """
    if order.one_to_one and not order.paced and network.fabric is None:
        made = one_to_one_pieces(order, bytes_GG, network)
    else:
        made = fluid_pieces(order, bytes_GG, network)
    by_start = np.lexsort((made.rate_Bps_X, made.end_s_X, made.bytes_X, made.dst_X, made.src_X, made.start_s_X))
    return Schedule(
        order.method,
        order.one_to_one,
        made.src_X[by_start],
        made.dst_X[by_start],
        made.bytes_X[by_start],
        made.start_s_X[by_start],
        made.end_s_X[by_start],
        made.rate_Bps_X[by_start],
        fluid_bound(bytes_GG, network),
        one_to_one_bound(bytes_GG, network.without_startup),
        None if network.fabric is None else cut_bound(bytes_GG, network),
    )


def one_to_one_pieces(order: Order, bytes_GG: IntArray, network: Network) -> Pieces:
    """Returns the timed pieces of an order with `one_to_one`, not paced, on a network without a fabric.

    A transfer starts when both of its ports have ended the one before.

    Ports are not shared then, so that every transfer flows at one rate.
    """
    src_X, dst_X = order.pairs_X2.T
    cuts_X2 = order.cuts(bytes_GG[src_X, dst_X])
    size_X = cuts_X2[:, 1] - cuts_X2[:, 0]
    sent = size_X > 0
    src_X, dst_X, size_X = src_X[sent], dst_X[sent], size_X[sent]
    rate_Bps_X, startup_s_X = network.pair_Bps_GG[src_X, dst_X], network.pair_startup_s_GG[src_X, dst_X]
    start_s_X, end_s_X = _one_after_the_other(src_X, dst_X, size_X, rate_Bps_X, startup_s_X, len(bytes_GG))
    return Pieces(src_X, dst_X, size_X, start_s_X, end_s_X, rate_Bps_X)


@njit(cache=True)
def _one_after_the_other(src_X, dst_X, size_X, rate_Bps_X, startup_s_X, ranks):
    """(X,) start and end of each transfer, in seconds."""
    free_out, free_in = np.zeros(ranks), np.zeros(ranks)
    start_s_X, end_s_X = np.empty(len(src_X)), np.empty(len(src_X))
    for row in range(len(src_X)):
        src, dst = src_X[row], dst_X[row]
        start_s_X[row] = max(free_out[src], free_in[dst]) + startup_s_X[row]
        end_s_X[row] = start_s_X[row] + size_X[row] / rate_Bps_X[row]
        free_out[src] = free_in[dst] = end_s_X[row]
    return start_s_X, end_s_X


def fluid_pieces(order: Order, bytes_GG: IntArray, network: Network) -> Pieces:
    """Returns the timed pieces of any order, event by event on the Switch: concurrent transfers share ports and links."""
    switch = Switch(network, logging=True)
    number = switch.open(order, bytes_GG)
    for rank in range(len(bytes_GG)):
        switch.join(number, rank)
    while switch.busy:
        switch.run()
    return switch.pieces()
