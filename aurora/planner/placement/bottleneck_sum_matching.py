"""The perfect matching with the least sum of bottlenecks: sweep one threshold, match under the other."""

import numpy as np
from numba import njit

from aurora.types.arrays import FloatArray, IntArray


def bottleneck_sum_matching(first_GJ: FloatArray, second_GJ: FloatArray, third_GJ: FloatArray | None = None) -> IntArray:
    """(G,) int64: the column of each row, so that the sum of the largest entries used of each matrix is the smallest possible.

    Optimal. One augmenting path of O(G^2) for every edge that a falling threshold takes away; a third matrix is swept outside,
    once for each of its distinct entries that can still pay. Matrices (n, n), finite. Ties resolve the same way every time.
    """
    n = len(first_GJ)
    if third_GJ is None:
        _, match_G = _sweep(first_GJ, second_GJ, np.inf)
        return np.asarray(match_G)
    best, best_G = np.inf, np.arange(n)
    min_replicas = sum(float(np.maximum(m.min(axis=0).max(), m.min(axis=1).max())) for m in (first_GJ, second_GJ))
    for level in np.unique(third_GJ):
        if level + min_replicas >= best:
            break
        within = np.where(third_GJ <= level, first_GJ, np.inf)
        value, match_G = _sweep(within, second_GJ, best - level)
        if value + level < best:
            best, best_G = value + float(level), np.asarray(match_G)
    return best_G


def bottleneck_value(weight_GJ: FloatArray) -> float:
    """The largest entry used by the perfect matching whose largest is smallest; infinite where entries leave none."""
    value, _ = _sweep(weight_GJ, np.zeros_like(weight_GJ), np.inf)
    return float(value)


@njit(cache=True)
def _sweep(first, second, best):
    """(sum, match) of the best matching whose sum is below `best`; (inf, rubbish) where there is none.

    The first threshold only rises, and the second, best - first, only falls: edges above it leave the matching, and the rows
    that they leave free are matched again along the path whose largest first entry is smallest.
    """
    n = first.shape[0]
    column = np.full(n, -1)
    row = np.full(n, -1)
    found = np.full(n, -1)
    value = np.inf
    slack = np.empty(n)
    via = np.empty(n, dtype=np.int64)
    done = np.empty(n, dtype=np.bool_)
    level = 0.0
    while True:
        start = -1
        for i in range(n):
            if column[i] >= 0 and level + second[i, column[i]] >= best:
                row[column[i]] = -1
                column[i] = -1
            if column[i] < 0:
                start = i
        if start < 0:
            most = 0.0
            other = 0.0
            for i in range(n):
                most = max(most, first[i, column[i]])
                other = max(other, second[i, column[i]])
            best = most + other
            value = best
            found[:] = column
            continue
        slack[:] = np.inf
        done[:] = False
        limit = level
        i = start
        end = -1
        while end < 0:
            for j in range(n):
                if not done[j] and first[i, j] < slack[j] and limit + second[i, j] < best:
                    slack[j] = first[i, j]
                    via[j] = i
            nearest = -1
            for j in range(n):
                if not done[j] and slack[j] < np.inf and (nearest < 0 or slack[j] < slack[nearest]):
                    nearest = j
            if nearest < 0:
                return value, found
            level = max(level, slack[nearest])
            done[nearest] = True
            if row[nearest] < 0:
                end = nearest
            else:
                i = row[nearest]
        while end >= 0:
            i = via[end]
            following = column[i]
            column[i] = end
            row[end] = i
            end = following if i != start else -1
