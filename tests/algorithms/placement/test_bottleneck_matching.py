"""Bottleneck matching against brute force."""

from itertools import permutations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from aurora.algorithms.placement.assignment import bottleneck_matching

SQUARES = st.integers(1, 5).flatmap(lambda n: arrays(np.float64, (n, n), elements=st.integers(0, 12).map(float)))


@given(SQUARES)
def test_no_permutation_is_better(weight):
    match = bottleneck_matching(weight)
    rows = np.arange(len(weight))
    assert sorted(match) == list(rows)
    best = min(max(weight[i, p[i]] for i in rows) for p in permutations(rows))
    assert weight[rows, match].max() == best
