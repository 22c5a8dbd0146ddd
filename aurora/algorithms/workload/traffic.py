"""Traffic of a profile's layers under a placement: rows from rank to rank, counted from tokens or estimated from counts.

From counts of experts alone, the tokens that need each server are bounded from both sides, and estimated between the bounds.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import combinations, pairwise
from typing import NamedTuple, Self

import numpy as np

from aurora.algorithms.alltoall.hierarchical import HierarchicalRows, hierarchical_rows, step_rows
from aurora.algorithms.workload.serving_gpus import replica_tokens, serving_gpus, tokens_to_gpus
from aurora.types import Hierarchy, Profile
from aurora.types.arrays import BoolArray, FloatArray, IntArray, evenly_spaced
from aurora.types.compiled import njit

FITTED, CLOSE = 20, 1e-5  # rounds at most in which the weights of experts are fitted to their counts; the error that is enough
ALMOST = 1 - 1e-9  # of all tokens: an expert that all of them choose counts as chosen by so many
MOST_WEIGHT = 1e12
LANES = 32  # sources whose weights are fitted side by side, as processors add and multiply so many at once
MOST_SETS = 256  # sets of groups that the estimate goes through; of more, it takes evenly spaced ones


@dataclass(frozen=True, eq=False)
class ServerTokens:
    """Number of tokens that need experts of each server, bounded and estimated from the tokens of each expert.

    Let choices be the (token, expert) pairs of a server's experts. Lower bounds on its tokens: the tokens of its busiest
    expert; choices / the most choices that one token can make there. Upper bounds: all tokens; choices. Group-limited routing
    lowers the upper bound further, since tokens that choose experts of other groups have fewer groups left.

    The estimate draws a token's groups, and then its experts in them, as samples of fixed size without replacement (conditional
    Poisson sampling), with each expert as frequent as counted. If tokens choose experts together that share a server, the true
    number is lower. The latest estimates are cached, because plans ask for the same ones repeatedly.

    Args:
        tokens_SE: (S, E) int64, tokens from each source rank to each expert.
        server_E: (E,) int64, the server of each expert, numbered from zero. GPUs can take the place of servers.
        servers: number of servers, N.
        top_k: experts per token.
        group_E: (E,) int64, the group of each expert for group-limited routing, rising from zero; None: one group.
        token_groups: maximum number of groups that a token's experts are in.

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
        """(S, N) int64: lower bound on the tokens of each source that need experts of each server."""
        return np.stack([_least(self.tokens_SE[:, own_E], self.top_k) for own_E in self._at_NE], axis=1)

    @property
    def most_SN(self) -> IntArray:
        """(S, N) int64: upper bound on the tokens of each source that need experts of each server."""
        all_S, first_J = self._all_S, self._first_J
        chosen_NS = np.zeros((self.servers, len(all_S)), dtype=np.int64)
        np.add.at(chosen_NS, self.server_E, self.tokens_SE.T)
        most_SN = np.minimum(all_S[:, None], chosen_NS.T)
        if self.token_groups < len(first_J) - 1:
            of_groups = [slice(*ends) for ends in pairwise(first_J.tolist())]
            least_SJ = np.stack([_least(self.tokens_SE[:, group], self.top_k) for group in of_groups], axis=1)
            apart_NJ = np.stack([~self._at_NE[:, group].any(axis=1) for group in of_groups], axis=1)
            elsewhere_SN = least_SJ @ apart_NJ.T.astype(np.int64)
            most_SN = np.minimum(most_SN, np.maximum(all_S[:, None] * self.token_groups - elsewhere_SN, self.least_SN))
        return most_SN

    @property  # cached, layers in threads would wait for each other
    def expected_SN(self) -> FloatArray:
        """(S, N) float64: estimate of the tokens of each source that need experts of each server."""
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
    sources, experts = tokens_SE.shape
    weight_SE, prior_SQ = np.zeros((sources, experts)), np.zeros((sources, len(sets[0])))
    for first in range(0, sources, LANES):
        lanes = min(LANES, sources - first)
        share_EB = np.zeros((experts, lanes))
        for b in range(lanes):
            if all_S[first + b] > 0:
                share_EB[:, b] = np.minimum(tokens_SE[first + b] / all_S[first + b], ALMOST)
                prior_SQ[first + b] = _priors(share_EB[:, b], first_J, sets[0])
        prior_QB = np.ascontiguousarray(prior_SQ[first : first + lanes].T)
        weight_SE[first : first + lanes] = _fitted(share_EB, prior_QB, first_J, sets, top_k).T
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
def _fitted(share_EB, prior_QB, first_J, sets, top_k):
    """(E, B) the weights at which each expert is chosen as often as share_EB says, of several sources."""
    (experts, lanes), groups, (set_QI, part_RI, part_QI) = share_EB.shape, len(first_J) - 1, sets
    weight_EB = share_EB / (1 - share_EB)
    ahead_EKB, after_EKB = np.zeros((2, experts, top_k, lanes))  # sums of a group before an expert, and after
    whole_JKB, others_JKB = np.zeros((groups, top_k + 1, lanes)), np.zeros((groups, top_k, lanes))
    product_RKB, chosen_QB = np.zeros((len(part_RI), top_k + 1, lanes)), np.zeros((len(set_QI), lanes))
    (total_B, error_B, with_B, beside_B), open_B = np.zeros((4, lanes)), np.ones(lanes)
    for _ in range(FITTED):
        for j in range(groups):
            first, stop = first_J[j], first_J[j + 1]
            whole_JKB[j] = 0.0
            whole_JKB[j, 0] = 1.0
            if first < stop:
                ahead_EKB[first, 0] = after_EKB[stop - 1, 0] = 1.0
            for e in range(first, stop):
                _add(whole_JKB[j], weight_EB[e])
                if e > first:
                    ahead_EKB[e] = ahead_EKB[e - 1]
                    _add(ahead_EKB[e], weight_EB[e - 1])
            for e in range(stop - 2, first - 1, -1):
                after_EKB[e] = after_EKB[e + 1]
                _add(after_EKB[e], weight_EB[e + 1])
        _chosen(whole_JKB, sets, product_RKB, chosen_QB)
        others_JKB[:] = 0.0
        total_B[:] = 0.0
        for q in range(len(set_QI)):
            for b in range(lanes):
                with_B[b] = prior_QB[q, b] / chosen_QB[q, b] if chosen_QB[q, b] > 0.0 else 0.0
                total_B[b] += prior_QB[q, b] if with_B[b] > 0.0 else 0.0
            for i in range(set_QI.shape[1]):
                for k in range(top_k):
                    _add_products(others_JKB[set_QI[q, i], k], with_B, product_RKB[part_QI[q, i], k])
        error_B[:] = 0.0
        for j in range(groups):
            for e in range(first_J[j], first_J[j + 1]):
                with_B[:] = 0.0
                for k in range(top_k):
                    beside_B[:] = 0.0
                    for a in range(k + 1):
                        _add_products(beside_B, ahead_EKB[e, a], after_EKB[e, k - a])
                    _add_products(with_B, beside_B, others_JKB[j, top_k - 1 - k])
                for b in range(lanes):
                    share = weight_EB[e, b] * with_B[b] / total_B[b] if total_B[b] > 0.0 else 0.0
                    if share > 0.0 and open_B[b] > 0.0:
                        error_B[b] = max(error_B[b], abs(share_EB[e, b] / share - 1))
                        weight_EB[e, b] = min(weight_EB[e, b] * share_EB[e, b] / share, MOST_WEIGHT)
        open_B[error_B < CLOSE] = 0.0
        if open_B.sum() == 0.0:
            break
    return weight_EB


