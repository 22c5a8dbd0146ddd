"""Tokens counted once for each GPU that they visit, and pairs of experts that tokens choose: against sets."""

from itertools import product

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from aurora.algorithms.placement.coactivation import coactivation_counts, distinct_tokens
from aurora.algorithms.workload.traffic import exchange_rows, layer_traffic
from tests.strategies import clusters, profiles, routed_profiles

CASES = st.integers(1, 3).flatmap(lambda n: st.tuples(clusters(n), routed_profiles(n)))


def by_sets(profile, layer, gpu_E, gpus):
    """Tokens between GPUs, from the set of GPUs that each token visits."""
    tokens_GG = np.zeros((gpus, gpus), dtype=int)
    experts_UK, source_U = profile.routing.layer(layer)
    for chosen, source in zip(experts_UK.tolist(), source_U, strict=True):
        for gpu in {int(gpu_E[expert]) for expert in chosen}:
            tokens_GG[source, gpu] += 1
    return tokens_GG


@given(CASES, st.randoms())
def test_a_token_counts_once_for_each_gpu_that_it_visits(case, random):
    machines, profile = case
    n = len(machines)
    gpu_E = np.array([random.randrange(n) for _ in range(profile.experts)])
    every = layer_traffic(profile, 0, np.eye(n)[gpu_E])
    (deduplicated,) = exchange_rows(profile, 0, np.eye(n)[gpu_E], deduplicated=True)
    assert deduplicated.tolist() == np.where(np.eye(n), 0, by_sets(profile, 0, gpu_E, n)).tolist()
    assert (deduplicated <= every).all()
    assert (deduplicated * profile.top_k >= every).all()
    assert profile.top_k > 1 or np.array_equal(deduplicated, every)


@given(CASES)
def test_tokens_alike_are_one_and_pairs_are_counted(case):
    _, profile = case
    experts_UK, source_U = profile.routing.layer(0)
    n = profile.sources
    experts_VK, source_V, count_V = distinct_tokens(experts_UK, source_U)
    rows = sorted((int(s), *sorted(row)) for s, row in zip(source_U, experts_UK.tolist(), strict=True))
    again = sorted(
        (int(s), *row) for s, row, many in zip(source_V, experts_VK.tolist(), count_V, strict=True) for _ in range(many)
    )
    assert rows == again
    counts_SEE = coactivation_counts(experts_VK, source_V, count_V, profile.experts, n)
    for s, a, b in product(range(n), range(profile.experts), range(profile.experts)):
        assert counts_SEE[s, a, b] == sum({a, b} <= set(row) for row in experts_UK[source_U == s].tolist())


@given(profiles(2))
def test_one_expert_a_token_travels_as_it_always_did(profile):
    assert profile.row_bytes(deduplicated=True) == profile.dispatch_bytes
