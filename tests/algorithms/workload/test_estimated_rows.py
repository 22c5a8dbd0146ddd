"""Rows of hierarchical all-to-alls from counts alone, against those of the tokens that were counted."""

from dataclasses import replace

import numpy as np
from hypothesis import given

import aurora
from aurora.algorithms.alltoall.hierarchical import hierarchical_rows
from aurora.algorithms.placement.cost_model import layer_costs
from aurora.algorithms.placement.placement_bounds import hierarchical_bound_s
from aurora.algorithms.workload.serving_gpus import replica_tokens, serving_gpus
from aurora.algorithms.workload.traffic import CountedTokens, _in_pieces, _needed_tokens, expected_tokens
from aurora.types import Hierarchy, SyntheticOptions
from tests.algorithms.workload.test_serving_gpus import replicated
from tests.planner.test_hierarchical_plans import CONFIG, slow_nics


def estimated_rows(tokens, split_EG, hierarchy):
    """HierarchicalRows, as plans take them from counts."""
    return _in_pieces(*_needed_tokens(tokens, split_EG, hierarchy.server_G), hierarchy)


def test_tokens_choose_each_expert_on_its_own():
    """8 tokens of 2 experts each, half of them choose each of four: a server of two is missed by 1/4, one of one by 1/2.

    Where all tokens choose two experts of a server, all need it; counts over the most choices of a token say so.
    """
    even_SE = np.full((1, 4), 4)
    assert expected_tokens(even_SE, np.array([0, 0, 1, 1]), 2, 2).tolist() == [[6, 6]]
    assert expected_tokens(even_SE, np.array([0, 1, 2, 2]), 4, 2).tolist() == [[4, 4, 6, 0]]
    assert expected_tokens(even_SE, np.zeros(4, dtype=np.int64), 1, 2).tolist() == [[8]]
    assert expected_tokens(np.array([[8, 8, 0, 0], [0, 0, 0, 0]]), np.array([0, 1, 0, 1]), 2, 2).tolist() == [[8, 8], [0, 0]]


@given(replicated())
def test_estimates_lie_within_what_counts_allow(case):
    experts_UK, source_U, split_EG, hierarchy = case
    different_U = (np.diff(np.sort(experts_UK, axis=1), axis=1) > 0).all(axis=1)  # drawn tables may name an expert twice
    experts_UK, source_U = experts_UK[different_U], source_U[different_U]
    if not experts_UK.size:
        return
    tokens_SE, top_k = np.zeros((hierarchy.ranks, len(split_EG)), dtype=np.int64), experts_UK.shape[1]
    np.add.at(tokens_SE, (source_U[:, None], experts_UK), 1)
    found_GN = estimated_rows(CountedTokens(tokens_SE, top_k), split_EG, hierarchy).sent_GN
    tokens_SP, _, gpu_P = replica_tokens(tokens_SE, split_EG, hierarchy.server_G)
    for server in range(hierarchy.servers):
        own_SP = tokens_SP[:, hierarchy.server_G[gpu_P] == server]
        assert (found_GN[:, server] >= own_SP.max(axis=1, initial=0)).all()
        assert (found_GN[:, server] <= np.minimum(own_SP.sum(axis=1), np.bincount(source_U, minlength=hierarchy.ranks))).all()


def test_independent_tokens_are_estimated_within_a_tenth():
    config = CONFIG | {"num_local_experts": 32, "num_hidden_layers": 1, "num_experts_per_tok": 4}
    profile = aurora.synthetic_profile("zipf:0.3", config, SyntheticOptions(4, window_tokens=500, token_level=True))
    hierarchy, split_EG = Hierarchy(np.array([0, 0, 1, 1])), np.repeat(np.eye(4), 8, axis=0)
    experts_UK, source_U = profile.routing.layer(0)
    true = hierarchical_rows(serving_gpus(experts_UK, source_U, split_EG, hierarchy.server_G), source_U, hierarchy)
    found = estimated_rows(CountedTokens.of(replace(profile, routing=None), 0), split_EG, hierarchy)
    np.testing.assert_allclose(found.sent_GN, true.sent_GN, rtol=0.1)
    np.testing.assert_allclose(found.needed_GCG.sum(axis=1), true.needed_GCG.sum(axis=1), rtol=0.1)


def test_a_bound_from_counts_holds_for_the_tokens_that_were_counted():
    for seed in range(5):
        config = CONFIG | {"num_local_experts": 8, "num_hidden_layers": 1, "num_experts_per_tok": 3}
        options = SyntheticOptions(4, window_tokens=20, seed=seed, token_level=True, correlation=0.5)
        known = aurora.synthetic_profile("zipf:0.5", config, options)
        bounds = []
        for profile in (known, replace(known, routing=None)):
            costs = layer_costs(slow_nics(), profile, 0, deduplicated=True)
            given_M = [costs], [3], [np.full(4, 2)]
            bounds.append(hierarchical_bound_s(*given_M, replicas=False))
        assert 0 < bounds[1] <= bounds[0] * (1 + 1e-12)
