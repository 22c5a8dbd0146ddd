"""Rows of hierarchical all-to-alls from counts alone, against those of the tokens that were counted."""

from dataclasses import replace

import numpy as np
from hypothesis import given

import aurora
from aurora.algorithms.alltoall.hierarchical import hierarchical_rows
from aurora.algorithms.placement.cost_model import layer_costs
from aurora.algorithms.placement.placement_bounds import hierarchical_bound_s, server_counts
from aurora.algorithms.workload.serving_gpus import replica_tokens, serving_gpus
from aurora.algorithms.workload.traffic import CountedTokens, _in_pieces, _needed_tokens
from aurora.types import TOKEN_SPREADS, Hierarchy, SyntheticOptions
from tests.algorithms.workload.test_serving_gpus import replicated
from tests.planner.test_hierarchical_plans import slow_nics


def estimated_rows(tokens, split_EG, hierarchy):
    """HierarchicalRows, as plans take them from counts."""
    return _in_pieces(*_needed_tokens(tokens, split_EG, hierarchy.server_G), hierarchy)


@given(replicated())
def test_the_true_rows_are_no_fewer_than_the_least_and_no_more_than_the_most(case):
    experts_UK, source_U, split_EG, hierarchy = case
    different_U = (np.diff(np.sort(experts_UK, axis=1), axis=1) > 0).all(axis=1)  # drawn tables may name an expert twice
    experts_UK, source_U = experts_UK[different_U], source_U[different_U]
    if not experts_UK.size:
        return
    tokens_SE = np.zeros((hierarchy.ranks, len(split_EG)), dtype=np.int64)
    np.add.at(tokens_SE, (source_U[:, None], experts_UK), 1)
    gpu_UK = serving_gpus(experts_UK, source_U, split_EG, hierarchy.server_G)
    true = hierarchical_rows(gpu_UK, source_U, hierarchy)
    counted = CountedTokens(tokens_SE, experts_UK.shape[1], (1, 1), "expected")
    least, expected, most = (estimated_rows(counted._replace(spread=each), split_EG, hierarchy) for each in TOKEN_SPREADS)
    for name in ("sent_GN", "needed_GCG"):
        rows = [getattr(each, name) for each in (least, true, most, expected)]
        low, found, high, mean = ([each, each.sum(axis=1)][name == "needed_GCG"] for each in rows)
        assert (low <= found).all()
        assert (found <= high).all()
        assert (low <= mean).all()
        assert (mean <= high).all()


@given(replicated())
def test_replicas_get_the_tokens_that_are_served_there(case):
    experts_UK, source_U, split_EG, hierarchy = case
    tokens_SE, found_SEG = (
        np.zeros((hierarchy.ranks, len(split_EG)), dtype=np.int64),
        np.zeros((hierarchy.ranks, *split_EG.shape)),
    )
    np.add.at(tokens_SE, (source_U[:, None], experts_UK), 1)
    gpu_UK = serving_gpus(experts_UK, source_U, split_EG, hierarchy.server_G)
    np.add.at(found_SEG, (source_U[:, None], experts_UK, gpu_UK), 1)
    tokens_SP, expert_P, gpu_P = replica_tokens(tokens_SE, split_EG, hierarchy.server_G)
    assert (tokens_SP == found_SEG[:, expert_P, gpu_P]).all()
    assert tokens_SP.sum() == tokens_SE.sum()
    assert (np.diff(expert_P) >= 0).all()


def test_independent_tokens_are_estimated_within_a_tenth_and_groups_are_known(tmp_path):
    config = {
        "model_type": "deepseek_v3", "n_routed_experts": 32, "num_hidden_layers": 1, "num_experts_per_tok": 4, "hidden_size": 64,
        "moe_intermediate_size": 8, "n_group": 8, "topk_group": 2, "first_k_dense_replace": 0,
    }  # fmt: skip
    profile = aurora.synthetic_profile("zipf:0.3", config, SyntheticOptions(4, window_tokens=500, token_level=True))
    assert profile.expert_groups == (8, 2)
    aurora.save(profile, tmp_path / "profile.npz")
    assert aurora.load(tmp_path / "profile.npz") == profile
    hierarchy, split_EG = Hierarchy(np.array([0, 0, 1, 1])), np.repeat(np.eye(4), 8, axis=0)
    experts_UK, source_U = profile.routing.layer(0)
    true = hierarchical_rows(serving_gpus(experts_UK, source_U, split_EG, hierarchy.server_G), source_U, hierarchy)
    blind = replace(profile, routing=None)
    found = estimated_rows(CountedTokens.of(blind, 0), split_EG, hierarchy)
    without = estimated_rows(CountedTokens.of(replace(blind, expert_groups=(1, 1)), 0), split_EG, hierarchy)
    np.testing.assert_allclose(found.sent_GN, true.sent_GN, rtol=0.1)
    np.testing.assert_allclose(found.needed_GCG.sum(axis=1), true.needed_GCG.sum(axis=1), rtol=0.15)
    assert without.sent_GN.sum() > 1.1 * true.sent_GN.sum()  # who does not know the groups expects more rows


def test_a_bound_from_counts_holds_for_the_tokens_that_were_counted():
    for seed in range(5):
        config = {
            "num_local_experts": 8,
            "num_hidden_layers": 1,
            "num_experts_per_tok": 3,
            "hidden_size": 64,
            "intermediate_size": 8,
        }
        options = SyntheticOptions(4, window_tokens=20, seed=seed, token_level=True, correlation=0.5)
        known = aurora.synthetic_profile("zipf:0.5", config, options)
        bounds = []
        for profile in (known, replace(known, routing=None)):
            costs = layer_costs(slow_nics(), profile, 0, deduplicated=True)
            given_M = [costs], [server_counts(costs)], [3], [np.full(4, 2)]
            bounds.append(hierarchical_bound_s("exclusive", *given_M, replicas=False))
        assert 0 < bounds[1] <= bounds[0] * (1 + 1e-12)
