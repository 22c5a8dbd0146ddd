"""Token permutation on the CPU, compiled by Cython, because ten numpy or torch calls take a tenth of a small layer's time."""

import cython
import numpy as np
from cython import nogil

if cython.compiled:
    from cython.cimports.aurora.algorithms.core_arrays import *
else:
    from aurora.algorithms.core_arrays import *


@cython.locals(physical=Index, rows=Index)
def permutation_by_expert(physical_NK: ConstInts2, num_physical: Index):
    """Sorts the choices of tokens by physical expert; see `aurora.moe.permutation.permutation_by_expert`."""
    tokens: Index = physical_NK.shape[0]
    top_k: Index = physical_NK.shape[1]
    counts = np.zeros(num_physical, np.int64)
    counts_P: Ints1 = counts
    next_P: Ints1 = np.empty(num_physical, np.int64)
    row = np.empty((tokens, top_k), np.int64)
    row_NK: Ints2 = row
    rows = 0
    with nogil:
        for n in range(tokens):
            for k in range(top_k):
                physical = physical_NK[n, k]
                if physical < num_physical:
                    counts_P[physical] += 1
        for each in range(num_physical):
            next_P[each] = rows
            rows += counts_P[each]
    token = np.empty(rows, np.int64)
    token_X: Ints1 = token
    with nogil:
        for n in range(tokens):
            for k in range(top_k):
                physical = physical_NK[n, k]
                row_NK[n, k] = -1
                if physical < num_physical:
                    row_NK[n, k] = next_P[physical]
                    token_X[next_P[physical]] = n
                    next_P[physical] += 1
    return counts, token, row


@cython.locals(rank=Index, found=Index, rows=Index)
def permutation_by_rank(rank_NK: ConstInts2, ranks: Index):
    """Sorts (token, rank) pairs by rank; see `aurora.moe.permutation.permutation_by_rank`."""
    tokens: Index = rank_NK.shape[0]
    top_k: Index = rank_NK.shape[1]
    goes_NR: Flags2 = np.zeros((tokens, ranks), np.uint8)
    counts = np.zeros(ranks, np.int64)
    counts_R: Ints1 = counts
    next_R: Ints1 = np.empty(ranks, np.int64)
    row = np.empty((tokens, min(ranks, top_k)), np.int64)
    row_NK: Ints2 = row
    rows = 0
    with nogil:
        for n in range(tokens):
            for k in range(top_k):
                rank = rank_NK[n, k]
                if rank < ranks and goes_NR[n, rank] == 0:
                    goes_NR[n, rank] = 1
                    counts_R[rank] += 1
        for each in range(ranks):
            next_R[each] = rows
            rows += counts_R[each]
    token = np.empty(rows, np.int64)
    token_X: Ints1 = token
    with nogil:
        for n in range(tokens):
            found = 0
            for rank in range(ranks - 1, -1, -1):
                if goes_NR[n, rank] != 0:
                    token_X[next_R[rank]] = n
                    row_NK[n, found] = next_R[rank]
                    next_R[rank] += 1
                    found += 1
            for k in range(found, row_NK.shape[1]):
                row_NK[n, k] = -1
    return counts, token, row


def sum_by_rank(counts_RP: ConstInts2, first_R: ConstInts1):
    """Sums counts_RP over each rank's physical experts: returns (R, R) int64 rows from each rank (row) to each (column).

    Args:
        counts_RP: (R, P) int64, number of rows of each rank for each physical expert.
        first_R: (R + 1,) int64, the first physical expert of each rank; the last entry is P.
    """
    sizes_RR: Ints2 = np.zeros((counts_RP.shape[0], first_R.shape[0] - 1), np.int64)
    with nogil:
        for source in range(sizes_RR.shape[0]):
            for rank in range(sizes_RR.shape[1]):
                for physical in range(first_R[rank], first_R[rank + 1]):
                    sizes_RR[source, rank] += counts_RP[source, physical]
    return np.asarray(sizes_RR)
