"""Tokens divided over GPUs: every token is sent once, to a GPU that holds a replica."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aurora.algorithms.workload.serving_gpus import replica_tokens, tokens_to_gpus
from aurora.algorithms.workload.traffic import gathered_bytes, nccl_rings
from aurora.types import Curve, Profile


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


def gathering(tokens_S, dispatch_bytes=64, combine_bytes=128):
    """A profile of one window and layer in which each rank has so many tokens of one expert each."""
    tokens_TLSE = np.zeros((1, 1, len(tokens_S), 2), dtype=np.int64)
    tokens_TLSE[0, 0, :, 0] = tokens_S
    flat = Curve(np.ones(1), np.ones(1))
    curves = {"reference": {"gate": flat, "expert": flat, "aggregate": flat}}
    return Profile("m", "print", tokens_TLSE, 1, dispatch_bytes, combine_bytes, 1, 1, curves)


@pytest.mark.parametrize(("servers", "each"), [(2, 15 * 100 * 64 / 8), (4, 31 * 100 * 64 / 8)])
def test_an_allgather_over_servers_uses_all_nics(servers, each):
    """2 x 8 and 4 x 8 GPUs of 100 tokens of 64 B: a NIC passes on (R - 1) T b / P, 12 kB and 24.8 kB.

    Less than R T b (S - 1) / S / P would leave tokens outside. Inside the servers, a port passes on (R - 1) T b.
    """
    ranks, server_G = 8 * servers, np.repeat(np.arange(servers), 8)
    far_GG = server_G[:, None] != server_G
    for phase, step, size in (("dispatch", 0, 64), ("dispatch", 1, 4), ("combine", 0, 128)):
        sent_GG = gathered_bytes(gathering([100] * ranks), 0, 0, phase, server_G)[step]
        for far_G in ((sent_GG * far_GG).sum(axis=0), (sent_GG * far_GG).sum(axis=1)):
            assert far_G.tolist() == [each * size / 64] * ranks
            assert far_G[0] >= ranks * 100 * size * (servers - 1) / servers / 8
        assert sent_GG.sum(axis=0).tolist() == sent_GG.sum(axis=1).tolist() == [(ranks - 1) * 100 * size] * ranks


def test_rings_carry_whole_bytes_of_uneven_ranks():
    """Of ranks' 3, 0, 6 and 9 bytes, rank 3 passes on half of 15, those of all but rank 0, in one ring, and in the other half of
    12, those of all but rank 2.
    """
    server_G = np.array([0, 0, 1, 1])
    assert nccl_rings(server_G).tolist() == [[1, 2, 3, 0], [3, 0, 1, 2]]
    sent_GG = gathered_bytes(gathering([1, 0, 2, 3], 3), 0, 0, "dispatch", server_G)[0]
    assert sent_GG.tolist() == [[0, 9, 0, 5], [8, 0, 6, 0], [0, 9, 0, 4], [7, 0, 6, 0]]
    back_GG = gathered_bytes(gathering([1, 0, 2, 3], 3, 3), 0, 0, "combine", server_G)[0]
    assert np.array_equal(back_GG, sent_GG.T)
