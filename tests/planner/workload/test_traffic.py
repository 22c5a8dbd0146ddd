"""Tokens divided over GPUs: every token is sent once, to a GPU that holds a replica."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from aurora.planner.workload.serving_gpus import split_by_share, tokens_to_gpus
from aurora.planner.workload.traffic import tokens_on_gpu


@st.composite
def shares(draw):
    """(tokens_SE, split_EG): whole and divided experts, parts of nothing among them."""
    sources, experts, gpus = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    rows = st.lists(st.integers(0, 5), min_size=gpus, max_size=gpus).filter(any)
    weights = np.array([draw(rows) for _ in range(experts)], dtype=float)
    tokens = st.lists(st.sampled_from([0, 1, 2, 7, 10**6]), min_size=experts, max_size=experts)
    return np.array([draw(tokens) for _ in range(sources)]), weights / weights.sum(axis=1, keepdims=True)


@given(shares())
def test_divided_tokens_are_all_sent_once_and_to_holders(case):
    tokens_SE, split_EG = case
    tokens_SG = tokens_to_gpus(tokens_SE, split_EG)
    assert tokens_SG.dtype == np.int64
    assert tokens_SG.sum(axis=1).tolist() == tokens_SE.sum(axis=1).tolist()
    assert (
        sum(
            tokens_on_gpu(tokens_SE, split_EG[None], np.zeros(len(tokens_SE), dtype=np.int64), g).sum()
            for g in range(split_EG.shape[1])
        )
        == tokens_SE.sum()
    )
    total_SG = np.zeros_like(tokens_SG)
    for expert, split_G in enumerate(split_EG):
        part_SG = split_by_share(tokens_SE[:, expert], split_G)
        assert (part_SG >= 0).all()
        assert not part_SG[:, split_G == 0].any()
        assert (abs(part_SG - np.outer(tokens_SE[:, expert], split_G)) <= 1 + 1e-6).all()
        total_SG += part_SG
    assert tokens_SG.tolist() == total_SG.tolist()
    for g in range(split_EG.shape[1]):
        assert (
            tokens_on_gpu(tokens_SE, split_EG[None], np.zeros(len(tokens_SE), dtype=np.int64), g).sum() == total_SG[:, g].sum()
        )


def test_sources_with_one_token_each_use_all_replicas():
    assert split_by_share(np.ones(4, dtype=np.int64), np.array([0.5, 0, 0.5])).sum(axis=0).tolist() == [2, 0, 2]


def test_shares_that_miss_one_by_rounding_still_send_all():
    tokens = np.array([10**15, 1])
    assert split_by_share(tokens, np.array([0.5, 0.5 - 4e-10, 0.0])).sum(axis=1).tolist() == tokens.tolist()
