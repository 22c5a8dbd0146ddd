"""How long an order takes: its schedule on given bytes and ports."""

import numpy as np
from numba import njit

from aurora.planner.network.fabric_bounds import cut_bound
from aurora.planner.network.lower_bounds import fluid, one_to_one
from aurora.planner.network.routes import route
from aurora.planner.network.switch import Pieces, Switch
from aurora.types import Fabric, Order, Schedule
from aurora.types.arrays import FloatArray, IntArray


def timed(
    order: Order,
    bytes_GG: IntArray,
    out_Bps: FloatArray,
    in_Bps: FloatArray,
    startup_s: FloatArray | None = None,
    fabric: Fabric | None = None,
    incast: float = 0.0,
) -> Schedule:
    """The schedule that `order` gives for these bytes when all ranks begin together.

    bytes_GG (G, G) int64 with a zero diagonal, rates (G,) bytes per second, startup_s (G,) seconds a message. On a fabric its
    links are shared as well as the ports, and the schedule names the cut that limits it. incast: as the cluster's.
    """
    startup_s = np.zeros(len(bytes_GG)) if startup_s is None else startup_s
    if order.one_to_one and not order.paced and fabric is None:
        made = one_to_one_pieces(order, bytes_GG, out_Bps, in_Bps, startup_s)
    else:
        made = fluid_pieces(order, bytes_GG, out_Bps, in_Bps, startup_s, fabric, incast)
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
        fluid(bytes_GG, out_Bps, in_Bps),
        one_to_one(bytes_GG, out_Bps, in_Bps),
        None if fabric is None else cut_bound(bytes_GG, fabric, out_Bps, in_Bps),
    )


def one_to_one_pieces(
    order: Order, bytes_GG: IntArray, out_Bps: FloatArray, in_Bps: FloatArray, startup_s: FloatArray
) -> Pieces:
    """With one partner at a time nothing is shared: a transfer starts when both of its ports are through with the last."""
    src_X, dst_X = order.pairs_X2.T
    cuts_X2 = order.cuts(bytes_GG[src_X, dst_X])
    size_X = cuts_X2[:, 1] - cuts_X2[:, 0]
    sent = size_X > 0
    src_X, dst_X, size_X = src_X[sent], dst_X[sent], size_X[sent]
    rate_Bps_X = np.minimum(out_Bps[src_X], in_Bps[dst_X])
    startup_s_X = np.maximum(startup_s[src_X], startup_s[dst_X])
    start_s_X, end_s_X = _one_after_the_other(src_X, dst_X, size_X, rate_Bps_X, startup_s_X, len(bytes_GG))
    return Pieces(src_X, dst_X, size_X, start_s_X, end_s_X, rate_Bps_X)


@njit(cache=True)
def _one_after_the_other(src_X, dst_X, size_X, rate_Bps_X, startup_s_X, ranks):
    free_out, free_in = np.zeros(ranks), np.zeros(ranks)
    start_s_X, end_s_X = np.empty(len(src_X)), np.empty(len(src_X))
    for row in range(len(src_X)):
        src, dst = src_X[row], dst_X[row]
        start_s_X[row] = max(free_out[src], free_in[dst]) + startup_s_X[row]
        end_s_X[row] = start_s_X[row] + size_X[row] / rate_Bps_X[row]
        free_out[src] = free_in[dst] = end_s_X[row]
    return start_s_X, end_s_X


def fluid_pieces(
    order: Order,
    bytes_GG: IntArray,
    out_Bps: FloatArray,
    in_Bps: FloatArray,
    startup_s: FloatArray,
    fabric: Fabric | None = None,
    incast: float = 0.0,
) -> Pieces:
    """Event by event on the switch: whatever is open shares ports and links, and a piece ends where its rate changes."""
    switch = Switch(route(out_Bps, in_Bps, fabric), startup_s, incast, logging=True)
    number = switch.open(order, bytes_GG)
    for rank in range(len(bytes_GG)):
        switch.join(number, rank)
    while switch.busy:
        switch.run()
    return switch.pieces()
