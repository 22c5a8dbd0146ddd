"""Tokens divided over GPUs: every token is sent once, to a GPU that holds a replica."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from aurora.algorithms.workload.serving_gpus import replica_tokens, tokens_to_gpus


@st.composite
def shares(draw):
    """(tokens_SE, split_EG): whole and divided experts, parts of nothing among them."""
    sources, experts, gpus = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    rows = st.lists(st.integers(0, 5), min_size=gpus, max_size=gpus).filter(any)
    weights = np.array([draw(rows) for _ in range(experts)], dtype=float)
    tokens = st.lists(st.sampled_from([0, 1, 2, 7, 10**6]), min_size=experts, max_size=experts)
    return np.array([draw(tokens) for _ in range(sources)]), weights / weights.sum(axis=1, keepdims=True)


def split_by_share(tokens_S, share_G):
    """(S, G): each source's tokens for one expert, cut at the running sum of its GPUs' shares."""
    upto_G, rounding_S = share_G.cumsum(), (np.arange(len(tokens_S)) + 0.5) / len(tokens_S)
    cut_SG = np.floor(tokens_S[:, None] * (upto_G / upto_G[-1]) + rounding_S[:, None]).astype(np.int64)
    return np.diff(cut_SG, axis=1, prepend=0)


def split_by_share_of_all(tokens_SE, split_EG):
    """(S, E, G), expert by expert."""
    return np.stack(
        [split_by_share(tokens_S, split_G) for tokens_S, split_G in zip(tokens_SE.T, split_EG, strict=True)], axis=1
    )


@given(shares())
def test_divided_tokens_are_all_sent_once_and_to_holders(case):
    tokens_SE, split_EG = case
    tokens_SG = tokens_to_gpus(tokens_SE, split_EG)
    assert tokens_SG.dtype == np.int64
    assert tokens_SG.sum(axis=1).tolist() == tokens_SE.sum(axis=1).tolist()
    tokens_SP, expert_P, gpu_P = replica_tokens(tokens_SE, split_EG)
    assert np.array_equal(tokens_SP, split_by_share_of_all(tokens_SE, split_EG)[:, expert_P, gpu_P])
    total_SG = np.zeros_like(tokens_SG)
    for expert, split_G in enumerate(split_EG):
        part_SG = split_by_share(tokens_SE[:, expert], split_G)
        assert (part_SG >= 0).all()
        assert not part_SG[:, split_G == 0].any()
        assert (abs(part_SG - np.outer(tokens_SE[:, expert], split_G)) <= 1 + 1e-6).all()
        total_SG += part_SG
    assert tokens_SG.tolist() == total_SG.tolist()


def test_sources_with_one_token_each_use_all_replicas():
    sent_SG = tokens_to_gpus(np.ones((4, 1), dtype=np.int64), np.array([[0.5, 0, 0.5]]))
    assert sent_SG.sum(axis=0).tolist() == [2, 0, 2]


def test_shares_that_miss_one_by_rounding_still_send_all():
    tokens = np.array([10**15, 1])
    sent_SG = tokens_to_gpus(tokens[:, None], np.array([[0.5, 0.5 - 4e-10, 0.0]]))
    assert sent_SG.sum(axis=1).tolist() == tokens.tolist()
