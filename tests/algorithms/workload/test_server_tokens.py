"""Tokens that need each server, from counts alone: against the tokens themselves, and the estimate against all choices."""

from itertools import combinations, pairwise
from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aurora.algorithms.workload.traffic import ServerTokens


def limited(rng, tokens, experts, top_k, groups, token_groups):
    """(tokens, top_k) experts of at most `token_groups` groups; some are chosen more often than others."""
    liking_UE = rng.gumbel(size=(tokens, experts)) + rng.normal(size=experts)
    best_UJ = liking_UE.reshape(tokens, groups, experts // groups).max(axis=2)
    kept_UJ = best_UJ >= np.sort(best_UJ, axis=1)[:, -token_groups, None]
    liking_UE = np.where(np.repeat(kept_UJ, experts // groups, axis=1), liking_UE, -np.inf)
    return np.argsort(-liking_UE, axis=1)[:, :top_k]


@given(st.integers(0, 2**32), st.integers(0, 60), st.sampled_from([(1, 1), (2, 1), (4, 2), (4, 3)]), st.integers(1, 3))
def test_the_true_number_is_within_the_bounds(seed, tokens, grouped, top_k):
    rng = np.random.default_rng(seed)
    groups, token_groups = grouped
    experts_UK, source_U = limited(rng, tokens, 12, top_k, groups, token_groups), rng.integers(0, 3, tokens)
    server_E = rng.permutation(np.arange(12) % 3)
    tokens_SE, true_SN = np.zeros((3, 12), dtype=np.int64), np.zeros((3, 3), dtype=np.int64)
    for chosen, source in zip(experts_UK, source_U, strict=True):
        tokens_SE[source, chosen] += 1
        true_SN[source, list(set(server_E[chosen]))] += 1
    found = ServerTokens(tokens_SE, server_E, 3, top_k, np.repeat(np.arange(groups), 12 // groups), token_groups)
    assert (found.least_SN <= true_SN).all()
    assert (true_SN <= found.most_SN).all()
    assert (found.least_SN <= found.expected_SN).all()
    assert (found.expected_SN <= found.most_SN).all()


def test_experts_that_are_equally_likely_miss_a_server_as_samples_without_replacement_do():
    counted_SE, server_E = np.full((1, 12), 400), np.arange(12) // 3
    found = ServerTokens(counted_SE, server_E, 4, 4)
    np.testing.assert_allclose(found.expected_SN, 1200 * (1 - comb(9, 4) / comb(12, 4)))


def test_unequal_experts_are_as_likely_as_counted():
    weight_E, server_E = np.array([1.0, 2.0, 3.0, 4.0, 0.5, 1.5]), np.array([0, 0, 1, 1, 2, 2])
    sets = [list(each) for each in combinations(range(6), 3)]
    likely = np.array([weight_E[each].prod() for each in sets])
    likely /= likely.sum()
    counted_E = np.rint([10**6 * sum(p for p, each in zip(likely, sets, strict=True) if e in each) for e in range(6)])
    visited = [10**6 * sum(p for p, each in zip(likely, sets, strict=True) if n in server_E[each]) for n in range(3)]
    found = ServerTokens(counted_E.astype(np.int64)[None], server_E, 3, 3)
    np.testing.assert_allclose(found.expected_SN[0], visited, rtol=1e-4)


def test_fewer_groups_of_a_token_mean_fewer_servers():
    counted_SE, server_E = np.full((1, 16), 500), np.arange(16) // 4
    expected = [ServerTokens(counted_SE, server_E, 4, 4, server_E, most).expected_SN.sum() / 2000 for most in (1, 2, 3, 4)]
    assert expected[0] == pytest.approx(1)
    assert all(less < more for less, more in pairwise(expected))
    assert ServerTokens(counted_SE, server_E, 4, 4).expected_SN.sum() / 2000 == pytest.approx(expected[3])
