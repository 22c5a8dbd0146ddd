"""Pacing: start times and rates of an order's rows, from which senders pace themselves by their own clocks."""

import numpy as np

from aurora.planner.network.routes import route
from aurora.planner.network.switch import rows_to_send
from aurora.types import Network, Order
from aurora.types.arrays import FloatArray, IntArray


def row_pacing(order: Order, bytes_GG: IntArray, network: Network) -> tuple[FloatArray, FloatArray]:
    """Computes when each row of a paced order, or of one with sub-channels, starts and at which rate it flows.

    All rows of a paced order start at once, each at its bytes over the fluid optimum on its routes (coflow MADD). With
    sub-channels, a row starts when the rows before it have left enough sub-channels of both of its ports, and flows at its
    sub-channels' share of the slower port.

    Returns (start_s_X, rate_Bps_X), (X,) float64 each: seconds from the common start, and bytes per second. A row without bytes
    has start zero and an infinite rate.
    """
    row_X, size_X, limit_Bps_X = rows_to_send(order, bytes_GG, route(network))
    start_s_X, rate_Bps_X = np.zeros(len(order.pairs_X2)), np.full(len(order.pairs_X2), np.inf)
    rate_Bps_X[row_X] = limit_Bps_X
    if order.sub_channels is not None:
        count = [*order.sub_channels.out_G.tolist(), *order.sub_channels.in_G.tolist()]  # sub-channels of each port
        taken: list[list[tuple[float, int]]] = [[] for _ in count]  # of each port: when rows end, and their sub-channels
        for row, size in zip(row_X.tolist(), size_X.tolist(), strict=True):
            src, dst = order.pairs_X2[row].tolist()
            sub_channels, ports = int(order.sub_channels.row_X[row]), (src, len(bytes_GG) + dst)
            start_s_X[row] = max(_free_from(taken[port], count[port] - sub_channels) for port in ports)
            end_s = start_s_X[row] + size / rate_Bps_X[row]
            for port in ports:
                taken[port].append((end_s, sub_channels))
    return start_s_X, rate_Bps_X


def _free_from(taken: list[tuple[float, int]], most: int) -> float:
    """The first time, in seconds, from which a port's rows take at most `most` of its sub-channels."""
    total, since_s = sum(sub_channels for _, sub_channels in taken), 0.0
    for end_s, sub_channels in sorted(taken):
        if total <= most:
            break
        total, since_s = total - sub_channels, end_s
    return since_s
