"""Tokens that need each server, from counts of experts alone: hard bounds, and an estimate between them."""

from itertools import combinations
from typing import NamedTuple

import numpy as np
from numba import njit

from aurora.types.arrays import FloatArray, IntArray

FITTED = 20  # rounds in which the weights of experts are fitted to their counts
ALMOST = 1 - 1e-9  # of all tokens: an expert that all of them choose counts as chosen by so many
MOST_WEIGHT = 1e12
MOST_SETS = 1000  # sets of groups that the estimate goes through; of more, it takes evenly spaced ones


class ServerTokens(NamedTuple):
    """Tokens of each source rank that need experts of each server.

    Attributes:
        least_SN: (S, N) int64, no fewer.
        expected_SN: (S, N) float64, as many if tokens choose experts independently of each other.
        most_SN: (S, N) int64, no more.
    """

    least_SN: IntArray
    expected_SN: FloatArray
    most_SN: IntArray


def server_tokens(tokens_SE: IntArray, server_E: IntArray, top_k: int, groups: int = 1, token_groups: int = 1) -> ServerTokens:
    """Estimates the tokens that need each server, from the tokens of each expert.

    A server's tokens are no fewer than those of its busiest expert, nor than its choices over the most that one token can make
    there; no more than all tokens, nor than its choices. Group-limited routing lowers that further, since tokens that choose
    experts of other groups have fewer groups left.

    The estimate takes a token's groups, and then its experts in them, as samples without replacement whose sizes are fixed
    (conditional Poisson sampling), with each expert as likely as counted. Experts that tokens choose together make the true
    number lower.

    Args:
        tokens_SE: (S, E) int64, tokens from each source rank to each expert.
        server_E: (E,) int64, the server of each expert, numbered from zero.
        top_k: experts per token.
        groups: groups of experts, equally many consecutive ones each, for group-limited routing.
        token_groups: groups that a token's experts are in at most.

    Source: Chen, Dempster & Liu, "Weighted finite population sampling to maximize entropy", Biometrika 81 (1994).
    """
    experts, servers = tokens_SE.shape[1], int(server_E.max()) + 1
    all_S = tokens_SE.sum(axis=1) // top_k
    group_E = np.arange(experts) * groups // experts
    at_NE = np.arange(servers)[:, None] == server_E
    chosen_SN = tokens_SE @ at_NE.T.astype(np.int64)
    least_SN = np.stack([_least(tokens_SE[:, own_E], top_k) for own_E in at_NE], axis=1)
    most_SN = np.minimum(all_S[:, None], chosen_SN)
    if token_groups < groups:
        least_SJ = np.stack([_least(tokens_SE[:, group_E == group], top_k) for group in range(groups)], axis=1)
        apart_NJ = np.stack([~np.isin(np.arange(groups), group_E[own_E]) for own_E in at_NE])
        elsewhere_SN = least_SJ @ apart_NJ.T.astype(np.int64)
        most_SN = np.minimum(most_SN, np.maximum(all_S[:, None] * token_groups - elsewhere_SN, least_SN))
    chosen_QJ = _group_sets(groups, token_groups)
    missed_SN = np.stack([_missed_N(own_E, all_, server_E, servers, group_E, chosen_QJ, top_k) for own_E, all_ in
                          zip(tokens_SE, all_S.tolist(), strict=True)])  # fmt: skip
    return ServerTokens(least_SN, np.clip(all_S[:, None] * (1 - missed_SN), least_SN, most_SN), most_SN)


