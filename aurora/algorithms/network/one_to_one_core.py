"""Times of transfers that have both of their ports for themselves, compiled by Cython; `switch` and `port_bounds` call it."""

import cython
import numpy as np
from cython import nogil

if cython.compiled:
    from cython.cimports.aurora.algorithms.core_arrays import *
else:
    from aurora.algorithms.core_arrays import *


@cython.locals(at=Index, start_s=Float, end_s=Float)
def one_after_the_other(
    pairs_X2: ConstInts2, bytes_GG: ConstInts2, Bps_GG: ConstFloats2, startup_s_GG: ConstFloats2, size_X: ConstInts1 = None
):
    """Times rows that start when both of their ports have ended their previous row; rows without bytes are left out.

    Args:
        pairs_X2: (X, 2) source and destination.
        bytes_GG: (G, G) bytes of each pair.
        Bps_GG, startup_s_GG: (G, G) rate and start-up of each pair.
        size_X: (X,) bytes of each row; None: those of its pair.

    Returns:
        Locked columns of the rows: source, destination, bytes, start and end in seconds, rate; rows that start together come by
        source. And whether the rows are by start; if not, some that start together may not be by source.
    """
    rows: Index = pairs_X2.shape[0]
    whole, seconds = np.empty((3, rows), np.int64), np.empty((3, rows))
    whole_3X: Ints2 = whole
    seconds_3X: Floats2 = seconds
    src_X, dst_X, bytes_X = whole_3X[0], whole_3X[1], whole_3X[2]
    start_s_X, end_s_X, Bps_X = seconds_3X[0], seconds_3X[1], seconds_3X[2]
    ranks: Index = bytes_GG.shape[0]
    free_s: Floats1 = np.zeros(2 * ranks)  # when each port has ended its last row; senders first
    by_start: cython.bint = True
    count: Index = 0
    last_s: Float = 0.0
    with nogil:
        for row in range(rows):
            src, dst = pairs_X2[row, 0], pairs_X2[row, 1]
            size = bytes_GG[src, dst] if size_X is None else size_X[row]
            if size == 0:
                continue
            start_s = max(free_s[src], free_s[ranks + dst]) + startup_s_GG[src, dst]
            end_s = start_s + size / Bps_GG[src, dst]
            free_s[src] = free_s[ranks + dst] = end_s
            by_start = by_start and start_s >= last_s
            last_s = start_s
            at = count
            while at > 0 and start_s_X[at - 1] == start_s and src_X[at - 1] > src:
                src_X[at], dst_X[at], bytes_X[at] = src_X[at - 1], dst_X[at - 1], bytes_X[at - 1]
                start_s_X[at], end_s_X[at], Bps_X[at] = start_s, end_s_X[at - 1], Bps_X[at - 1]
                at -= 1
            src_X[at], dst_X[at], bytes_X[at] = src, dst, size
            start_s_X[at], end_s_X[at], Bps_X[at] = start_s, end_s, Bps_GG[src, dst]
            count += 1
    if count < rows:
        whole, seconds = whole[:, :count].copy(), seconds[:, :count].copy()
    whole.setflags(write=False)
    seconds.setflags(write=False)
    return [*whole, *seconds], by_start


def pair_seconds(bytes_GG: ConstInts2, Bps_GG: ConstFloats2, startup_s_GG: ConstFloats2):
    """Returns (G, G) the seconds of each transfer, its start-up included; zero where no bytes are."""
    seconds = np.empty((bytes_GG.shape[0], bytes_GG.shape[0]))
    seconds_GG: Floats2 = seconds
    with nogil:
        for src in range(bytes_GG.shape[0]):
            for dst in range(bytes_GG.shape[0]):
                size = bytes_GG[src, dst]
                seconds_GG[src, dst] = startup_s_GG[src, dst] + size / Bps_GG[src, dst] if size > 0 else 0.0
    return seconds


@cython.locals(fluid_s=Float, longest_s=Float, took_s=Float)
def port_bounds(bytes_GG: ConstInts2, Bps_GG: ConstFloats2, out_Bps_G: ConstFloats1, in_Bps_G: ConstFloats1):
    """Returns the seconds of the busiest port: if it carries its bytes at its rate, and if one transfer after the other."""
    n: Index = bytes_GG.shape[0]
    loads_2P: Floats2 = np.zeros((2, 2 * n))  # bytes and seconds of each port; senders first
    bytes_P, seconds_P = loads_2P[0], loads_2P[1]
    fluid_s = longest_s = 0.0
    with nogil:
        for src in range(n):
            for dst in range(n):
                took_s = bytes_GG[src, dst] / Bps_GG[src, dst]
                bytes_P[src] += bytes_GG[src, dst]
                bytes_P[n + dst] += bytes_GG[src, dst]
                seconds_P[src] += took_s
                seconds_P[n + dst] += took_s
        for rank in range(n):
            fluid_s = max(fluid_s, bytes_P[rank] / out_Bps_G[rank], bytes_P[n + rank] / in_Bps_G[rank])
            longest_s = max(longest_s, seconds_P[rank], seconds_P[n + rank])
    return fluid_s, longest_s
