"""Recoverability against brute force over every set of failures."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from aurora.algorithms.replicas.survival_probability import minimal_holders, recoverable_odds


@given(st.tuples(st.integers(1, 7), st.integers(1, 6)).flatmap(lambda shape: arrays(np.bool_, shape)), st.data())
def test_odds_of_recoverable_sets_are_exact(held_ED, data):
    """By the definition: the sets of failures after which every expert has a holder left."""
    held_ED[:, 0] |= ~held_ED.any(axis=1)
    domains = held_ED.shape[1]
    odds = data.draw(st.lists(st.integers(1, 9), min_size=domains, max_size=domains))
    most = data.draw(st.integers(0, domains))
    expected = [0] * (most + 1)
    for failures in range(most + 1):
        for failed in itertools.combinations(range(domains), failures):
            if np.delete(held_ED, failed, axis=1).any(axis=1).all():
                expected[failures] += int(np.prod([odds[domain] for domain in failed]))
    found = recoverable_odds(minimal_holders(held_ED), odds, most, 1000)
    assert found + [0] * (most + 1 - len(found)) == expected


def test_a_search_that_takes_too_many_branches_gives_nothing():
    ring = (np.eye(9) + np.roll(np.eye(9), 1, axis=1)) > 0
    assert recoverable_odds(minimal_holders(ring), [1] * 9, 9, 3) == []
