"""When each row of an order that holds rates starts, and how fast it flows: what a sender needs to hold it by its clock."""

import numpy as np

from aurora.planner.network.routes import route
from aurora.planner.network.switch import gated
from aurora.types import Network, Order
from aurora.types.arrays import FloatArray, IntArray


def row_pacing(order: Order, bytes_GG: IntArray, network: Network) -> tuple[FloatArray, FloatArray]:
    """(X,) seconds from the common start, and (X,) bytes per second, of each row of a paced order or one with lanes.

    Paced rows start together, each at its bytes over the fluid optimum on its routes (coflow MADD). A row with lanes starts
    when those before it have left enough lanes of both of its ports, and flows at its lanes' share of the slower one.
    """
    row_X, size_X, most_Bps_X = gated(order, bytes_GG, route(network))
    start_s_X, rate_Bps_X = np.zeros(len(order.pairs_X2)), np.full(len(order.pairs_X2), np.inf)
    rate_Bps_X[row_X] = most_Bps_X
    if order.sub_channels is not None:
        room = [*order.sub_channels.out_G.tolist(), *order.sub_channels.in_G.tolist()]
        held: list[list[tuple[float, int]]] = [[] for _ in room]  # of each port: when rows end, and their lanes
        for row, size in zip(row_X.tolist(), size_X.tolist(), strict=True):
            src, dst = order.pairs_X2[row].tolist()
            sub_channels, ports = int(order.sub_channels.row_X[row]), (src, len(bytes_GG) + dst)
            start_s_X[row] = max(_free(held[port], room[port] - sub_channels) for port in ports)
            end_s = start_s_X[row] + size / rate_Bps_X[row]
            for port in ports:
                held[port].append((end_s, sub_channels))
    return start_s_X, rate_Bps_X


def _free(held: list[tuple[float, int]], room: int) -> float:
    """The first time from which the rows that hold a port's lanes leave all but `room` of them."""
    taken, since_s = sum(sub_channels for _, sub_channels in held), 0.0
    for end_s, sub_channels in sorted(held):
        if taken <= room:
            break
        taken, since_s = taken - sub_channels, end_s
    return since_s
