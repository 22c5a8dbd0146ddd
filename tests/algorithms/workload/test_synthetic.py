"""Invented profiles keep to their description."""

from dataclasses import replace

import numpy as np
import pytest

from aurora.algorithms.workload.synthetic import draw, draw_profile
from aurora.errors import BadInput
from aurora.types import GpuKind, SyntheticOptions

MIXTRAL = {"num_local_experts": 8, "num_hidden_layers": 3, "num_experts_per_tok": 2, "hidden_size": 64, "intermediate_size": 56}
DEEPSEEK = {
    "n_routed_experts": 16, "num_hidden_layers": 4, "first_k_dense_replace": 1, "num_experts_per_tok": 4, "hidden_size": 32,
    "moe_intermediate_size": 16, "intermediate_size": 99,
}  # fmt: skip


def test_every_token_picks_its_experts_once():
    made = draw_profile("zipf:1.2", MIXTRAL, SyntheticOptions(sources=3, window_tokens=100, windows=2, seed=1))
    assert made.tokens_TLSE.shape == (2, 3, 3, 8)
    assert (made.tokens_TLSE.sum(axis=3) == 200).all()
    assert made.tokens_TLSE.max() <= 100  # no token picks an expert twice
    assert made.expert_bytes == 2 * 3 * 64 * 56


def test_dense_first_layers_and_shared_names_are_understood():
    made = draw_profile("uniform", DEEPSEEK)
    assert (made.layers, made.experts, made.top_k) == (3, 16, 4)
    assert made.expert_bytes == 2 * 3 * 32 * 16


def test_skew_grows_with_the_exponent_and_seeds_repeat():
    def skew(name, seed=0):
        load = draw_profile(name, MIXTRAL, SyntheticOptions(seed=seed)).tokens_TLSE.sum(axis=(0, 2))
        return (load.max(axis=1) / load.mean(axis=1)).mean()

    assert skew("uniform") < skew("zipf:0.8") < skew("zipf:1.5")
    a, b = (draw_profile("zipf:1", MIXTRAL, SyntheticOptions(seed=s)).tokens_TLSE for s in (4, 4))
    assert np.array_equal(a, b)


def test_token_level_is_the_same_draw():
    options = SyntheticOptions(sources=3, window_tokens=100, windows=2, seed=1)
    counted, kept = (draw_profile("zipf:1.2", DEEPSEEK, replace(options, token_level=t)) for t in (False, True))
    assert counted.routing is None
    assert np.array_equal(counted.tokens_TLSE, kept.tokens_TLSE)
    assert kept.routing.experts_ULK.shape == (600, 3, 4)
    with pytest.raises(BadInput, match="`window_tokens`: expected at most"):
        draw_profile("uniform", DEEPSEEK, SyntheticOptions(window_tokens=10**8, token_level=True))


def test_correlation_pairs_experts_and_keeps_their_popularity():
    def drawn(correlation):
        made = draw_profile("uniform", DEEPSEEK, SyntheticOptions(1, 4000, 1, 0, True, correlation))
        chosen_UE = np.zeros((4000, 16), dtype=bool)
        np.put_along_axis(chosen_UE, made.routing.experts_ULK[:, 0].astype(int), True, axis=1)
        together_EE = chosen_UE.T.astype(float) @ chosen_UE / 4000
        share_E = np.diag(together_EE).copy()
        np.fill_diagonal(together_EE, 0)
        return share_E, together_EE.max(axis=1) / share_E

    for correlation, least, most in ((0.0, 0.2, 0.35), (0.5, 0.45, 0.8), (1.0, 1.0, 1.0)):
        share_E, partner_E = drawn(correlation)
        assert share_E == pytest.approx(np.full(16, 0.25), abs=0.05)
        assert least <= partner_E.min() <= partner_E.max() <= most


