"""Mixed ports at the fluid bound: ports cut into lanes, and slots in which a fast port serves several slow ones."""

from collections.abc import Iterator
from math import isqrt

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_flow

from aurora.planner.alltoall.birkhoff import north_west
from aurora.planner.alltoall.split_rows import SLOTS, SplitRows, ticks
from aurora.planner.network.lower_bounds import fluid_bound
from aurora.types import Network, Order
from aurora.types.arrays import IntArray

MOST_SUB_CHANNELS = 64  # of the slowest port; more would cut transfers into crumbs
LOSS = 0.002  # of the bound, by rates that are not whole numbers of lanes


def sub_channels(bytes_GG: IntArray, network: Network, *, rng: np.random.Generator, most: int | None = None) -> Order:
    """Slots in which a fast port serves several slow ones at once, each over whole sub-channels; meets the fluid bound.

    To within the rounding of rates to sub-channels (`sub_channel_counts`) and of every piece to whole bytes. At most `most`
    slots are peeled (SLOTS n by default); what is left after them goes last, one partner at a time. Transfers are split between
    slots, and each piece costs a start-up. Source: the fluid bound of Aurora Thm 5.2, which one partner at a time misses on
    mixed ports.
    """
    out_G, in_G = sub_channel_counts(bytes_GG, network)
    work_GG = ticks(bytes_GG, float(bytes_GG.sum()))
    rows = SplitRows(work_GG)
    for sub_channels_GG, units_GG in sub_channel_slots(work_GG, out_G, in_G, SLOTS * len(bytes_GG) if most is None else most):
        for src, dst in np.argwhere(units_GG).tolist():
            rows.serve(src, dst, int(units_GG[src, dst]), int(sub_channels_GG[src, dst]))
    return rows.order("sub-channels", out_G, in_G)


def sub_channel_counts(bytes_GG: IntArray, network: Network) -> tuple[IntArray, IntArray]:
    """(G,) and (G,) int64: how many lanes each port has when sending and when receiving.

    All lanes are as fast; the slowest port that carries anything has as few as leave the all-to-all within LOSS of its fluid
    bound, or the best up to MOST_LANES.
    """
    load = np.concatenate([bytes_GG.sum(axis=1), bytes_GG.sum(axis=0)])
    rates = np.concatenate([network.out_Bps_G, network.in_Bps_G])
    best: tuple[float, IntArray] | None = None
    for count in range(1, MOST_SUB_CHANNELS + 1):
        lane_Bps = rates[load > 0].min(initial=np.inf) / count
        counts = np.maximum(1, np.floor(rates / lane_Bps * (1 + 1e-9))).astype(np.int64)
        slowest_s = float((load / (counts * lane_Bps)).max(initial=0.0))
        if best is None or slowest_s < best[0]:
            best = slowest_s, counts
        if slowest_s <= fluid_bound(bytes_GG, network) * (1 + LOSS):
            break
    assert best is not None
    out_G, in_G = np.split(best[1], 2)
    return out_G, in_G


def sub_channel_slots(work_GG: IntArray, out_G: IntArray, in_G: IntArray, most: int) -> Iterator[tuple[IntArray, IntArray]]:
    """(lanes_GG, units_GG) of each slot: how many lanes every pair takes in it, and how much of its work goes over them.

    work_GG (n, n) int64, whole units; out_G, in_G (n,) int64: lanes of each port. The slots' lengths, in units of a lane, sum
    to the largest of each port's work over its lanes, rounded up, and every unit is served once: the matrix is padded until
    every port is full to the end, and peeled by flows that fill every lane and whose thinnest lane is thickest (Birkhoff 1946
    for rows and columns that sum to multiples of one length). After `most` slots it stops; what is left is the caller's.
    """
    n = len(work_GG)
    length = int(np.max([-(-work_GG.sum(axis=1) // out_G), -(-work_GG.sum(axis=0) // in_G)], initial=0))
    left_GG, padding_GG, out_G, in_G = _padded(work_GG, out_G, in_G, length)
    for _ in range(most):
        if not left_GG.any():
            return
        total_GG = left_GG + padding_GG
        sub_channels_GG = _thickest(total_GG, out_G, in_G, length)
        taken = sub_channels_GG > 0
        thin = int((total_GG[taken] // sub_channels_GG[taken]).min())
        units_GG = np.minimum(left_GG, sub_channels_GG * thin)  # the real work first, then what only pads
        left_GG -= units_GG
        padding_GG -= sub_channels_GG * thin - units_GG
        length -= thin
        yield sub_channels_GG[:n, :n], units_GG[:n, :n]


def _padded(work_GG: IntArray, out_G: IntArray, in_G: IntArray, length: int) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Work, padding and lanes of a matrix whose rows and columns sum to lanes x length, one rank larger.

    The last rank has the lanes that senders have more than receivers, or the other way round, and no work.
    """
    spare = int(out_G.sum() - in_G.sum())
    out_G, in_G = np.append(out_G, max(0, -spare)), np.append(in_G, max(0, spare))
    work_GG = np.pad(work_GG, (0, 1))
    padding_GG = north_west(out_G * length - work_GG.sum(axis=1), in_G * length - work_GG.sum(axis=0))
    return work_GG, padding_GG, out_G, in_G


def _thickest(total_GG: IntArray, out_G: IntArray, in_G: IntArray, length: int) -> IntArray:
    """(n, n) lanes of each pair, filling every port's, such that the least work a lane is as large as can be.

    There is one at a work of 1 a lane: total_GG / length fills every lane with fractions, and flows are integral.
    """
    low, high = 1, length
    best = _filling(total_GG, out_G, in_G, 1)
    while low < high * (1 - 1e-3):  # to a thousandth: a thinner slot costs a slot, not time
        middle = max(low + 1, isqrt(low * high))
        found = _filling(total_GG, out_G, in_G, middle)
        if found is None:
            high = middle - 1
        else:
            best, low = found, middle
    assert best is not None, "rows and columns sum to lanes x length"
    return best


def _filling(total_GG: IntArray, out_G: IntArray, in_G: IntArray, thick: int) -> IntArray | None:
    """(n, n) lanes of each pair that fill every port when each lane takes `thick` units, or None: a maximum flow."""
    n = len(total_GG)
    room_GG = np.minimum(total_GG // thick, np.minimum(out_G[:, None], in_G[None, :]))
    if (room_GG.sum(axis=1) < out_G).any() or (room_GG.sum(axis=0) < in_G).any():
        return None
    graph = np.zeros((2 * n + 2, 2 * n + 2), dtype=np.int32)
    graph[2 * n, :n], graph[n : 2 * n, 2 * n + 1] = out_G, in_G
    graph[:n, n : 2 * n] = room_GG
    flow = maximum_flow(csr_array(graph), 2 * n, 2 * n + 1)
    if flow.flow_value < out_G.sum():
        return None
    return np.asarray(flow.flow.toarray()[:n, n : 2 * n], dtype=np.int64)
