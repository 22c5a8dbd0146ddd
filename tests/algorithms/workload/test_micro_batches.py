"""Micro-batches of profiles: what is cut adds up, and every rank's tokens are cut evenly."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from aurora.algorithms.workload.step_traffic import micro_batches
from aurora.algorithms.workload.synthetic import draw_profile
from aurora.types import SyntheticOptions
from tests.strategies import profiles, routed_profiles

CONFIG = {"num_local_experts": 8, "num_hidden_layers": 2, "num_experts_per_tok": 2, "hidden_size": 64, "intermediate_size": 8}


@given(profiles(3), st.integers(1, 4))
def test_parts_add_up_and_tokens_are_as_even_as_integers_allow(profile, parts):
    cut = micro_batches(profile, parts)
    assert len(cut) <= parts
    assert np.array_equal(sum(part.tokens_TLSE for part in cut), profile.tokens_TLSE)
    tokens_PTLS = np.zeros((parts, *profile.tokens_TLSE.shape[:3]), dtype=np.int64)
    tokens_PTLS[: len(cut)] = [part.tokens_TLSE.sum(axis=3) for part in cut]
    assert (tokens_PTLS.max(axis=0) - tokens_PTLS.min(axis=0)).max() <= 1


@given(routed_profiles(2), st.integers(2, 4))
def test_token_level_routing_is_cut_along(profile, parts):
    cut = micro_batches(profile, parts)
    assert np.array_equal(sum(part.tokens_TLSE for part in cut), profile.tokens_TLSE)
    rows = [tuple(row) for part in cut for row in part.routing.experts_ULK.reshape(-1, profile.layers * profile.top_k).tolist()]
    whole = [tuple(row) for row in profile.routing.experts_ULK.reshape(-1, profile.layers * profile.top_k).tolist()]
    assert sorted(rows) == sorted(whole)
    for window in range(profile.windows):
        for source in range(profile.sources):
            counts = [int(((p.routing.window_U == window) & (p.routing.source_U == source)).sum()) for p in cut]
            counts += [0] * (parts - len(cut))
            assert max(counts) - min(counts) <= 1


def test_a_part_has_top_k_pairs_of_every_token_and_its_share_of_every_expert():
    profile = draw_profile("zipf:1", CONFIG, SyntheticOptions(sources=4, window_tokens=101, windows=2))
    parts = micro_batches(profile, 3)
    for part, tokens in zip(parts, (34, 34, 33), strict=True):
        assert (part.tokens_TLSE.sum(axis=3) == tokens * profile.top_k).all()
        assert (part.tokens_TLSE <= tokens).all()
        assert (abs(part.tokens_TLSE - profile.tokens_TLSE / 3) <= 2).all()
    assert [part.windows for part in parts] == [2, 2, 2]


def test_one_part_is_the_profile_and_parts_without_tokens_are_left_out():
    profile = draw_profile("uniform", CONFIG, SyntheticOptions(sources=4, window_tokens=2))
    assert micro_batches(profile, 1)[0] is profile
    assert len(micro_batches(profile, 4)) == 2
