"""The matching of `assignment.bottleneck_sum_matching`, compiled by Cython."""

import cython
import numpy as np
from cython import cfunc, declare, exceptval, nogil

if cython.compiled:
    from cython.cimports.aurora.algorithms.core_arrays import *
else:
    from aurora.algorithms.core_arrays import *

INF = declare(Float, float("inf"))


@cython.locals(first=Float, second=Float, free_row=Index, i=Index, j=Index, after=Index)
def least_sum(first_GJ: ConstFloats2, second_GJ: ConstFloats2):
    """Returns (n,) the column of each row in the matching whose sum of bottlenecks is smallest; -1 if there is none.

    The first threshold only rises, so the second one, best - first, only falls. Edges above the second leave the matching. The
    rows that become free are matched again along the path whose largest entry of first_GJ is smallest.
    """
    n: Index = first_GJ.shape[0]
    slack_J: Floats1 = np.empty(n)
    free_slots_J: Floats1 = np.empty(n)
    match_4G: Ints2 = np.full((4, n), -1)
    column_G, row_J, via_J, best_G = match_4G[0], match_4G[1], match_4G[2], match_4G[3]
    best: Float = INF
    threshold: Float = 0.0
    with nogil:
        while True:
            free_row = -1
            first = second = 0.0
            for row in range(n):
                j = column_G[row]
                if j >= 0 and threshold + second_GJ[row, j] >= best:
                    row_J[j] = column_G[row] = j = -1
                if j < 0:
                    free_row = row
                else:
                    first, second = max(first, first_GJ[row, j]), max(second, second_GJ[row, j])
            if free_row < 0:
                best = first + second
                best_G[:] = column_G
                continue
            j = _path_end(first_GJ, second_GJ, row_J, slack_J, free_slots_J, via_J, free_row, threshold, best)
            if j < 0:
                break
            i = -1
            while i != free_row:
                i = via_J[j]
                threshold = max(threshold, first_GJ[i, j])
                after = column_G[i]
                column_G[i], row_J[j] = j, i
                j = after
    return np.asarray(best_G)


@cfunc
@nogil
@exceptval(check=False)
@cython.locals(nearest=Index, first=Float, slack=Float, least=Float, via=Int)
def _path_end(
    first_GJ: ConstFloats2,
    second_GJ: ConstFloats2,
    row_J: Ints1,
    slack_J: Floats1,
    free_slots_J: Floats1,
    via_J: Ints1,
    start: Index,
    threshold: Float,
    best: Float,
) -> Index:
    """The last column of the path from a free row whose largest entry of first_GJ is smallest; -1 if there is no path.

    Edges have a sum below `best`. Sets via_J, the row before each column. Dijkstra's algorithm with maxima in place of sums.
    """
    i: Index = start
    inf: Float = INF
    slack_J[:] = inf
    free_slots_J[:] = best
    while True:
        for j in range(row_J.shape[0]):
            first, slack, via = first_GJ[i, j], slack_J[j], via_J[j]
            first = first if threshold + second_GJ[i, j] < free_slots_J[j] else inf
            via_J[j] = i if first < slack else via
            slack_J[j] = first if first < slack else slack
        least, nearest = inf, 0
        for j in range(row_J.shape[0]):
            slack = slack_J[j]
            least = slack if slack < least else least
        if least == inf:
            return -1
        while slack_J[nearest] != least:
            nearest += 1
        if row_J[nearest] < 0:
            return nearest
        slack_J[nearest], free_slots_J[nearest] = inf, -inf
        i = row_J[nearest]
