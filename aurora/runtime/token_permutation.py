"""Which row goes where, compiled: numpy or torch take ten calls for a few tokens, a tenth of a layer's time.

Signatures are given so that it is compiled, or read from numba's cache, on import and not in the first layer.
"""

import numpy as np
from numba import njit


@njit("Tuple((i8[::1], i8[::1], i8[:, ::1]))(i8[:, :], i8)", cache=True)
def sorted_choices(place_NK, places):
    """`kernels.by_place` of place_NK (N, K) int64: how many have each place (P,), the token of each row, each choice's row."""
    tokens, top_k = place_NK.shape
    counts_P = np.zeros(places, np.int64)
    for n in range(tokens):
        for k in range(top_k):
            if place_NK[n, k] < places:
                counts_P[place_NK[n, k]] += 1
    free_P = np.cumsum(counts_P) - counts_P
    token_X = np.empty(counts_P.sum(), np.int64)
    row_NK = np.full((tokens, top_k), -1, np.int64)
    for n in range(tokens):
        for k in range(top_k):
            place = place_NK[n, k]
            if place < places:
                row_NK[n, k] = free_P[place]
                token_X[free_P[place]] = n
                free_P[place] += 1
    return counts_P, token_X, row_NK


@njit("Tuple((i8[::1], i8[::1], i8[::1]))(i8[:, :])", cache=True)
def bags(place_NK):
    """Of place_NK (N, K) int64, -1 for none: the places (Q,), which of the N * K choices each is (Q,), and where each token's
    begin (N,)."""
    tokens, top_k = place_NK.shape
    place_Q, choice_Q = np.empty(tokens * top_k, np.int64), np.empty(tokens * top_k, np.int64)
    first_N = np.empty(tokens, np.int64)
    q = 0
    for n in range(tokens):
        first_N[n] = q
        for k in range(top_k):
            if place_NK[n, k] >= 0:
                place_Q[q] = place_NK[n, k]
                choice_Q[q] = n * top_k + k
                q += 1
    return place_Q[:q], choice_Q[:q], first_N


@njit("i8[:, ::1](i8[:, :], i8[:])", cache=True)
def rows_by_rank(counts_RP, bounds):
    """(R, R) int64: the sums of counts_RP (R, P) over the places bounds[g] to bounds[g + 1] of each rank g."""
    sizes_RR = np.zeros((len(counts_RP), len(bounds) - 1), np.int64)
    for source in range(len(counts_RP)):
        for rank in range(len(bounds) - 1):
            for place in range(bounds[rank], bounds[rank + 1]):
                sizes_RR[source, rank] += counts_RP[source, place]
    return sizes_RR
