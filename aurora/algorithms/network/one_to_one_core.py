"""Times of rows that have both of their ports for themselves, compiled by Cython; `switch` calls it."""

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
        Columns of the rows: source, destination, bytes, start and end in seconds, rate; rows that start together come by
        source. And whether the rows are by start; if not, some that start together may not be by source.
    """
    rows: Index = pairs_X2.shape[0]
    columns = [*(np.empty(rows, np.int64) for _ in range(3)), *(np.empty(rows) for _ in range(3))]
    src_X: Ints1 = columns[0]
    dst_X: Ints1 = columns[1]
    bytes_X: Ints1 = columns[2]
    start_s_X: Floats1 = columns[3]
    end_s_X: Floats1 = columns[4]
    Bps_X: Floats1 = columns[5]
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
    return columns if count == rows else [column[:count].copy() for column in columns], by_start
