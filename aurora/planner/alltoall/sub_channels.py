"""Sub-channels: meets the fluid bound on mixed ports by slots in which a fast port serves several slow ones at once."""

from collections.abc import Iterator
from math import isqrt

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_flow

from aurora.planner.alltoall.birkhoff import SLOTS, north_west, split_order, ticks
from aurora.planner.network.lower_bounds import fluid_bound
from aurora.types import Network, Order
from aurora.types.arrays import IntArray

MOST_SUB_CHANNELS = 64  # of the slowest port; more would cut transfers too small
LOSS = 0.002  # accepted, as a share of the bound, because rates are not whole numbers of sub-channels


def sub_channels(bytes_GG: IntArray, network: Network, *, rng: np.random.Generator, most: int | None = None) -> Order:
    """Makes slots in which a fast port serves several slow ports at once, each over whole sub-channels.

    The fluid bound is met to within the rounding of rates to sub-channels (`sub_channel_counts`) and of every part to whole
    bytes. Transfers are split between slots, and each part costs a start-up.

    Args: as in `registry.OrderStrategy`; `rng` is not used.
        most: slots to make at most; None: SLOTS * G. What is left after them goes last, one partner at a time.

    Source: the fluid bound of Aurora Thm 5.2, which orders with one partner at a time miss on mixed ports.
    """
    out_G, in_G = sub_channel_counts(bytes_GG, network)
    work_GG = ticks(bytes_GG, float(bytes_GG.sum()))
    rows = [np.zeros((0, 4), np.int64)]
    for sub_channels_GG, units_GG in sub_channel_slots(work_GG, out_G, in_G, SLOTS * len(bytes_GG) if most is None else most):
        src_X, dst_X = np.nonzero(units_GG)
        rows.append(np.stack([src_X, dst_X, units_GG[src_X, dst_X], sub_channels_GG[src_X, dst_X]], axis=1))
    return split_order("sub-channels", work_GG, np.concatenate(rows), (out_G, in_G))


def sub_channel_counts(bytes_GG: IntArray, network: Network) -> tuple[IntArray, IntArray]:
    """Chooses how many sub-channels each port has for sending, and for receiving: (out_G, in_G), (G,) int64 each.

    All sub-channels have about one rate. The slowest port that carries bytes gets the smallest number of them that keeps the
    all-to-all within LOSS of its fluid bound; if none up to MOST_SUB_CHANNELS does, the best.
    """
    load = np.concatenate([bytes_GG.sum(axis=1), bytes_GG.sum(axis=0)])
    rates = np.concatenate([network.out_Bps_G, network.in_Bps_G])
    best: tuple[float, IntArray] | None = None
    for count in range(1, MOST_SUB_CHANNELS + 1):
        channel_Bps = rates[load > 0].min(initial=np.inf) / count
        counts = np.maximum(1, np.floor(rates / channel_Bps * (1 + 1e-9))).astype(np.int64)
        slowest_s = float((load / (counts * channel_Bps)).max(initial=0.0))
        if best is None or slowest_s < best[0]:
            best = slowest_s, counts
        if slowest_s <= fluid_bound(bytes_GG, network) * (1 + LOSS):
            break
    assert best is not None
    out_G, in_G = np.split(best[1], 2)
    return out_G, in_G


def sub_channel_slots(work_GG: IntArray, out_G: IntArray, in_G: IntArray, most: int) -> Iterator[tuple[IntArray, IntArray]]:
    """Yields slots that fill the sub-channels of all ports.

    The slots' lengths, in units of one sub-channel, sum to the largest of each port's work over its sub-channels, rounded up,
    and every unit is served once. The matrix is padded until every port is busy to the end. Each slot is a flow that fills
    every sub-channel and whose smallest work per sub-channel is largest.

    Args:
        work_GG: (n, n) int64, units of work from each sender to each receiver.
        out_G: (n,) int64, sub-channels of each sending port.
        in_G: (n,) int64, sub-channels of each receiving port.
        most: slots to make at most; the caller serves what is left.

    Yields:
        (sub_channels_GG, units_GG), (n, n) int64 each: the sub-channels that every pair takes in the slot, and the units of its
        work that they carry.

    Source: Birkhoff 1946, for rows and columns that sum to multiples of one length.
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
        units_GG = np.minimum(left_GG, sub_channels_GG * thin)  # the work first, then the padding
        left_GG -= units_GG
        padding_GG -= sub_channels_GG * thin - units_GG
        length -= thin
        yield sub_channels_GG[:n, :n], units_GG[:n, :n]


def _padded(work_GG: IntArray, out_G: IntArray, in_G: IntArray, length: int) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Work, padding and sub-channels of a matrix whose rows and columns sum to sub-channels x length, one rank larger.

    The last rank has the sub-channels that senders have more than receivers, or the other way round, and no work.
    """
    spare = int(out_G.sum() - in_G.sum())
    out_G, in_G = np.append(out_G, max(0, -spare)), np.append(in_G, max(0, spare))
    work_GG = np.pad(work_GG, (0, 1))
    padding_GG = north_west(out_G * length - work_GG.sum(axis=1), in_G * length - work_GG.sum(axis=0))
    return work_GG, padding_GG, out_G, in_G


def _thickest(total_GG: IntArray, out_G: IntArray, in_G: IntArray, length: int) -> IntArray:
    """(n, n) sub-channels of each pair that fill every port, such that the least work per sub-channel is as large as possible.

    A solution exists at a work of 1 per sub-channel: total_GG / length fills every sub-channel with fractions, and flows are
    integral.
    """
    low, high = 1, length
    best = _filling(total_GG, out_G, in_G, 1)
    while low < high * (1 - 1e-3):  # to a thousandth: a shorter slot costs one more slot, but no time
        middle = max(low + 1, isqrt(low * high))
        found = _filling(total_GG, out_G, in_G, middle)
        if found is None:
            high = middle - 1
        else:
            best, low = found, middle
    assert best is not None, "rows and columns sum to sub-channels x length"
    return best


def _filling(total_GG: IntArray, out_G: IntArray, in_G: IntArray, thick: int) -> IntArray | None:
    """(n, n) sub-channels of each pair that fill every port when each carries `thick` units (maximum flow), or None."""
    n = len(total_GG)
    most_GG = np.minimum(total_GG // thick, np.minimum(out_G[:, None], in_G[None, :]))
    if (most_GG.sum(axis=1) < out_G).any() or (most_GG.sum(axis=0) < in_G).any():
        return None
    graph = np.zeros((2 * n + 2, 2 * n + 2), dtype=np.int32)
    graph[2 * n, :n], graph[n : 2 * n, 2 * n + 1] = out_G, in_G
    graph[:n, n : 2 * n] = most_GG
    flow = maximum_flow(csr_array(graph), 2 * n, 2 * n + 1)
    if flow.flow_value < out_G.sum():
        return None
    return np.asarray(flow.flow.toarray()[:n, n : 2 * n], dtype=np.int64)