def _least(tokens_SE: IntArray, top_k: int) -> IntArray:
    """(S,) the tokens that choose any of these experts, at least: the busiest's, and all choices over the most of a token."""
    if not tokens_SE.shape[1]:
        return np.zeros(len(tokens_SE), dtype=np.int64)
    return np.maximum(tokens_SE.max(axis=1), -(-tokens_SE.sum(axis=1) // min(top_k, tokens_SE.shape[1])))


def _group_sets(groups: int, token_groups: int) -> IntArray:
    """(Q, J) int64, the sets of groups that a token may choose, 1 for a group of the set; some of them if they are many."""
    sets = np.array(list(combinations(range(groups), min(groups, token_groups))))
    sets = sets[np.unique(np.linspace(0, len(sets) - 1, min(len(sets), MOST_SETS)).astype(np.int64))]
    chosen_QJ = np.zeros((len(sets), groups), dtype=np.int64)
    chosen_QJ[np.arange(len(sets))[:, None], sets] = 1
    return chosen_QJ


@njit(cache=True, nogil=True)
def _missed_N(tokens_E, all_tokens, server_E, servers, group_E, chosen_QJ, top_k):
    """(N,) the share of one source's tokens that choose no expert of each server."""
    experts, sets = len(tokens_E), len(chosen_QJ)
    missed_N = np.zeros(servers)
    if all_tokens == 0:
        return missed_N
    share_E = np.minimum(tokens_E / all_tokens, ALMOST)
    load_J = np.zeros(chosen_QJ.shape[1])
    for e in range(experts):
        load_J[group_E[e]] += share_E[e] / top_k
    prior_Q = np.zeros(sets)
    for q in range(sets):
        prior_Q[q] = 1.0
        for j in range(len(load_J)):
            if chosen_QJ[q, j]:
                prior_Q[q] *= load_J[j]
    weight_E = share_E / (1 - share_E)
    ahead_EK, after_EK, found_E = np.empty((experts + 1, top_k + 1)), np.empty((experts + 1, top_k + 1)), np.empty(experts)
    for _ in range(FITTED):
        found_E[:] = 0.0
        total = 0.0
        for q in range(sets):
            _sums(weight_E, group_E, chosen_QJ[q], ahead_EK, after_EK)
            whole = ahead_EK[experts, top_k]
            if whole <= 0.0 or prior_Q[q] <= 0.0:
                continue
            total += prior_Q[q]
            for e in range(experts):
                if chosen_QJ[q, group_E[e]] and weight_E[e] > 0.0:
                    with_it = 0.0
                    for k in range(top_k):
                        with_it += ahead_EK[e, k] * after_EK[e + 1, top_k - 1 - k]
                    found_E[e] += prior_Q[q] * weight_E[e] * with_it / whole
        if total <= 0.0:
            return missed_N
        for e in range(experts):
            if found_E[e] > 0.0:
                weight_E[e] = min(weight_E[e] * share_E[e] * total / found_E[e], MOST_WEIGHT)
    left_E, total = np.empty(experts), 0.0
    for q in range(sets):
        _sums(weight_E, group_E, chosen_QJ[q], ahead_EK, after_EK)
        whole = ahead_EK[experts, top_k]
        if whole <= 0.0 or prior_Q[q] <= 0.0:
            continue
        total += prior_Q[q]
        for n in range(servers):
            for e in range(experts):
                left_E[e] = 0.0 if server_E[e] == n else weight_E[e]
            _sums(left_E, group_E, chosen_QJ[q], ahead_EK, after_EK)
            missed_N[n] += prior_Q[q] * ahead_EK[experts, top_k] / whole
    return missed_N / total


@njit(cache=True, nogil=True)
def _sums(weight_E, group_E, chosen_J, ahead_EK, after_EK):
    """Writes the elementary symmetric sums of the weights of experts before each one, and from each one on.

    ahead_EK[e, k] is the sum over all sets of k experts below e, in groups of chosen_J, of the product of their weights.
    """
    experts, top = len(weight_E), ahead_EK.shape[1]
    ahead_EK[0], after_EK[experts] = 0.0, 0.0
    ahead_EK[0, 0], after_EK[experts, 0] = 1.0, 1.0
    for e in range(experts):
        weight = weight_E[e] if chosen_J[group_E[e]] else 0.0
        ahead_EK[e + 1, 0] = 1.0
        for k in range(1, top):
            ahead_EK[e + 1, k] = ahead_EK[e, k] + weight * ahead_EK[e, k - 1]
    for e in range(experts - 1, -1, -1):
        weight = weight_E[e] if chosen_J[group_E[e]] else 0.0
        after_EK[e, 0] = 1.0
        for k in range(1, top):
            after_EK[e, k] = after_EK[e + 1, k] + weight * after_EK[e + 1, k - 1]
