"""Pairs against counting token by token, and pairs that lie."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aurora.errors import BadInput
from aurora.types import CoActivation
from aurora.types import coactivation as pairs_module
from tests.strategies import routed_profiles


@given(routed_profiles(2), st.integers(1, 5))
def test_pairs_are_what_tokens_chose(profile, block):
    chosen = profile.routing.experts_ULK
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pairs_module, "BLOCK", block)
        found = CoActivation.of(chosen, profile.experts)
    for layer in range(profile.layers):
        for e in range(profile.experts):
            for f in range(profile.experts):
                here = [e in token[layer] and f in token[layer] for token in chosen.tolist()]
                assert found.together_LEE[layer, e, f] == sum(here)
                if layer:
                    after = [e in token[layer - 1] and f in token[layer] for token in chosen.tolist()]
                    assert found.next_LEE[layer - 1, e, f] == sum(after)
    found.check(profile.load_LE, profile.top_k)
    half = len(chosen) // 2
    parts = [CoActivation.of(part, profile.experts) for part in (chosen[:half], chosen[half:])]
    assert np.array_equal(CoActivation.sum(parts).together_LEE, found.together_LEE)


def test_pairs_that_lie():
    good = CoActivation.of(np.array([[[0, 1], [1, 2]]]), 3)
    load_LE = np.array([[1, 1, 0], [0, 1, 1]])
    good.check(load_LE, 2)
    with pytest.raises(BadInput, match=r"layer 0, expert 0: expected together_LEE's diagonal to be 2 by the counts, found 1"):
        good.check(load_LE + np.array([[1, 0, 0], [0, 0, 0]]), 2)
    with pytest.raises(BadInput, match="expected together_LEE's rows to be 1 by the counts, found 2"):
        good.check(load_LE, 1)
    with pytest.raises(BadInput, match="next_LEE's rows"):
        CoActivation(good.together_LEE, 2 * good.next_LEE).check(load_LE, 2)
    with pytest.raises(BadInput, match=r"expected 4 experts in 2 layers, found \(2, 3, 3\)"):
        good.check(np.ones((2, 4), dtype=int), 2)
    with pytest.raises(BadInput, match="pairs: expected experts by experts"):
        CoActivation(good.together_LEE, good.together_LEE)
    with pytest.raises(BadInput, match="together_LEE: expected counts of zero or more"):
        CoActivation(-good.together_LEE, good.next_LEE)