@njit(cache=True, nogil=True)
def _missed_SN(weight_SE, prior_SQ, server_E, servers, first_J, sets, top_k):
    """(S, N) the share of each source's tokens that choose no expert of each server, at these weights."""
    groups, missed_SN = len(first_J) - 1, np.zeros((len(weight_SE), servers))
    kept_K, column_N, server_X = np.zeros(top_k + 1), np.empty(servers, np.int64), np.empty(servers, np.int64)
    for s in range(len(weight_SE)):
        column_N[:], used = -1, 0  # servers that some of these tokens need have a column
        for e in range(len(server_E)):
            if weight_SE[s, e] > 0.0 and column_N[server_E[e]] < 0:
                column_N[server_E[e]], server_X[used] = used, server_E[e]
                used += 1
        left_JKX = np.zeros((groups, top_k + 1, used + 1))  # sums of a group without each server's experts, and of all of it
        product_RKX, chosen_QX = np.zeros((len(sets[1]), top_k + 1, used + 1)), np.zeros((len(sets[0]), used + 1))
        left_JKX[:, 0] = 1.0
        weight_X = np.empty(used + 1)
        for j in range(groups):
            for e in range(first_J[j], first_J[j + 1]):
                if weight_SE[s, e] > 0.0:
                    weight_X[:] = weight_SE[s, e]
                    kept_K[:] = left_JKX[j, :, column_N[server_E[e]]]
                    _add(left_JKX[j], weight_X)
                    left_JKX[j, :, column_N[server_E[e]]] = kept_K
        _chosen(left_JKX, sets, product_RKX, chosen_QX)
        total = 0.0
        for q in range(len(chosen_QX)):
            if chosen_QX[q, used] > 0.0:
                total += prior_SQ[s, q]
                for x in range(used):
                    missed_SN[s, server_X[x]] += prior_SQ[s, q] / chosen_QX[q, used] * chosen_QX[q, x]
        if total > 0.0:
            missed_SN[s] = np.where(column_N < 0, 1.0, missed_SN[s] / total)
    return missed_SN


