"""Tokens split over replicas: every token once, shares kept, ranks agree, own tokens first."""

from itertools import product

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from aurora.moe.local_first import token_split
from tests.moe.reference_token_split import capacities, local_first, tokens_to_ranks


@st.composite
def batches(draw, max_ranks=5, most=40):
    """(tokens_SE, held_G, split_G or None): every expert is held somewhere, perhaps twice by a rank."""
    ranks, experts = draw(st.integers(1, max_ranks)), draw(st.integers(1, 6))
    held_G = [draw(st.lists(st.integers(0, experts - 1), max_size=5)) for _ in range(ranks)]
    for expert in range(experts):
        if not any(expert in held for held in held_G):
            held_G[draw(st.integers(0, ranks - 1))].append(expert)
    split_G = None
    if draw(st.booleans()):
        held_G = [sorted(set(held)) for held in held_G]
        split_G = [[draw(st.integers(1, 9)) / 10 for _ in held] for held in held_G]
        pairs = [(e, s) for held, own in zip(held_G, split_G, strict=True) for e, s in zip(held, own, strict=True)]
        total_E = [sum(s for e, s in pairs if e == expert) for expert in range(experts)]
        split_G = [[s / total_E[e] for e, s in zip(held, own, strict=True)] for held, own in zip(held_G, split_G, strict=True)]
    return draw(arrays(np.int64, (ranks, experts), elements=st.integers(0, most))), held_G, split_G


@given(batches())
def test_every_token_goes_once_and_shares_are_kept_within_a_token(case):
    tokens_SE, held_G, split_G = case
    split = token_split(held_G, split_G)
    rows_SX = np.array([local_first(tokens_SE, split, rank) for rank in range(len(tokens_SE))])
    assert (rows_SX >= 0).all()
    taken_X, load_E = rows_SX.sum(axis=0), tokens_SE.sum(axis=0)
    assert taken_X.tolist() == capacities(load_E, split).tolist()  # the ranks, each computing apart, agree
    for rank, expert in product(*map(range, tokens_SE.shape)):
        assert rows_SX[rank, split.expert_X == expert].sum() == tokens_SE[rank, expert]
    for x, (expert, rank) in enumerate(zip(split.expert_X.tolist(), split.rank_X.tolist(), strict=True)):
        if split_G is None:
            share = held_G[rank].count(expert) / sum(own.count(expert) for own in held_G)
        else:
            share = split_G[rank][held_G[rank].index(expert)]
        assert abs(taken_X[x] - share * load_E[expert]) < 1 + 1e-4
        assert rows_SX[rank, x] == min(taken_X[x], tokens_SE[rank, expert])  # own tokens first
    assert tokens_to_ranks(rows_SX, split).sum(axis=1).tolist() == tokens_SE.sum(axis=1).tolist()


def test_shares_of_equal_replicas_are_exact():
    """49 tokens on 49 replicas: one each, whatever floats make of 49 * (1 / 49)."""
    split = token_split([[0]] * 49)
    assert capacities(np.array([49]), split).tolist() == [1] * 49
    assert capacities(np.array([49]), token_split([[0]] * 49, [[1 / 49]] * 49)).tolist() == [1] * 49


def test_single_tokens_of_different_experts_go_to_different_ranks():
    split = token_split([[0, 1, 2, 3]] * 4)
    taken_X = capacities(np.ones(4, dtype=np.int64), split)
    assert sorted(split.rank_X[taken_X == 1].tolist()) == [0, 1, 2, 3]
