"""Tokens that need each server, from counts of experts alone: hard bounds, and an estimate between them."""

from itertools import combinations
from typing import NamedTuple

import numpy as np

from aurora.types.arrays import FloatArray, IntArray, evenly_spaced
from aurora.types.compiled import njit

FITTED, CLOSE = 20, 1e-5  # rounds at most in which the weights of experts are fitted to their counts; the error that is enough
ALMOST = 1 - 1e-9  # of all tokens: an expert that all of them choose counts as chosen by so many
MOST_WEIGHT = 1e12
MOST_SETS = 256  # sets of groups that the estimate goes through; of more, it takes evenly spaced ones


class ServerTokens(NamedTuple):
    """Tokens of each source rank that need experts of each server, or of each GPU.

    Attributes:
        least_SN: (S, N) int64, no fewer.
        expected_SN: (S, N) float64, as many if tokens choose experts independently of each other.
        most_SN: (S, N) int64, no more.
    """

    least_SN: IntArray
    expected_SN: FloatArray
    most_SN: IntArray


def server_tokens(
    tokens_SE: IntArray, server_E: IntArray, servers: int, top_k: int, group_E: IntArray | None = None, token_groups: int = 1
) -> ServerTokens:
    """Estimates the tokens that need each server, from the tokens of each expert.

    A server's tokens are no fewer than those of its busiest expert, nor than its choices over the most that one token can make
    there; no more than all tokens, nor than its choices. Group-limited routing lowers that further, since tokens that choose
    experts of other groups have fewer groups left.

    The estimate takes a token's groups, and then its experts in them, as samples without replacement whose sizes are fixed
    (conditional Poisson sampling), with each expert as likely as counted. Experts that tokens choose together make the true
    number lower.

    Args:
        tokens_SE: (S, E) int64, tokens from each source rank to each expert.
        server_E: (E,) int64, the server of each expert, numbered from zero. GPUs in place of servers do as well.
        servers: how many servers, N.
        top_k: experts per token.
        group_E: (E,) int64, the group of each expert for group-limited routing, rising from zero; None: one for all.
        token_groups: groups that a token's experts are in at most.

    Source:
        Chen, Dempster & Liu, "Weighted finite population sampling to maximize entropy", Biometrika 81 (1994).
    """
    all_S = tokens_SE.sum(axis=1) // top_k
    group_E = np.zeros(len(server_E), dtype=np.int64) if group_E is None else group_E
    groups = int(group_E[-1]) + 1
    at_NE = np.arange(servers)[:, None] == server_E
    choices_SN = tokens_SE @ at_NE.T.astype(np.int64)
    least_SN = np.stack([_least(tokens_SE[:, own_E], top_k) for own_E in at_NE], axis=1)
    most_SN = np.minimum(all_S[:, None], choices_SN)
    if token_groups < groups:
        least_SJ = np.stack([_least(tokens_SE[:, group_E == group], top_k) for group in range(groups)], axis=1)
        apart_NJ = np.stack([~np.isin(np.arange(groups), group_E[own_E]) for own_E in at_NE])
        elsewhere_SN = least_SJ @ apart_NJ.T.astype(np.int64)
        most_SN = np.minimum(most_SN, np.maximum(all_S[:, None] * token_groups - elsewhere_SN, least_SN))
    first_J = np.searchsorted(group_E, np.arange(groups + 1))
    sets_QI = np.array(list(combinations(range(groups), min(groups, token_groups))))  # of groups that a token may choose
    sets_QI = sets_QI[evenly_spaced(len(sets_QI), MOST_SETS)]
    missed_SN = _missed_SN(np.array(tokens_SE), all_S, np.array(server_E), servers, first_J, sets_QI, top_k)
    return ServerTokens(least_SN, np.clip(all_S[:, None] * (1 - missed_SN), least_SN, most_SN), most_SN)


