"""Dealing keeps every token and is as even as whole numbers allow."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from aurora.algorithms.workload.synthetic import draw_profile
from aurora.errors import BadInput
from aurora.profiler.import_routing import sources_of
from aurora.types import SyntheticOptions, TokenRouting
from aurora.types.profile import deal_counts
from tests.strategies import profiles

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


@given(st.integers(1, 6).flatmap(profiles), st.integers(1, 12))
def test_a_profile_serves_any_number_of_gpus(profile, sources):
    """Every token stays in its window, layer and expert; ranks merge and split within groups, as evenly as whole numbers allow."""
    dealt = profile.at_sources(sources)
    assert dealt.sources == sources
    assert (dealt.tokens_TLSE.sum(axis=2) == profile.tokens_TLSE.sum(axis=2)).all()
    groups = np.gcd(profile.sources, sources)
    before, after = (
        each.tokens_TLSE.reshape(*each.tokens_TLSE.shape[:2], groups, -1, each.experts) for each in (profile, dealt)
    )
    assert (before.sum(axis=3) == after.sum(axis=3)).all()
    assert (after.max(axis=3) - after.min(axis=3)).max() <= 1
    assert profile.at_sources(profile.sources) is profile
    assert dealt.digest == profile.at_sources(sources).digest


def test_tokens_and_prompts_are_dealt_whole():
    """Two ranks of two prompts each: on four ranks a prompt each, on one rank all of them, and no prompt is cut."""
    shares = np.repeat([0, 0, 1, 1], [3, 2, 1, 2])
    prompts = np.repeat([0, 1, 2, 3], [3, 2, 1, 2])
    experts = np.arange(8)[:, None, None] % 4
    routing = TokenRouting(experts, shares, np.zeros(8, dtype=int), prompts)
    profile = replace(drawn(), tokens_TLSE=routing.tokens_TLSE(1, 2, 4), routing=routing)
    assert profile.at_sources(4).routing.source_U.tolist() == prompts.tolist()
    assert profile.at_sources(1).routing.source_U.tolist() == [0] * 8
    assert profile.at_sources(4).tokens_TLSE.sum(axis=(0, 1, 3)).tolist() == [3, 2, 1, 2]
    unknown = replace(profile, routing=TokenRouting(experts, shares, np.zeros(8, dtype=int)))
    assert unknown.at_sources(4).tokens_TLSE.sum(axis=(0, 1, 3)).tolist() == [3, 2, 2, 1]
    with pytest.raises(BadInput, match="expected a positive number of source ranks, found 0"):
        profile.at_sources(0)


def drawn():
    """A profile of one window, one layer, two source ranks, four experts, top-1."""
    config = {
        "num_local_experts": 4, "num_experts_per_tok": 1, "num_hidden_layers": 1, "hidden_size": 8, "intermediate_size": 8,
    }  # fmt: skip
    return draw_profile("uniform", config, SyntheticOptions(sources=2))