@njit(cache=True, nogil=True, allocates=False)
def _chosen(sums_JKB, sets, product_RKB, chosen_QB):
    """Writes the sums of the experts of all groups of each part, and the last one of each set, of B cases side by side."""
    (set_QI, part_RI, part_QI), most = sets, sums_JKB.shape[1] - 1
    for r in range(len(part_RI)):
        product_KB = product_RKB[r]
        product_KB[:] = 0.0
        product_KB[0] = 1.0
        for i in range(part_RI.shape[1]):
            sums_KB = sums_JKB[part_RI[r, i]]
            for k in range(most, -1, -1):
                product_B, whole_B = product_KB[k], sums_KB[0]
                for b in range(len(product_B)):
                    product_B[b] *= whole_B[b]
                for a in range(k):
                    _add_products(product_B, product_KB[a], sums_KB[k - a])
    chosen_QB[:] = 0.0
    for q in range(len(set_QI)):
        product_KB, sums_KB = product_RKB[part_QI[q, 0]], sums_JKB[set_QI[q, 0]]
        for a in range(most + 1):
            _add_products(chosen_QB[q], product_KB[most - a], sums_KB[a])


@njit(cache=True, nogil=True, allocates=False)
def _add(sums_KB, weight_B):
    """Adds one expert to elementary symmetric sums, of all sets of k experts the products of their weights, of B cases."""
    for k in range(len(sums_KB) - 1, 0, -1):
        _add_products(sums_KB[k], weight_B, sums_KB[k - 1])


@njit(cache=True, nogil=True, allocates=False, inline="always")
def _add_products(total_B, one_B, other_B):
    """Adds the products of two rows to a third."""
    for b in range(len(total_B)):
        total_B[b] += one_B[b] * other_B[b]


GATHERS = 3  # exchanges of an allgather: hidden states, weights and expert numbers, one after the other


