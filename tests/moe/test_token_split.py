"""Tokens split over replicas: every token once, shares kept, ranks agree, own tokens first."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from aurora.moe.expert_map import LocalFirst
from tests.moe.reference_token_split import capacities, local_first


@st.composite
def batches(draw, max_ranks=5, most=40):
    """(tokens_SE, held_G, split_EG or None): every expert is held somewhere, perhaps twice by a rank."""
    ranks, experts = draw(st.integers(1, max_ranks)), draw(st.integers(1, 6))
    held_G = [draw(st.lists(st.integers(0, experts - 1), max_size=5)) for _ in range(ranks)]
    for expert in range(experts):
        if not any(expert in held for held in held_G):
            held_G[draw(st.integers(0, ranks - 1))].append(expert)
    split_EG = None
    if draw(st.booleans()):
        parts_EG = draw(arrays(np.int64, (experts, ranks), elements=st.integers(1, 9)))
        split_EG = parts_EG * [[expert in held for held in held_G] for expert in range(experts)]
        split_EG = split_EG / split_EG.sum(axis=1, keepdims=True)
    return draw(arrays(np.int64, (ranks, experts), elements=st.integers(0, most))), held_G, split_EG


@given(batches())
def test_every_token_goes_once_and_shares_are_kept_within_a_token(case):
    tokens_SE, held_G, split_EG = case
    rule_S = [LocalFirst(held_G, rank, split_EG) for rank in range(len(tokens_SE))]
    until_SEM = np.stack([rule(torch.from_numpy(tokens_SE)).numpy() for rule in rule_S])
    rows_SEM = np.diff(until_SEM, axis=2, prepend=0)
    assert rows_SEM.tolist() == local_first(tokens_SE, rule_S[0]).tolist()
    assert (rows_SEM.sum(axis=2) == tokens_SE).all()
    taken_EM, load_E = rows_SEM.sum(axis=0), tokens_SE.sum(axis=0)
    assert taken_EM.tolist() == capacities(load_E, rule_S[0]).tolist()  # the ranks, each computing apart, agree
    for (expert, replica), rank in np.ndenumerate(rule_S[0].rank_EM.numpy()):
        if expert not in held_G[rank]:
            assert taken_EM[expert, replica] == 0
            continue
        if split_EG is None:
            share = held_G[rank].count(expert) / sum(own.count(expert) for own in held_G)
        else:
            share = split_EG[expert, rank]
        assert abs(taken_EM[expert, replica] - share * load_E[expert]) < 1 + 1e-4
        assert rows_SEM[rank, expert, replica] == min(taken_EM[expert, replica], tokens_SE[rank, expert])  # own tokens first


def test_shares_of_equal_replicas_are_exact():
    """49 tokens on 49 replicas: one each, whatever floats make of 49 * (1 / 49)."""
    for split_EG in (None, np.full((1, 49), 1 / 49)):
        assert capacities(np.array([49]), LocalFirst(((0,),) * 49, 0, split_EG)).tolist() == [[1] * 49]


def test_single_tokens_of_different_experts_go_to_different_ranks():
    rule = LocalFirst(((0, 1, 2, 3),) * 4, 0)
    taken_EM = capacities(np.ones(4, dtype=np.int64), rule)
    assert sorted(rule.rank_EM.numpy()[taken_EM == 1].tolist()) == [0, 1, 2, 3]
