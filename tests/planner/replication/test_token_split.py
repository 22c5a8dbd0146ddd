"""Dividing tokens over replicas: every token once, shares kept, ranks agree, own tokens first; and what the LP saves."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from aurora.planner.replication.token_split import capacities, dispatch, exchanged, holders, routed


@st.composite
def batches(draw, max_ranks=5, most=40):
    """(tokens_SE, held_G, share_G or None): every expert is held somewhere, perhaps twice by a rank."""
    ranks, experts = draw(st.integers(1, max_ranks)), draw(st.integers(1, 6))
    held_G = [draw(st.lists(st.integers(0, experts - 1), max_size=5)) for _ in range(ranks)]
    for expert in range(experts):
        if not any(expert in held for held in held_G):
            held_G[draw(st.integers(0, ranks - 1))].append(expert)
    share_G = None
    if draw(st.booleans()):
        held_G = [sorted(set(held)) for held in held_G]
        share_G = [[draw(st.integers(1, 9)) / 10 for _ in held] for held in held_G]
        pairs = [(e, s) for held, own in zip(held_G, share_G, strict=True) for e, s in zip(held, own, strict=True)]
        total_E = [sum(s for e, s in pairs if e == expert) for expert in range(experts)]
        share_G = [[s / total_E[e] for e, s in zip(held, own, strict=True)] for held, own in zip(held_G, share_G, strict=True)]
    return draw(arrays(np.int64, (ranks, experts), elements=st.integers(0, most))), held_G, share_G


@given(batches())
def test_every_token_goes_once_and_shares_are_kept_within_a_token(case):
    tokens_SE, held_G, share_G = case
    held = holders(held_G, share_G)
    rows_SX = np.array([dispatch(tokens_SE, held, rank) for rank in range(len(tokens_SE))])
    assert (rows_SX >= 0).all()
    taken_X, load_E = rows_SX.sum(axis=0), tokens_SE.sum(axis=0)
    assert taken_X.tolist() == capacities(load_E, held).tolist()  # the ranks, each computing apart, agree
    for rank, expert in product(*map(range, tokens_SE.shape)):
        assert rows_SX[rank, held.expert_X == expert].sum() == tokens_SE[rank, expert]
    for x, (expert, rank) in enumerate(zip(held.expert_X.tolist(), held.rank_X.tolist(), strict=True)):
        if share_G is None:
            share = held_G[rank].count(expert) / sum(own.count(expert) for own in held_G)
        else:
            share = share_G[rank][held_G[rank].index(expert)]
        assert abs(taken_X[x] - share * load_E[expert]) < 1 + 1e-4
        assert rows_SX[rank, x] == min(taken_X[x], tokens_SE[rank, expert])  # own tokens first
    assert exchanged(rows_SX, held).sum(axis=1).tolist() == tokens_SE.sum(axis=1).tolist()


def test_shares_of_equal_replicas_are_exact():
    """49 tokens on 49 replicas: one each, whatever floats make of 49 * (1 / 49)."""
    held = holders([[0]] * 49)
    assert capacities(np.array([49]), held).tolist() == [1] * 49
    assert capacities(np.array([49]), holders([[0]] * 49, [[1 / 49]] * 49)).tolist() == [1] * 49


def test_single_tokens_of_different_experts_go_to_different_ranks():
    held = holders([[0, 1, 2, 3]] * 4)
    taken_X = capacities(np.ones(4, dtype=np.int64), held)
    assert sorted(held.rank_X[taken_X == 1].tolist()) == [0, 1, 2, 3]


@settings(max_examples=30, deadline=None)
@given(batches(4, 9), st.sampled_from([0.0, 0.5, 1.0]))
def test_the_program_is_a_bound_and_conserves(case, back):
    tokens_SE, held_G, share_G = case
    ranks, held = len(tokens_SE), holders(held_G, share_G)
    token_s_G, send_s_G, recv_s_G = 1 + np.arange(ranks) / 2, np.full(ranks, 0.7), np.linspace(1, 2, ranks)
    found = routed(tokens_SE, held, token_s_G, send_s_G, recv_s_G, back)
    for expert in range(tokens_SE.shape[1]):
        assert found.rows_SX[:, held.expert_X == expert].sum(axis=1).tolist() == tokens_SE[:, expert].tolist()
    assert (found.rows_SX >= 0).all()
    rows_SX = np.array([dispatch(tokens_SE, held, rank) for rank in range(ranks)])
    tokens_GG = exchanged(rows_SX, held)
    away_GG = tokens_GG * (1 - np.eye(ranks))
    out_G, in_G = away_GG.sum(axis=1), away_GG.sum(axis=0)
    by_shares = max((out_G * send_s_G).max(), (in_G * recv_s_G).max()) + (tokens_GG.sum(axis=0) * token_s_G).max()
    by_shares += back * max((in_G * send_s_G).max(), (out_G * recv_s_G).max())
    assert found.bound_s <= min(found.seconds, by_shares) + 1e-9


def test_the_program_keeps_tokens_off_a_slow_network_and_shares_a_fast_one():
    tokens_SE, held = np.array([[8], [0]]), holders([[0], [0]])
    alike = np.ones(2)
    assert routed(tokens_SE, held, alike, 9 * alike, 9 * alike).rows_SX.tolist() == [[8, 0], [0, 0]]
    shared = routed(tokens_SE, held, alike, 0 * alike, 0 * alike)
    assert shared.rows_SX.tolist() == [[4, 4], [0, 0]]
    assert shared.seconds == pytest.approx(shared.bound_s)
