"""Which GPU serves which choice in hierarchical all-to-alls: by whose tokens each GPU gets, and by numbers that are easy to follow."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from aurora.algorithms.workload.serving_gpus import replica_tokens, served_split, server_split, serving_gpus
from tests.algorithms.alltoall.test_hierarchical import token_tables


@st.composite
def replicated(draw):
    """(experts_UK, source_U, split_EG, hierarchy): experts with any replicas, some without a share."""
    drawn_UK, source_U, hierarchy = draw(token_tables())
    rng, experts = np.random.default_rng(draw(st.integers(0, 2**32))), hierarchy.ranks
    parts_EG = rng.integers(1, 5, (experts, experts)) * (
        rng.random((experts, experts)) < draw(st.sampled_from((0.1, 0.5, 1.0)))
    )
    parts_EG[np.arange(experts), rng.integers(0, experts, experts)] += 1
    return drawn_UK, source_U, parts_EG / parts_EG.sum(axis=1, keepdims=True), hierarchy


def check_serving(found_SEG, split_EG, server_G):
    """A choice goes to a holder; those of an expert and a server to one server, its own if it holds it, by the shares there."""
    in_NG = np.equal.outer(np.arange(server_G.max() + 1), server_G)
    to_NEN = np.einsum("ns,seg,mg->nem", in_NG, found_SEG, in_NG) > 0
    assert not found_SEG[:, split_EG == 0].any()
    assert (to_NEN.sum(axis=2) <= 1).all()
    held_NE = in_NG @ split_EG.T > 0
    assert (np.einsum("nen->ne", to_NEN) == to_NEN.any(axis=2))[held_NE].all()
    part_SEG = split_EG * to_NEN[server_G][:, :, server_G]
    part_SEG /= part_SEG.sum(axis=2, keepdims=True).clip(1e-12)
    assert (abs(found_SEG - part_SEG * found_SEG.sum(axis=2, keepdims=True)) <= 1 + 1e-6).all()


@given(replicated())
def test_every_choice_is_served_where_the_checker_expects_it(case):
    experts_UK, source_U, split_EG, hierarchy = case
    server_G, (experts, gpus) = hierarchy.server_G, split_EG.shape
    gpu_UK = serving_gpus(experts_UK, source_U, split_EG, server_G)
    found_SEG = np.zeros((gpus, experts, gpus), dtype=np.int64)
    np.add.at(found_SEG, (source_U[:, None], experts_UK, gpu_UK), 1)
    check_serving(found_SEG, split_EG, server_G)
    tokens_SE, found_EG = found_SEG.sum(axis=2), found_SEG.sum(axis=0)
    split_NEG = server_split(split_EG, server_G)
    np.testing.assert_allclose(split_NEG.sum(axis=2), 1)
    assert not split_NEG[:, split_EG == 0].any()
    tokens_SP, expert_P, gpu_P = replica_tokens(tokens_SE, split_EG, server_G)
    assert (tokens_SP == found_SEG[:, expert_P, gpu_P]).all()
    assert tokens_SP.sum() == found_SEG.sum()
    assert (np.diff(expert_P) >= 0).all()
    served_EG = served_split(tokens_SE, split_EG, server_G)
    np.testing.assert_allclose(served_EG.sum(axis=1), 1)
    sources_E = (tokens_SE > 0).sum(axis=0)  # each rounds on its own
    assert (abs(served_EG * tokens_SE.sum(axis=0)[:, None] - found_EG) <= sources_E[:, None] + 1e-6).all()


def test_servers_without_an_expert_are_dealt_out_by_shares():
    """Four servers of one GPU. Expert 0 is on servers 0 and 2: 3 serves by the larger share, 1 as both are then equal."""
    split_EG = np.array([[0.5, 0.0, 0.5, 0.0], [0.25, 0.0, 0.75, 0.0], [0.0, 1.0, 0.0, 0.0]])
    serving_NE = server_split(split_EG, np.arange(4)).argmax(axis=2)
    assert serving_NE.T.tolist() == [[0, 0, 2, 2], [0, 2, 2, 2], [1, 1, 1, 1]]


def test_replicas_of_a_server_share_its_tokens():
    """Expert 0 is on both GPUs of server 0, once more on server 1, whose two ranks then never send it away."""
    split_EG, server_G = np.array([[0.25, 0.5, 0.25, 0.0]]), np.array([0, 0, 1, 1])
    split_NEG = server_split(split_EG, server_G)
    np.testing.assert_allclose(split_NEG[:, 0], [[1 / 3, 2 / 3, 0, 0], [0, 0, 1, 0]])
    source_U = np.repeat(np.arange(4), 3)
    gpu_U = serving_gpus(np.zeros((12, 1), dtype=np.int64), source_U, split_EG, server_G)[:, 0]
    assert gpu_U.tolist() == [0, 1, 1] * 2 + [2] * 6
