"""Tokens that need each server, from counts of experts alone: hard bounds, and an estimate between them."""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import combinations, pairwise

import numpy as np

from aurora.types.arrays import BoolArray, FloatArray, IntArray, evenly_spaced
from aurora.types.compiled import njit

FITTED, CLOSE = 20, 1e-5  # rounds at most in which the weights of experts are fitted to their counts; the error that is enough
ALMOST = 1 - 1e-9  # of all tokens: an expert that all of them choose counts as chosen by so many
MOST_WEIGHT = 1e12
MOST_SETS = 256  # sets of groups that the estimate goes through; of more, it takes evenly spaced ones


@dataclass(frozen=True, eq=False)
class ServerTokens:
    """Tokens that need each server, from the tokens of each expert.

    A server's tokens are no fewer than those of its busiest expert, nor than its choices over the most that one token can make
    there; no more than all tokens, nor than its choices. Group-limited routing lowers that further, since tokens that choose
    experts of other groups have fewer groups left.

    The estimate takes a token's groups, and then its experts in them, as samples without replacement whose sizes are fixed
    (conditional Poisson sampling), with each expert as likely as counted. Experts that tokens choose together make the true
    number lower. Estimates of the last tokens and servers are kept, as plans ask for the same ones again and again.

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

    tokens_SE: IntArray
    server_E: IntArray
    servers: int
    top_k: int
    group_E: IntArray | None = None
    token_groups: int = 1

    @cached_property
    def least_SN(self) -> IntArray:
        """(S, N) int64 tokens of each source that need experts of each server, no fewer."""
        return np.stack([_least(self.tokens_SE[:, own_E], self.top_k) for own_E in self._at_NE], axis=1)

    @cached_property
    def most_SN(self) -> IntArray:
        """(S, N) int64, no more."""
        all_S, first_J = self._all_S, self._first_J
        most_SN = np.minimum(all_S[:, None], self.tokens_SE @ self._at_NE.T.astype(np.int64))
        if self.token_groups < len(first_J) - 1:
            of_groups = [slice(*ends) for ends in pairwise(first_J.tolist())]
            least_SJ = np.stack([_least(self.tokens_SE[:, group], self.top_k) for group in of_groups], axis=1)
            apart_NJ = np.stack([~self._at_NE[:, group].any(axis=1) for group in of_groups], axis=1)
            elsewhere_SN = least_SJ @ apart_NJ.T.astype(np.int64)
            most_SN = np.minimum(most_SN, np.maximum(all_S[:, None] * self.token_groups - elsewhere_SN, self.least_SN))
        return most_SN

    @cached_property
    def expected_SN(self) -> FloatArray:
        """(S, N) float64, as many if tokens choose experts independently of each other."""
        tokens_SE = np.ascontiguousarray(self.tokens_SE, dtype=np.int64)
        fit = _fit(tokens_SE.tobytes(), len(tokens_SE), tuple(self._first_J.tolist()), self.token_groups, self.top_k)
        missed_SN = _missed(fit, np.ascontiguousarray(self.server_E, dtype=np.int64).tobytes(), self.servers)
        return np.clip(self._all_S[:, None] * (1 - missed_SN), self.least_SN, self.most_SN)

    @cached_property
    def _all_S(self) -> IntArray:
        """(S,) int64 tokens of each source."""
        return np.asarray(self.tokens_SE.sum(axis=1) // self.top_k)

    @cached_property
    def _at_NE(self) -> BoolArray:
        """(N, E) whether a server holds an expert."""
        return np.arange(self.servers)[:, None] == self.server_E

    @cached_property
    def _first_J(self) -> IntArray:
        """(J + 1,) int64, the first expert of each group, and the end."""
        if self.group_E is None:
            return np.array([0, len(self.server_E)])
        return np.searchsorted(self.group_E, np.arange(int(self.group_E[-1]) + 2))


@dataclass(frozen=True, eq=False)
class _Fit:
    """Weights at which each source's tokens choose each expert as often as counted; arguments as in `_missed_SN`."""

    weight_SE: FloatArray
    prior_SQ: FloatArray
    first_J: IntArray
    sets: tuple[IntArray, IntArray, IntArray]
    top_k: int


