"""Exact shortest schedule with one message a pair, for a few ranks, by branch and bound; compiled."""

import numpy as np
from numba import njit

from aurora.types.arrays import FloatArray, IntArray

MOST_RANKS = 4  # takes well under a millisecond; each further rank takes tens of times as long


def shortest_whole(seconds_GG: FloatArray, known_s: float) -> tuple[IntArray, float] | None:
    """Finds the shortest schedule with one message a pair and one partner at a time (non-preemptive open shop).

    It tries every active schedule, in which nothing can start earlier without delaying something else, except those that a
    port's remaining load rules out. One of the active schedules is an optimum.

    Returns (X, 2) int64 pairs by start and the makespan, for transfers that take seconds_GG (n, n) alone; None if no schedule
    is shorter than known_s.

    Source: Giffler & Thompson 1960.
    """
    n = len(seconds_GG)
    waits_GG = seconds_GG > 0
    left = np.concatenate([seconds_GG.sum(axis=1), seconds_GG.sum(axis=0)])
    rows = int(waits_GG.sum())
    pairs_X2, best_X2 = np.zeros((2, rows, 2), dtype=np.int64)
    start_s_X, best_s_X = np.zeros((2, rows))
    best_s = _branch(seconds_GG, waits_GG, np.zeros(2 * n), left, pairs_X2, start_s_X, 0, best_X2, best_s_X, known_s)
    return (best_X2[np.argsort(best_s_X, kind="stable")], float(best_s)) if best_s < known_s else None


@njit(cache=True, nogil=True)
def _branch(took_GG, waits_GG, free_s, left_s, pairs_X2, start_s_X, depth, best_X2, best_s_X, best_s):
    """Extends the first `depth` transfers in pairs_X2 in every way; returns the best makespan, and fills best_X2 and best_s_X.

    free_s (2 n,) is when each port is free, and left_s (2 n,) the seconds that it still has to carry; senders first.
    """
    n = took_GG.shape[0]
    lower_s = 0.0
    for port in range(2 * n):
        lower_s = max(lower_s, free_s[port] + left_s[port])
    if lower_s >= best_s * (1 - 1e-12):
        return best_s
    if depth == len(pairs_X2):
        best_X2[:] = pairs_X2
        best_s_X[:] = start_s_X
        return lower_s
    first_s = np.inf
    src = dst = -1
    for i in range(n):
        for j in range(n):
            if waits_GG[i, j] and max(free_s[i], free_s[n + j]) + took_GG[i, j] < first_s:
                first_s = max(free_s[i], free_s[n + j]) + took_GG[i, j]
                src, dst = i, j
    for i in range(n):
        for j in range(n):
            start_s = max(free_s[i], free_s[n + j])
            if waits_GG[i, j] and (i == src or j == dst) and start_s < first_s:  # conflicts with the transfer that ends first
                took = took_GG[i, j]
                before = free_s[i], free_s[n + j], left_s[i], left_s[n + j]
                pairs_X2[depth] = i, j
                start_s_X[depth] = start_s
                waits_GG[i, j] = False
                free_s[i] = free_s[n + j] = start_s + took
                left_s[i] -= took
                left_s[n + j] -= took
                best_s = _branch(took_GG, waits_GG, free_s, left_s, pairs_X2, start_s_X, depth + 1, best_X2, best_s_X, best_s)
                waits_GG[i, j] = True
                free_s[i], free_s[n + j], left_s[i], left_s[n + j] = before
    return best_s