def _least(tokens_SE: IntArray, top_k: int) -> IntArray:
    """(S,) the tokens that choose any of these experts, at least: the busiest's, and all choices over the most of a token."""
    if not tokens_SE.shape[1]:
        return np.zeros(len(tokens_SE), dtype=np.int64)
    return np.maximum(tokens_SE.max(axis=1), -(-tokens_SE.sum(axis=1) // min(top_k, tokens_SE.shape[1])))


@njit(cache=True, nogil=True)
def _missed_SN(tokens_SE, all_S, server_E, servers, first_J, set_QI, top_k):
    """(S, N) the share of each source's tokens that choose no expert of each server."""
    missed_SN = np.zeros((len(tokens_SE), servers))
    for s in range(len(tokens_SE)):
        if all_S[s] > 0:
            share_E = np.minimum(tokens_SE[s] / all_S[s], ALMOST)
            prior_Q = np.ones(len(set_QI))  # how likely tokens choose from each set, but for a factor: its groups' choices
            for q in range(len(set_QI)):
                for j in set_QI[q]:
                    prior_Q[q] *= share_E[first_J[j] : first_J[j + 1]].sum()
            weight_E = _fitted(share_E, prior_Q, first_J, set_QI, top_k)
            missed_SN[s] = _missed_N(weight_E, prior_Q, server_E, servers, first_J, set_QI, top_k)
    return missed_SN


@njit(cache=True, nogil=True)
def _fitted(share_E, prior_Q, first_J, set_QI, top_k):
    """(E,) the weights at which each expert is chosen as often as share_E says."""
    experts, groups = len(share_E), len(first_J) - 1
    weight_E, found_E = share_E / (1 - share_E), np.zeros(experts)
    ahead_EK, after_EK = np.zeros((experts, top_k)), np.zeros((experts, top_k))  # sums of a group before an expert, and after
    whole_JK, others_JK = np.zeros((groups, top_k + 1)), np.zeros((groups, top_k))
    whole_JK[:, 0] = 1.0
    for _ in range(FITTED):
        for j in range(groups):
            first, stop = first_J[j], first_J[j + 1]
            if first == stop:
                continue
            whole_JK[j] = _sums(weight_E[first:stop], top_k)
            ahead_EK[first] = after_EK[stop - 1] = 0.0
            ahead_EK[first, 0] = after_EK[stop - 1, 0] = 1.0
            for e in range(first + 1, stop):
                _with(ahead_EK[e - 1], weight_E[e - 1], ahead_EK[e])
            for e in range(stop - 2, first - 1, -1):
                _with(after_EK[e + 1], weight_E[e + 1], after_EK[e])
        others_JK[:] = 0.0
        total = 0.0
        for q in range(len(set_QI)):
            chosen = _product(whole_JK, set_QI[q], -1, top_k)[top_k]
            if chosen <= 0.0 or prior_Q[q] <= 0.0:
                continue
            total += prior_Q[q]
            for j in set_QI[q]:
                others_JK[j] += prior_Q[q] / chosen * _product(whole_JK, set_QI[q], j, top_k)[:top_k]
        if total <= 0.0:
            break
        error = 0.0
        for j in range(groups):
            for e in range(first_J[j], first_J[j + 1]):
                with_it = 0.0
                for a in range(top_k):
                    for b in range(top_k - a):
                        with_it += ahead_EK[e, a] * after_EK[e, b] * others_JK[j, top_k - 1 - a - b]
                found_E[e] = weight_E[e] * with_it / total
        for e in range(experts):
            if found_E[e] > 0.0:
                error = max(error, abs(share_E[e] / found_E[e] - 1))
                weight_E[e] = min(weight_E[e] * share_E[e] / found_E[e], MOST_WEIGHT)
        if error < CLOSE:
            break
    return weight_E


@njit(cache=True, nogil=True)
def _missed_N(weight_E, prior_Q, server_E, servers, first_J, set_QI, top_k):
    """(N,) the share of tokens that choose no expert of each server, at these weights."""
    groups = len(first_J) - 1
    whole_JK = np.zeros((groups, top_k + 1))
    for j in range(groups):
        whole_JK[j] = _sums(weight_E[first_J[j] : first_J[j + 1]], top_k)
    missed_N, share_Q, total = np.zeros(servers), np.zeros(len(set_QI)), 0.0
    for q in range(len(set_QI)):
        chosen = _product(whole_JK, set_QI[q], -1, top_k)[top_k]
        share_Q[q] = prior_Q[q] / chosen if chosen > 0.0 else 0.0
        total += prior_Q[q] if share_Q[q] > 0.0 else 0.0
    if total <= 0.0:
        return missed_N
    for n in range(servers):
        left_JK = whole_JK.copy()
        for j in range(groups):
            left_E, own = weight_E[first_J[j] : first_J[j + 1]].copy(), False
            for e in range(len(left_E)):
                if server_E[first_J[j] + e] == n:
                    left_E[e], own = 0.0, True
            if own:
                left_JK[j] = _sums(left_E, top_k)
        for q in range(len(set_QI)):
            if share_Q[q] > 0.0:
                missed_N[n] += share_Q[q] * _product(left_JK, set_QI[q], -1, top_k)[top_k]
    return missed_N / total


@njit(cache=True, nogil=True)
def _sums(weight_E, top_k):
    """(K + 1,) elementary symmetric sums: over all sets of k experts, of the product of their weights."""
    sums_K = np.zeros(top_k + 1)
    sums_K[0] = 1.0
    for weight in weight_E:
        for k in range(top_k, 0, -1):
            sums_K[k] += weight * sums_K[k - 1]
    return sums_K


@njit(cache=True, nogil=True)
def _with(sums_K, weight, larger_K):
    """Writes the sums of some experts and one more."""
    larger_K[0] = 1.0
    for k in range(1, len(sums_K)):
        larger_K[k] = sums_K[k] + weight * sums_K[k - 1]


@njit(cache=True, nogil=True)
def _product(sums_JK, set_I, without, top_k):
    """(K + 1,) the sums of the experts of all groups of a set but one."""
    product_K = np.zeros(top_k + 1)
    product_K[0] = 1.0
    for j in set_I:
        if j != without:
            for k in range(top_k, -1, -1):
                value = 0.0
                for a in range(k + 1):
                    value += product_K[a] * sums_JK[j, k - a]
                product_K[k] = value
    return product_K
