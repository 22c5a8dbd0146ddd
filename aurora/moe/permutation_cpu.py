"""Token permutation on the CPU, compiled with numba, because ten numpy or torch calls take a tenth of a small layer's time.

Functions state their signatures, so numba compiles them, or reads them from its cache, on import and not in the first layer.
"""

import numpy as np

from aurora.types.compiled import njit


@njit("Tuple((i8[::1], i8[::1], i8[:, ::1]))(i8[:, :], i8)", cache=True)
def permutation_by_expert(physical_NK, num_physical):
    """Sorts the choices of tokens by physical expert; see `aurora.moe.permutation.permutation_by_expert`."""
    tokens, top_k = physical_NK.shape
    counts_P = np.zeros(num_physical, np.int64)
    for n in range(tokens):
        for k in range(top_k):
            if physical_NK[n, k] < num_physical:
                counts_P[physical_NK[n, k]] += 1
    next_P = np.cumsum(counts_P) - counts_P
    token_X = np.empty(counts_P.sum(), np.int64)
    row_NK = np.full((tokens, top_k), -1, np.int64)
    for n in range(tokens):
        for k in range(top_k):
            physical = physical_NK[n, k]
            if physical < num_physical:
                row_NK[n, k] = next_P[physical]
                token_X[next_P[physical]] = n
                next_P[physical] += 1
    return counts_P, token_X, row_NK


@njit("Tuple((i8[::1], i8[::1], i8[:, ::1]))(i8[:, :], i8)", cache=True)
def permutation_by_rank(rank_NK, ranks):
    """Sorts (token, rank) pairs by rank; see `aurora.moe.permutation.permutation_by_rank`."""
    tokens, top_k = rank_NK.shape
    goes_NR = np.zeros((tokens, ranks), np.bool_)
    counts_R = np.zeros(ranks, np.int64)
    for n in range(tokens):
        for k in range(top_k):
            rank = rank_NK[n, k]
            if rank < ranks and not goes_NR[n, rank]:
                goes_NR[n, rank] = True
                counts_R[rank] += 1
    next_R = np.cumsum(counts_R) - counts_R
    token_X = np.empty(counts_R.sum(), np.int64)
    row_NK = np.full((tokens, min(ranks, top_k)), -1, np.int64)
    for n in range(tokens):
        k = 0
        for rank in range(ranks - 1, -1, -1):
            if goes_NR[n, rank]:
                row = next_R[rank]
                next_R[rank] += 1
                token_X[row], row_NK[n, k] = n, row
                k += 1
    return counts_R, token_X, row_NK


@njit("i8[:, ::1](i8[:, :], i8[:])", cache=True)
def sum_by_rank(counts_RP, first_R):
    """Sums counts_RP over each rank's physical experts: returns (R, R) int64 rows from each rank (row) to each (column).

    Args:
        counts_RP: (R, P) int64, number of rows of each rank for each physical expert.
        first_R: (R + 1,) int64, the first physical expert of each rank; the last entry is P.
    """
    sizes_RR = np.zeros((len(counts_RP), len(first_R) - 1), np.int64)
    for source in range(len(counts_RP)):
        for rank in range(len(first_R) - 1):
            for physical in range(first_R[rank], first_R[rank + 1]):
                sizes_RR[source, rank] += counts_RP[source, physical]
    return sizes_RR
