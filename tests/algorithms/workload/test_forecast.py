"""Forecasts of a layer's traffic, against traffic drawn from a known source."""

import numpy as np
import pytest

from aurora.algorithms.workload.forecast import forecast

EXPERTS, SOURCES = 32, 4


def drawn(rng, share_E, windows, tokens, clump=1, spread=np.inf):
    """(T, S, E) counts: each window has its own shares around share_E, and `clump` tokens in a row choose one expert."""
    out = np.zeros((windows, SOURCES, len(share_E)), dtype=np.int64)
    for window in range(windows):
        own_E = share_E if spread == np.inf else rng.dirichlet(share_E * spread)
        for source in range(SOURCES):
            out[window, source] = rng.multinomial(tokens // clump, own_E) * clump
    return out


def skewed(rng):
    return rng.permutation((1.0 + np.arange(EXPERTS)) ** -0.8) / ((1.0 + np.arange(EXPERTS)) ** -0.8).sum()


def as_windows(tokens_TSE):
    return [window[None] for window in tokens_TSE]


def test_equal_windows_are_forecast_alike_and_each_within_chance():
    rng = np.random.default_rng(0)
    share_E = skewed(rng)
    made = forecast(as_windows(drawn(rng, share_E, 16, 400)), True)
    assert abs(made.share_WE - made.share_WE.mean(axis=0)).sum(axis=1).mean() < 0.03
    assert abs(made.share_WE[0] - share_E).sum() < 0.1
    assert (made.affinity_SE == 1).mean() > 0.9 or abs(made.affinity_SE - 1).mean() < 0.05


def test_windows_of_two_kinds_keep_their_own_shares():
    rng = np.random.default_rng(1)
    kinds = skewed(rng), skewed(rng)
    tokens_TSE = np.concatenate([drawn(rng, kinds[window % 2], 1, 2000) for window in range(8)])
    made = forecast(as_windows(tokens_TSE), True)
    for window, share_E in enumerate(made.share_WE):
        assert abs(share_E - kinds[window % 2]).sum() < 0.12


def test_few_tokens_are_shrunk_to_the_shares_of_all():
    rng = np.random.default_rng(2)
    share_E = skewed(rng)
    tokens_TSE = drawn(rng, share_E, 8, 20)
    made = forecast(as_windows(tokens_TSE), True)
    raw_WE = tokens_TSE.sum(axis=1) / tokens_TSE.sum(axis=(1, 2))[:, None]
    assert abs(made.share_WE - share_E).sum(axis=1).mean() < 0.6 * abs(raw_WE - share_E).sum(axis=1).mean()


@pytest.mark.parametrize("clump", [1, 5])
@pytest.mark.parametrize("spread", [np.inf, 200.0])
@pytest.mark.parametrize("windows", [1, 6])
def test_draws_vary_as_much_as_unseen_windows(clump, spread, windows):
    """The distance of unseen windows from the forecast is that of its draws, averaged over many recorded samples."""
    rng = np.random.default_rng(3)
    apart: dict[str, list[float]] = {"drawn": [], "unseen": []}
    for _ in range(60):
        share_E = skewed(rng)
        tokens_TSE = drawn(rng, share_E, windows + 1, 300, clump, spread if windows > 1 else np.inf)
        made = forecast(as_windows(tokens_TSE[:windows]), True)
        center_E = made.share_WE.mean(axis=0)
        unseen_E = tokens_TSE[windows].sum(axis=0) / tokens_TSE[windows].sum()
        drawn_XSE, _ = made.draws(12, rng)
        drawn_XE = drawn_XSE.sum(axis=1) / drawn_XSE.sum(axis=(1, 2))[:, None]
        apart["unseen"].append(float(((unseen_E - center_E) ** 2).sum()))
        apart["drawn"].append(float(((drawn_XE - center_E) ** 2).sum(axis=1).mean()))
    assert np.mean(apart["drawn"]) == pytest.approx(np.mean(apart["unseen"]), rel=0.3)


def test_a_source_ranks_lasting_preference_is_kept_and_chance_is_not():
    rng = np.random.default_rng(4)
    share_E = skewed(rng)
    lasting_SE = rng.dirichlet(share_E * 30, SOURCES)
    tokens_TSE = np.array([[rng.multinomial(500, own_E) for own_E in lasting_SE] for _ in range(8)])
    made = forecast(as_windows(tokens_TSE), True)
    expected_SE = made.expected_WSE.mean(axis=0)
    expected_SE /= expected_SE.sum(axis=1, keepdims=True)
    assert abs(expected_SE - lasting_SE).sum(axis=1).mean() < 0.15
    chance = forecast(as_windows(drawn(rng, share_E, 8, 500)), True).affinity_SE
    assert abs(chance - 1).mean() < 0.3 * abs(made.affinity_SE - 1).mean()
    assert (forecast(as_windows(tokens_TSE[:1]), True).affinity_SE == 1).all()


def test_tokens_and_windows_add_up():
    rng = np.random.default_rng(5)
    tokens_TSE = drawn(rng, skewed(rng), 6, 100)
    each = forecast([tokens_TSE[:3], tokens_TSE[3:]], True)
    assert each.expected_WSE.sum(axis=(1, 2)) == pytest.approx([400, 400])
    assert each.windows_W.tolist() == [1, 1]
    whole = forecast([tokens_TSE], False)
    assert whole.expected_WSE.sum(axis=2)[0] == pytest.approx(tokens_TSE.sum(axis=(0, 2)))
    drawn_XSE, windows_X = whole.draws(3, rng)
    assert drawn_XSE.sum(axis=(1, 2)) == pytest.approx([2400] * 3)
    assert windows_X.tolist() == [6] * 3


def test_silent_layers_and_single_experts_are_forecast_without_numbers_going_wrong():
    for tokens_TSE in (
        np.zeros((2, 3, 4), dtype=np.int64),
        np.ones((1, 1, 1), dtype=np.int64),
        np.eye(3, dtype=np.int64)[None],
    ):
        made = forecast(as_windows(tokens_TSE), True)
        drawn_XSE, _ = made.draws(5, np.random.default_rng(0))
        assert np.isfinite(drawn_XSE).all()
        assert made.expected_WSE.sum() == pytest.approx(tokens_TSE.sum())


def test_windows_that_differ_each_in_its_own_way_are_draws_around_the_shares_of_all():
    rng = np.random.default_rng(6)
    share_E = skewed(rng)
    made = forecast(as_windows(drawn(rng, share_E, 12, 2000, spread=100.0)), True)
    assert abs(made.share_WE - made.share_WE[0]).max() == 0
    assert abs(made.share_WE[0] - share_E).sum() < 0.15
    assert made.concentration_W[0] < 120


def test_volumes_of_source_ranks_count_if_they_last():
    rng = np.random.default_rng(7)
    share_E = skewed(rng)
    lasting_S = np.array([0.4, 0.3, 0.2, 0.1])
    lasting_TSE = np.array([[rng.multinomial(int(1000 * part), share_E) for part in lasting_S] for _ in range(8)])
    found_S = forecast(as_windows(lasting_TSE), True).tokens_WS[0] / 1000
    assert found_S == pytest.approx(lasting_S, abs=0.02)
    passing_TSE = np.array([lasting_TSE[window % 8, rng.permutation(4)] for window in range(64)])
    found_S = forecast(as_windows(passing_TSE), True).tokens_WS[0] / 1000
    assert abs(found_S - 0.25).max() < 0.05
    assert forecast(as_windows(lasting_TSE[:1]), True).tokens_WS[0] == pytest.approx([250] * 4)
