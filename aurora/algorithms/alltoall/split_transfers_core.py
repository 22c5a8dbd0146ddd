"""Transfers worth cutting, compiled by Cython; see `split_transfers`."""

import cython
import numpy as np

if cython.compiled:
    from cython.cimports.aurora.algorithms.core_arrays import *
else:
    from aurora.algorithms.core_arrays import *


@cython.locals(free_s=Float, port=Index)
def blocking_transfers(n: Index, pairs_X2: ConstInts2, span_s_X2: ConstFloats2, least_s: Float):
    """Returns the transfers that make the last ports to end wait for least_s or longer.

    Each is (source, destination, seconds into the transfer at which the wait begins).
    """
    blocking = []
    latest_s: Floats1 = np.empty(n)  # when the port begins its last transfer with each partner
    last: Index = np.argmax(np.asarray(span_s_X2)[:, 1])
    for side in range(2):
        port = pairs_X2[last, side]
        latest_s[:] = -1.0
        for row in range(pairs_X2.shape[0]):
            if pairs_X2[row, side] == port:
                latest_s[pairs_X2[row, 1 - side]] = span_s_X2[row, 0]
        free_s = 0.0
        for row in range(pairs_X2.shape[0]):
            if pairs_X2[row, side] != port:
                continue
            for busy in range(row if span_s_X2[row, 0] - free_s > least_s else 0):
                if (
                    span_s_X2[busy, 0] < free_s < span_s_X2[busy, 1]
                    and pairs_X2[busy, side] != port
                    and latest_s[pairs_X2[busy, 1 - side]] > free_s
                ):
                    blocking.append((pairs_X2[busy, 0], pairs_X2[busy, 1], free_s - span_s_X2[busy, 0]))
            free_s = span_s_X2[row, 1]
    return blocking