def layer_traffic(profile: Profile, layer: int, split_EG: FloatArray) -> IntArray:
    """Returns (G, G) int64 rows of one layer's flat dispatch over the whole profile; arguments as in `exchange_rows`."""
    return np.asarray(exchange_rows(profile, layer, split_EG)[0])


def exchange_rows(
    profile: Profile,
    layer: int,
    split_EG: FloatArray,
    *,
    deduplicated: bool = False,
    hierarchy: Hierarchy | None = None,
    window: int | None = None,
) -> IntArray:
    """Returns the rows of one layer's dispatch in each of its steps; a flat all-to-all has one step.

    Args:
        profile: the recorded routing. Source rank g sits on GPU g. If it has only counts, the rows of hierarchical all-to-alls
            are estimated, as its `token_spread` says.
        layer: index of the MoE layer.
        split_EG: (E, G) float64, the share of each expert's tokens that each GPU takes.
        deduplicated: whether a token is sent once to a GPU that holds several of its experts; in flat all-to-alls replicas are
            not allowed.
        hierarchy: the servers and chunks of a hierarchical all-to-all, whose tokens are deduplicated; None if it is flat.
        window: index of the window; None: all windows as one all-to-all.

    Returns:
        (S, G, G) int64 rows from each rank to each other in each of S steps, with zero diagonals.

    Raises:
        BadInput: with `deduplicated` and no hierarchy, if the profile holds no token-level routing.
    """
    gpus = split_EG.shape[1]
    if deduplicated:
        if hierarchy is None:
            experts_UK, source_U = profile.required_routing.layer(layer, window)
            rows_SGG = deduplicated_tokens(experts_UK, source_U, split_EG.argmax(axis=1), gpus)[None]
        else:
            rows_SGG = hierarchical_steps(known_or_counted(profile, layer, window), split_EG, hierarchy)
    else:
        windows = slice(None) if window is None else slice(window, window + 1)
        rows_SGG = tokens_to_gpus(profile.tokens_TLSE[windows, layer].sum(axis=0), split_EG)[None]
    rows_SGG[:, np.arange(gpus), np.arange(gpus)] = 0
    return np.asarray(rows_SGG)


def exchange_bytes(rows_SGG: IntArray, profile: Profile, phase: str, deduplicated: bool) -> IntArray:
    """Converts rows to bytes: returns (S, G, G) int64 bytes of each step of a dispatch, or of its combine.

    Args:
        rows_SGG: rows of the dispatch, as `exchange_rows` returns them.
        profile: the model, for the bytes of a row.
        phase: "dispatch" or "combine".
        deduplicated: whether a row is a token instead of a (token, expert) pair.
    """
    if phase == "dispatch":
        return rows_SGG * profile.row_bytes(deduplicated)
    return rows_SGG[::-1].transpose(0, 2, 1) * profile.combine_bytes