@lru_cache(maxsize=128)
def _fit(tokens: bytes, sources: int, first_J: tuple[int, ...], token_groups: int, top_k: int) -> _Fit:
    """Fits weights to the tokens of each expert, (S, E) int64 as bytes."""
    tokens_SE, groups = np.frombuffer(tokens, dtype=np.int64).reshape(sources, -1), len(first_J) - 1
    sets_QI = np.array(list(combinations(range(groups), min(groups, token_groups))))  # of groups that a token may choose
    sets_QI = sets_QI[evenly_spaced(len(sets_QI), MOST_SETS)]
    firsts_J, sets = np.array(first_J), (sets_QI, *_parts(sets_QI))
    weight_SE, prior_SQ = _weights(tokens_SE.copy(), tokens_SE.sum(axis=1) // top_k, firsts_J, sets, top_k)
    return _Fit(weight_SE, prior_SQ, firsts_J, sets, top_k)


@lru_cache(maxsize=512)
def _missed(fit: _Fit, server: bytes, servers: int) -> FloatArray:
    """(S, N) the share of each source's tokens that choose no expert of each server; the server of each expert as bytes."""
    server_E = np.frombuffer(server, dtype=np.int64).copy()  # locked arrays would compile a second version
    return np.asarray(_missed_SN(fit.weight_SE, fit.prior_SQ, server_E, servers, fit.first_J, fit.sets, fit.top_k))


def _least(tokens_SE: IntArray, top_k: int) -> IntArray:
    """(S,) the tokens that choose any of these experts, at least: the busiest's, and all choices over the most of a token."""
    if not tokens_SE.shape[1]:
        return np.zeros(len(tokens_SE), dtype=np.int64)
    return np.maximum(tokens_SE.max(axis=1), -(-tokens_SE.sum(axis=1) // min(top_k, tokens_SE.shape[1])))


def _parts(sets_QI: IntArray) -> tuple[IntArray, IntArray]:
    """Returns (R, I - 1) the sets without one of their groups, each once, and (Q, I) which of them each set is without each."""
    number: dict[tuple[int, ...], int] = {}
    of_QI = [
        [number.setdefault((*groups[:i], *groups[i + 1 :]), len(number)) for i in range(len(groups))]
        for groups in sets_QI.tolist()
    ]
    return np.array(list(number), dtype=np.int64).reshape(len(number), -1), np.array(of_QI, dtype=np.int64)


@njit(cache=True, nogil=True)
def _weights(tokens_SE, all_S, first_J, sets, top_k):
    """(S, E) the weights at which each source's tokens choose each expert as often as counted, and (S, Q) `_priors`."""
    weight_SE = np.zeros(tokens_SE.shape)
    prior_SQ = np.zeros((len(tokens_SE), len(sets[0])))
    for s in range(len(tokens_SE)):
        if all_S[s] > 0:
            share_E = np.minimum(tokens_SE[s] / all_S[s], ALMOST)
            prior_SQ[s] = _priors(share_E, first_J, sets[0])
            weight_SE[s] = _fitted(share_E, prior_SQ[s], first_J, sets, top_k)
    return weight_SE, prior_SQ


@njit(cache=True, nogil=True)
def _priors(share_E, first_J, set_QI):
    """(Q,) how likely tokens choose from each set of groups, but for a factor: the product of its groups' choices."""
    prior_Q = np.ones(len(set_QI))
    for q in range(len(set_QI)):
        for j in set_QI[q]:
            prior_Q[q] *= share_E[first_J[j] : first_J[j + 1]].sum()
    return prior_Q


@njit(cache=True, nogil=True)
def _fitted(share_E, prior_Q, first_J, sets, top_k):
    """(E,) the weights at which each expert is chosen as often as share_E says."""
    experts, groups, (set_QI, part_RI, part_QI) = len(share_E), len(first_J) - 1, sets
    weight_E, found_E = share_E / (1 - share_E), np.zeros(experts)
    ahead_EK, after_EK = np.zeros((experts, top_k)), np.zeros((experts, top_k))  # sums of a group before an expert, and after
    whole_JK, others_JK = np.zeros((groups, top_k + 1)), np.zeros((groups, top_k))
    product_RK, chosen_Q = np.zeros((len(part_RI), top_k + 1)), np.zeros(len(set_QI))
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
        _chosen(whole_JK, sets, product_RK, chosen_Q)
        others_JK[:] = 0.0
        total = 0.0
        for q in range(len(set_QI)):
            if chosen_Q[q] <= 0.0 or prior_Q[q] <= 0.0:
                continue
            total += prior_Q[q]
            for i in range(set_QI.shape[1]):
                for k in range(top_k):
                    others_JK[set_QI[q, i], k] += prior_Q[q] / chosen_Q[q] * product_RK[part_QI[q, i], k]
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
def _missed_SN(weight_SE, prior_SQ, server_E, servers, first_J, sets, top_k):
    """(S, N) the share of each source's tokens that choose no expert of each server, at these weights."""
    groups, missed_SN = len(first_J) - 1, np.zeros((len(weight_SE), servers))
    whole_JK, left_JK = np.zeros((groups, top_k + 1)), np.zeros((groups, top_k + 1))
    product_RK, chosen_Q, share_Q = np.zeros((len(sets[1]), top_k + 1)), np.zeros(len(sets[0])), np.zeros(len(sets[0]))
    own_E = np.zeros(len(server_E), dtype=np.bool_)
    for s in range(len(weight_SE)):
        for j in range(groups):
            whole_JK[j] = _sums(weight_SE[s, first_J[j] : first_J[j + 1]], top_k)
        _chosen(whole_JK, sets, product_RK, chosen_Q)
        total = 0.0
        for q in range(len(chosen_Q)):
            share_Q[q] = prior_SQ[s, q] / chosen_Q[q] if chosen_Q[q] > 0.0 else 0.0
            total += prior_SQ[s, q] if share_Q[q] > 0.0 else 0.0
        if total <= 0.0:
            continue
        for n in range(servers):
            for j in range(groups):
                first, stop = first_J[j], first_J[j + 1]
                own_E[first:stop] = server_E[first:stop] == n
                if own_E[first:stop].any():
                    left_JK[j] = _sums(np.where(own_E[first:stop], 0.0, weight_SE[s, first:stop]), top_k)
                else:
                    left_JK[j] = whole_JK[j]
            _chosen(left_JK, sets, product_RK, chosen_Q)
            missed_SN[s, n] = (share_Q * chosen_Q).sum() / total
    return missed_SN


@njit(cache=True, nogil=True)
def _chosen(sums_JK, sets, product_RK, chosen_Q):
    """Writes the sums of the experts of all groups of each part, and the last one of each set."""
    (set_QI, part_RI, part_QI), most = sets, sums_JK.shape[1] - 1
    for r in range(len(part_RI)):
        product_K = product_RK[r]
        product_K[:] = 0.0
        product_K[0] = 1.0
        for i in range(part_RI.shape[1]):
            sums_K = sums_JK[part_RI[r, i]]
            if i == 0:
                product_K[:] = sums_K
                continue
            for k in range(most, -1, -1):
                value = 0.0
                for a in range(k + 1):
                    value += product_K[a] * sums_K[k - a]
                product_K[k] = value
    for q in range(len(set_QI)):
        product_K, sums_K = product_RK[part_QI[q, 0]], sums_JK[set_QI[q, 0]]
        chosen_Q[q] = 0.0
        for a in range(most + 1):
            chosen_Q[q] += product_K[most - a] * sums_K[a]


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
