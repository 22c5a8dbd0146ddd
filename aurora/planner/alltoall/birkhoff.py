"""Orders that divide an all-to-all into slots: by Birkhoff decomposition with one partner at a time, or with sub-channels.

A slot is a set of transfers that run at the same time. With sub-channels, a fast port serves several slow ones in a slot.
"""

from collections.abc import Iterator
from dataclasses import replace
from math import isqrt

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_flow

from aurora.planner.alltoall.decomposition import north_west, slots
from aurora.planner.alltoall.open_shop import NO_CUTS, dense, with_silent_pairs
from aurora.planner.network.bounds import fluid_bound, one_to_one_bound, pair_seconds
from aurora.types import Network, Order, SubChannels
from aurora.types.arrays import FloatArray, IntArray, read_only
from aurora.types.compiled import njit

SLOTS = 8  # slots per rank at most; Birkhoff's largest-first matchings need fewer on most traffic


def birkhoff(bytes_GG: IntArray, network: Network, *, rng: np.random.Generator, most: int | None = None) -> Order:
    """Decomposes the traffic (Birkhoff) into slots: rounds in which each rank has one partner. Pairs may be split over slots.

    Without start-ups, of which every slot has one, it meets the one-to-one bound: exactly on equal ports, and up to rounding by
    a 2^40th of the bound on mixed ports.

    Args: as in `registry.OrderStrategy`; `rng` is not used.
        most: maximum number of slots; None: SLOTS * G. Bytes left after them are sent last, in the order `openshop`.

    Source: Aurora Thm 4.2.
    """
    work_GG = bytes_GG
    if not network.equal_ports:
        free = network.without_startup
        work_GG = ticks(pair_seconds(bytes_GG, free), one_to_one_bound(bytes_GG, free))
    _, partner_XG, units_XG = slots(read_only(work_GG), SLOTS * len(bytes_GG) if most is None else most)
    slot_X, src_X = np.nonzero(units_XG)
    dst_X, units_X = partner_XG[slot_X, src_X], units_XG[slot_X, src_X]
    return split_order("birkhoff", work_GG, np.stack([src_X, dst_X, units_X, np.ones_like(src_X)], axis=1))


def split_order(
    method: str, work_GG: IntArray, row_X4: IntArray, sub_channels: tuple[IntArray, IntArray] | None = None
) -> Order:
    """Returns an order with split transfers: first the given rows, then the remaining work, in open-shop order.

    Args:
        method: the order's name.
        work_GG: (n, n) int64, units of work from each sender to each receiver.
        row_X4: (X, 4) int64: source, destination, units of the pair's work in the row, and the number of sub-channels that the
            row takes at each of its ports.
        sub_channels: (n,) int64 each, the number of sub-channels of the sending ports and of the receiving ports; None: one
            partner at a time. A row of remaining work takes as many sub-channels as both of its ports have.
    """
    n = len(work_GG)
    left_GG = work_GG.copy()
    np.subtract.at(left_GG, (row_X4[:, 0], row_X4[:, 1]), row_X4[:, 2])
    if left_GG.any():
        width_GG = np.ones((n, n), np.int64) if sub_channels is None else np.minimum(sub_channels[0][:, None], sub_channels[1])
        src_X, dst_X = dense(left_GG / width_GG, np.zeros(2 * n), NO_CUTS, np.inf)[0].T
        rest_X4 = np.stack([src_X, dst_X, left_GG[src_X, dst_X], width_GG[src_X, dst_X]], axis=1)
        row_X4 = np.concatenate([row_X4, rest_X4])
    pairs_X2 = with_silent_pairs(row_X4[:, :2], work_GG)
    made = Order(method, pairs_X2, share_X2=_shares(read_only(work_GG), row_X4, len(pairs_X2)))
    if sub_channels is None:
        return made
    row_X = np.ones(len(pairs_X2), np.int64)
    row_X[: len(row_X4)] = row_X4[:, 3]
    return replace(made, sub_channels=SubChannels(row_X, *sub_channels))


@njit(cache=True)
def _shares(work_GG, row_X4, rows):
    """(rows, 2) the part of its pair's work that each row carries, from and to; rows beyond row_X4 carry all of it."""
    share_X2 = np.zeros((rows, 2))
    share_X2[:, 1] = 1.0
    done_GG = np.zeros_like(work_GG)
    for row in range(len(row_X4)):
        src, dst, units = row_X4[row, 0], row_X4[row, 1], row_X4[row, 2]
        share_X2[row, 0] = done_GG[src, dst] / work_GG[src, dst]
        done_GG[src, dst] += units
        share_X2[row, 1] = done_GG[src, dst] / work_GG[src, dst]
    return share_X2


def ticks(work_GG: IntArray | FloatArray, whole: float) -> IntArray:
    """Returns work_GG as integers in units of whole / 2^40, rounded up."""
    return np.ceil(work_GG / max(whole, 1e-300) * 2**40).astype(np.int64)


MOST_SUB_CHANNELS = 64  # of the slowest port; more would cut transfers too small
LOSS = 0.002  # accepted, as a share of the bound, because rates are not whole numbers of sub-channels


def sub_channels(bytes_GG: IntArray, network: Network, *, rng: np.random.Generator, most: int | None = None) -> Order:
    """Orders transfers in rounds (slots) in which a fast port serves several slow ports at once, over sub-channels of its rate.

    It meets the fluid bound up to start-ups, the rounding of rates to sub-channels (`sub_channel_counts`) and of parts to
    bytes. A pair's bytes may be split over several slots, and each part has a start-up.

    Args: as in `registry.OrderStrategy`; `rng` is not used.
        most: maximum number of slots; None: SLOTS * G. Bytes left after them are sent last, one partner at a time.

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

    All sub-channels have about the same rate. The slowest port that carries bytes gets the smallest number of sub-channels for
    which rounding costs at most LOSS of the fluid bound; if no number up to MOST_SUB_CHANNELS does, the best number.
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
    """Divides work into slots (rounds) that use all sub-channels of all ports; yields them.

    A slot's length is the number of units of work that one sub-channel carries in it. The lengths sum to the largest work /
    sub-channels of a port, rounded up, and every unit is served once. The matrix is padded until every port is busy to the end.
    Each slot is the flow through all sub-channels whose smallest work per sub-channel is largest.

    Args:
        work_GG: (n, n) int64, units of work from each sender to each receiver.
        out_G: (n,) int64, sub-channels of each sending port.
        in_G: (n,) int64, sub-channels of each receiving port.
        most: maximum number of slots; the remaining work is left to the caller.

    Yields:
        (sub_channels_GG, units_GG), (n, n) int64 each: the number of sub-channels that every pair takes in the slot, and the
        units of its work that they carry.

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