def gathered_bytes(profile: Profile, layer: int, window: int, phase: str, server_G: IntArray | None = None) -> IntArray:
    """Returns (S, G, G) int64 bytes of an allgather ("dispatch") or a reduce-scatter ("combine"), as in vLLM.

    The allgather has three steps: hidden states, router weights, expert numbers (4 bytes each). In the reduce-scatter every
    rank gets the partial sums of its tokens. On one server each rank sends to every other. On several, the bytes go around
    `nccl_rings`, an equal part in each: a rank passes on all but its successor's, so that a NIC of R ranks on servers of P GPUs
    carries (R - 1) / P ranks' bytes.

    Args:
        profile: the model and its traffic.
        layer: index of the MoE layer.
        window: index of the window.
        phase: "dispatch" or "combine".
        server_G: (G,) int64, the server of each rank; None: all on one.
    """
    tokens_S = profile.tokens_TLSE[window, layer].sum(axis=1) // profile.top_k
    sizes = [profile.combine_bytes]
    if phase == "dispatch":
        sizes = [profile.dispatch_bytes, *[4 * profile.top_k] * (GATHERS - 1)]
    bytes_XS = np.array(sizes)[:, None] * tokens_S
    sent_XSS = bytes_XS[:, :, None] * (1 - np.eye(len(tokens_S), dtype=np.int64))
    if server_G is not None:
        sent_XSS[:] = 0
        next_CS = nccl_rings(server_G)
        for ring, next_S in enumerate(next_CS):
            passed_XS = bytes_XS.sum(axis=1, keepdims=True) - bytes_XS[:, next_S]
            upto_XS, before_XS = (passed_XS * part // len(next_CS) for part in (ring + 1, ring))
            sent_XSS[:, np.arange(len(next_S)), next_S] += upto_XS - before_XS
    return np.asarray(sent_XSS.swapaxes(1, 2) if phase == "combine" else sent_XSS)


def nccl_rings(server_G: IntArray) -> IntArray:
    """Returns (C, G) int64: the rank that each rank passes bytes to in each of NCCL's C rings, one for each GPU of a server.

    A ring visits the ranks of each server one after the other. Each ring enters and leaves a server by other GPUs' NICs, so
    that all NICs are used: on servers of 2 GPUs the rings are 0, 1, 2, 3 and 1, 0, 3, 2.
    """
    members_N = [np.flatnonzero(server_G == server) for server in np.unique(server_G)]
    next_CG = np.empty((max(map(len, members_N)), len(server_G)), dtype=np.int64)
    for ring, next_G in enumerate(next_CG):
        visited_G = np.concatenate([np.roll(members, -ring) for members in members_N])
        next_G[visited_G] = np.roll(visited_G, -1)
    return next_CG


def deduplicated_tokens(experts_UK: IntArray, source_U: IntArray, gpu_E: IntArray, gpus: int) -> IntArray:
    """Returns the deduplicated tokens that each source sends to each GPU.

    Args:
        experts_UK: (U, K) int, the experts of each token.
        source_U: (U,) int64, the GPU that each token starts on.
        gpu_E: (E,) int64, the GPU of each expert.
        gpus: number of GPUs.

    Returns:
        (G, G) int64, from GPU (row) to GPU; the diagonal counts the tokens that have an expert on the GPU they start on.
    """
    at_UK = np.sort(gpu_E[experts_UK], axis=1)
    first_UK = np.ones(at_UK.shape, dtype=np.bool_)
    first_UK[:, 1:] = at_UK[:, 1:] != at_UK[:, :-1]
    pairs_UK = source_U[:, None] * gpus + at_UK
    return np.bincount(pairs_UK[first_UK], minlength=gpus * gpus).reshape(gpus, gpus)


def contiguous_split(experts: int, gpus: int) -> FloatArray:
    """Places experts in index order, equally many on each GPU, one more on the first ones if they do not divide.

    Returns (E, G) float64, the share of each expert's tokens that each GPU takes, 0 or 1.
    """
    share_G = experts // gpus + (np.arange(gpus) < experts % gpus)
    return np.eye(gpus)[np.repeat(np.arange(gpus), share_G)]


def contiguous_bytes(profile: Profile, layer: int) -> IntArray:
    """Returns (S, S) int64 bytes of one layer's dispatch under `contiguous_split` on as many GPUs as source ranks."""
    return layer_traffic(profile, layer, contiguous_split(profile.experts, profile.sources)) * profile.dispatch_bytes


class CountedTokens(NamedTuple):
    """The tokens of a layer whose profile has counts per expert, but no token-level routing.

    Attributes:
        tokens_SE: (S, E) int64, tokens from each source rank to each expert.
        top_k: experts per token.
        expert_groups: as in Profile.
        spread: one of TOKEN_SPREADS, as in Profile.
    """

    tokens_SE: IntArray
    top_k: int
    expert_groups: tuple[int, int]
    spread: str

    @classmethod
    def of(cls, profile: Profile, layer: int, window: int | None = None) -> Self:
        """Returns the tokens of one layer of a profile, in one window or in all of them."""
        windows = slice(None) if window is None else slice(window, window + 1)
        tokens_SE = profile.tokens_TLSE[windows, layer].sum(axis=0)
        return cls(tokens_SE, profile.top_k, profile.expert_groups, profile.token_spread)


KnownTokens = tuple[IntArray, IntArray]  # the experts (U, K) of each token and the rank (U,) that it starts on


def known_or_counted(profile: Profile, layer: int, window: int | None = None) -> KnownTokens | CountedTokens:
    """Returns the tokens of one layer of a profile: one by one if it has token-level routing, otherwise as counts.

    `window` is the index of the window; None: all windows.
    """
    return CountedTokens.of(profile, layer, window) if profile.routing is None else profile.routing.layer(layer, window)


def hierarchical_steps(tokens: KnownTokens | CountedTokens, split_EG: FloatArray, hierarchy: Hierarchy) -> IntArray:
    """Returns (S, G, G) int64, the rows from rank to rank in each step of a hierarchical dispatch.

    Args:
        tokens: the tokens, known one by one or counted.
        split_EG: (E, G) float64, the share of each expert's tokens that each GPU takes, as in `server_split`.
        hierarchy: the servers and the number of chunks.
    """
    return steps_by_chunks(tokens, split_EG, hierarchy.server_G)(hierarchy)


def steps_by_chunks(
    tokens: KnownTokens | CountedTokens, split_EG: FloatArray, server_G: IntArray
) -> Callable[[Hierarchy], IntArray]:
    """Returns a function from a Hierarchy over server_G to its `hierarchical_steps`, to compare numbers of chunks.

    Work that does not depend on the chunks is done once. Other arguments as in `hierarchical_steps`.
    """
    if isinstance(tokens, CountedTokens):
        needed = _needed_tokens(tokens, split_EG, server_G)
        return lambda hierarchy: step_rows(_in_pieces(*needed, hierarchy), hierarchy)
    experts_UK, source_U = tokens
    rank_UK = serving_gpus(experts_UK, source_U, split_EG, server_G)
    return lambda hierarchy: step_rows(hierarchical_rows(rank_UK, source_U, hierarchy), hierarchy)


def _in_pieces(sent_GN: IntArray, needed_GG: IntArray, hierarchy: Hierarchy) -> HierarchicalRows:
    """The rows of a hierarchical dispatch, estimated from counts: those of `_needed_tokens`, divided evenly over the pieces."""
    return HierarchicalRows(sent_GN, np.diff(hierarchy.piece_starts(needed_GG), axis=2).swapaxes(1, 2))


def _needed_tokens(tokens: CountedTokens, split_EG: FloatArray, server_G: IntArray) -> tuple[IntArray, IntArray]:
    """(G, N) and (G, G) int64, estimated tokens of each rank that need each server, and each rank."""
    tokens_SP, expert_P, gpu_P = replica_tokens(tokens.tokens_SE, split_EG, server_G)
    groups, token_groups = tokens.expert_groups
    group_P = expert_P * groups // tokens.tokens_SE.shape[1]

    def needed(at_P: IntArray, places: int) -> IntArray:
        server_tokens = ServerTokens(tokens_SP, at_P, places, tokens.top_k, group_P, token_groups)
        return np.asarray(np.rint(getattr(server_tokens, f"{tokens.spread}_SN")), dtype=np.int64)

    return needed(server_G[gpu_P], int(server_G.max()) + 1), needed(gpu_P, len(server_G))


def group_tokens(tokens_SE: IntArray, group_E: IntArray, groups: int) -> IntArray:
    """Returns (S, J) int64, tokens_SE (S, E) summed over the experts of each of J groups; group_E (E,) is the group of each."""
    tokens_SJ = np.zeros((len(tokens_SE), groups), dtype=np.int64)
    np.add.at(tokens_SJ.T, group_E, tokens_SE.T)
    return tokens_SJ