@pytest.mark.parametrize(
    ("exponent", "correlation", "groups"),
    [
        (0.0, 0.0, (1, 1)), (0.8, 0.0, (1, 1)), (1.1, 0.0, (1, 1)), (2.0, 0.0, (1, 1)), (0.8, 0.3, (1, 1)), (0.8, 1.0, (1, 1)),
        (0.0, 0.0, (3, 1)), (0.8, 0.0, (4, 2)), (0.8, 0.3, (3, 1)), (3.0, 0.0, (3, 1)),
    ],
)  # fmt: skip
def test_sets_of_experts_are_as_frequent_as_with_gumbel_top_k(exponent, correlation, groups):
    """Every set of two of twelve experts, in ten thousands of tokens drawn here and there."""
    experts, tokens = 12, 40_000
    rng = np.random.default_rng(3)
    rarity_E = rng.permutation((1.0 + np.arange(experts)) ** exponent)
    luck_UE = rng.gumbel(size=(tokens, experts))
    kept_UK = np.zeros((tokens, 2), dtype=np.uint8)
    counts_TSE = np.zeros((1, 1, experts), dtype=np.int64)
    before = np.random.default_rng(5)
    draw(rarity_E, correlation, tokens, counts_TSE, kept_UK, 2, before, groups)
    if correlation:
        paired_E = np.random.default_rng(5).permutation(experts)
        shared_UP = rng.random((tokens, experts // 2)) < correlation
        for pair in range(experts // 2):
            first, second = paired_E[2 * pair : 2 * pair + 2]
            luck_UE[:, second] = np.where(shared_UP[:, pair], luck_UE[:, first], luck_UE[:, second])
    best_UJ = (luck_UE - np.log(rarity_E)).reshape(tokens, groups[0], -1).max(axis=2)
    closed_UJ = best_UJ < np.sort(best_UJ, axis=1)[:, -groups[1], None]
    luck_UE[np.repeat(closed_UJ, experts // groups[0], axis=1)] = -np.inf
    expected_UK = np.argsort(luck_UE - np.log(rarity_E), axis=1)[:, -2:]
    expected_S, found_S = (
        np.bincount(sets_UK.min(axis=1) * experts + sets_UK.max(axis=1), minlength=experts**2)
        for sets_UK in (expected_UK, kept_UK.astype(np.int64))
    )
    assert np.array_equal(counts_TSE[0, 0], np.bincount(kept_UK.ravel(), minlength=experts))
    spread_S = np.sqrt(np.maximum(1, expected_S + found_S))  # one standard deviation of the difference of two counts
    assert (np.abs(found_S - expected_S) < 5 * spread_S).all()
    assert np.sqrt(np.mean(((found_S - expected_S) / spread_S)[expected_S + found_S > 10] ** 2)) < 1.4


@pytest.mark.parametrize("skew", ["zipf", "zipf:x", "zipf:-1", "normal:1", "zipf:nan"])
def test_an_unknown_skew(skew):
    with pytest.raises(BadInput, match="`skew`: expected"):
        draw_profile(skew, MIXTRAL)


@pytest.mark.parametrize("config", [{}, {**MIXTRAL, "num_local_experts": 0}, {**MIXTRAL, "num_experts_per_tok": 9}])
def test_a_config_that_is_no_moe(config):
    with pytest.raises(BadInput, match="config: expected"):
        draw_profile("uniform", config)


def test_kinds_are_never_faster_than_their_datasheet():
    """One expert's time against its weights over the memory's rate and its multiplications over the peak."""
    kind = GpuKind("K", 10**9, 1e9, 1e12, 4, "a made-up datasheet")
    config = MIXTRAL | {"hidden_size": 512, "intermediate_size": 256}
    made = draw_profile("uniform", config, SyntheticOptions(), [kind])
    assert list(made.curves) == ["reference", "K"]
    assert made.digest != draw_profile("uniform", config).digest
    weights_s, token_s = made.expert_bytes / 1e9, 6 * 512 * 256 / 1e12
    expert = made.curves["K"]["expert"]
    for tokens in (1, 2, 300, 3000, 65536):
        moved_s = weights_s + tokens * 4 * 512 / 1e9
        assert expert(tokens) == pytest.approx(max(moved_s, tokens * token_s), rel=1e-9)
        assert made.curves["K"]["overhead"](tokens) == pytest.approx(5e-6)  # of the kernel of all experts
    reference = made.curves["reference"]["expert"]
    assert reference(1) == pytest.approx(made.expert_bytes / 1e12)
    assert reference(65536) == pytest.approx(65536 * 6 * 512 * 256 / 1e14)
    assert "a made-up datasheet" in made.provenance["curves of K"]


def test_tokens_keep_to_as_many_groups_as_the_config_says():
    groups = {"n_group": 4, "topk_group": 2}
    options = SyntheticOptions(sources=2, window_tokens=500, token_level=True)
    kept, free = (draw_profile("zipf:0.5", DEEPSEEK | said, options) for said in (groups, {}))
    for made, most in ((kept, 2), (free, 4)):
        group_ULK = np.sort(made.required_routing.experts_ULK // 4, axis=2)
        assert (1 + (np.diff(group_ULK, axis=2) > 0).sum(axis=2)).max() == most
        assert (made.tokens_TLSE.sum(axis=3) == 2000).all()
        assert made.tokens_TLSE.max() <= 500
