"""Token-level routing agrees with the counts, keeps its tokens together, and survives its file."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aurora.errors import BadInput
from aurora.io import load_profile, save
from aurora.types import TokenRouting
from tests.strategies import routed_profiles

ROUTED = st.integers(1, 3).flatmap(lambda n: routed_profiles(n))


@given(ROUTED, st.randoms())
def test_tokens_in_any_order_give_the_same_counts(profile, random):
    """Counted one by one; and window by window they are those of the window."""
    routing = profile.routing
    coactivation = Counter()
    for chosen_LK, source, window in zip(routing.experts_ULK.tolist(), routing.source_U, routing.window_U, strict=True):
        for layer, chosen in enumerate(chosen_LK):
            coactivation.update((window, layer, source, expert) for expert in chosen)
    assert {
        at: int(profile.tokens_TLSE[at]) for at in np.ndindex(profile.tokens_TLSE.shape) if profile.tokens_TLSE[at]
    } == coactivation
    sequence = list(range(len(routing.source_U)))
    random.shuffle(sequence)
    mixed = TokenRouting(routing.experts_ULK[sequence], routing.source_U[sequence], routing.window_U[sequence])
    assert np.array_equal(mixed.tokens_TLSE(profile.windows, profile.sources, profile.experts), profile.tokens_TLSE)
    assert (np.diff(mixed.window_U * profile.sources + mixed.source_U) >= 0).all()
    for window in range(profile.windows):
        experts_UK, source_U = mixed.layer(0, window)
        found = np.zeros((profile.sources, profile.experts), dtype=int)
        np.add.at(found, (source_U[:, None], experts_UK.astype(int)), 1)
        assert found.tolist() == profile.tokens_TLSE[window, 0].tolist()


@given(ROUTED)
def test_files_keep_the_choices_and_the_digest_knows_them(tmp_path_factory, profile):
    path = tmp_path_factory.mktemp("choices") / "p.npz"
    save(profile, path)
    again = load_profile(path)
    assert again.digest == profile.digest != replace(profile, routing=None).digest
    assert again.routing.experts_ULK.dtype == np.uint8
    assert np.array_equal(again.routing.experts_ULK, profile.routing.experts_ULK)


def test_many_experts_take_two_bytes():
    assert TokenRouting(np.array([[[255]]]), np.array([0]), np.array([0])).experts_ULK.dtype == np.uint8
    assert TokenRouting(np.array([[[256, 3]]]), np.array([0]), np.array([0])).experts_ULK.dtype == np.uint16


@pytest.mark.parametrize(
    ("experts", "source", "window", "message"),
    [
        ([[[0, 0]]], [0], [0], "layer 0: expected different experts for a token, found one twice"),
        ([[[0.0, 1.0]]], [0], [0], "expected whole numbers, tokens by layers by choices, found float64"),
        ([[0, 1]], [0], [0], "tokens by layers by choices"),
        (np.zeros((0, 1, 2), dtype=int), [], [], "tokens by layers by choices"),
        ([[[-1, 1]]], [0], [0], "expected experts from 0 to 65535, found -1 to 1"),
        ([[[0, 1 << 16]]], [0], [0], "expected experts from 0 to 65535"),
        ([[[0, 1]]], [0, 1], [0], "window_U: expected 2 along U as in source_U, found 1"),
        ([[[0, 1]]], [0], [-1], "window_U: expected counts of zero or more"),
    ],
)
def test_choices_that_cannot_be(experts, source, window, message):
    with pytest.raises(BadInput, match=message):
        TokenRouting(np.array(experts), np.array(source, dtype=int), np.array(window, dtype=int))


def swapped(profile):
    """One token's choice is another expert, in one layer."""
    experts = profile.routing.experts_ULK.copy()
    experts[0, 0] = (experts[0, 0] + 1) % profile.experts
    return TokenRouting(experts, profile.routing.source_U, profile.routing.window_U)


@given(ROUTED.filter(lambda profile: profile.experts > profile.top_k))
def test_choices_that_disagree_with_the_counts(profile):
    with pytest.raises(BadInput, match=r"expected the .* tokens of tokens_TLSE, found"):
        replace(profile, routing=swapped(profile))
    for name in ("source_U", "window_U"):
        with pytest.raises(BadInput, match=f"{name}: expected numbers below"):
            replace(profile, routing=replace(profile.routing, **{name: np.full(len(profile.routing.source_U), 10**12)}))
    with pytest.raises(BadInput, match="choices of a token in each of"):
        replace(profile, routing=replace(profile.routing, experts_ULK=profile.routing.experts_ULK.repeat(2, axis=1)))
