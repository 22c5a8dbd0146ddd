"""Dealing keeps every token and is as even as whole numbers allow."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from aurora.profiler.import_routing import deal_counts, sources_of, windows_of

counts = array_shapes(min_dims=3, max_dims=3, max_side=4).flatmap(lambda s: arrays(np.int64, s, elements=st.integers(0, 40)))


def apart(dealt_TLSE, *axes):
    sums = dealt_TLSE.sum(axis=axes, keepdims=True)
    return (sums.max(axis=2) - sums.min(axis=2)).max()


@given(counts, st.integers(1, 7))
def test_dealt_counts(counts_TLE, sources):
    dealt = deal_counts(counts_TLE, sources)
    assert dealt.shape == (*counts_TLE.shape[:2], sources, counts_TLE.shape[2])
    assert (dealt.sum(axis=2) == counts_TLE).all()
    assert (dealt >= 0).all()
    assert max(apart(dealt), apart(dealt, 3), apart(dealt, 0, 3)) <= 1


@given(st.integers(1, 9), st.integers(1, 9))
def test_every_domain_has_sources_and_every_source_a_domain(domains, sources):
    own = [sources_of(domain, domains, sources).tolist() for domain in range(domains)]
    assert all(own)
    assert sorted({s for each in own for s in each}) == list(range(sources))
    if domains <= sources:
        assert sum(map(len, own)) == sources


def test_windows_close_when_full():
    assert windows_of(np.array([3, 3, 3, 20, 1, 1]), 6).tolist() == [0, 0, 1, 1, 2, 2]
    assert windows_of(np.array([3, 3]), None).tolist() == [0, 1]
