"""Pacing: the rate limits of an order's rows, and when each row of a paced order starts."""

import numpy as np

from aurora.planner.network.routes import Routes, route
from aurora.types import Network, Order
from aurora.types.arrays import FloatArray, IntArray


def rows_to_send(order: Order, bytes_GG: IntArray, routes: Routes) -> tuple[IntArray, IntArray, FloatArray]:
    """Returns, for the rows of an order that carry bytes, (their indices, their bytes, their rate limits), (X,) each.

    A row's limit is its sub-channels' share of the slower port if the order has sub-channels, the row's bytes over the fluid
    optimum if it is paced (coflow MADD), and infinite otherwise.
    """
    n = len(bytes_GG)
    src_X, dst_X = order.pairs_X2.T
    cuts_X2 = order.cuts(bytes_GG[src_X, dst_X])
    size_X = cuts_X2[:, 1] - cuts_X2[:, 0]
    limit_Bps_X = np.full(len(size_X), np.inf)
    if order.sub_channels is not None:
        out_Bps, in_Bps = routes.capacity_Bps_R[:n], routes.capacity_Bps_R[n : 2 * n]
        per_channel_Bps_X = np.minimum((out_Bps / order.sub_channels.out_G)[src_X], (in_Bps / order.sub_channels.in_G)[dst_X])
        limit_Bps_X = order.sub_channels.row_X * per_channel_Bps_X
    elif order.paced and (optimum_s := routes.seconds(bytes_GG)) > 0:
        limit_Bps_X = size_X / optimum_s
    row_X = np.flatnonzero(size_X)
    return row_X, size_X[row_X], limit_Bps_X[row_X]


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
