"""Rounds of moves into buffers: no rank sends or receives two at once."""

import numpy as np
import pytest

from aurora.algorithms.control.move_rounds import buffered_rounds

EMPTY = -1


def tables(seed, ranks=6, experts=18, slots=5):
    """Two tables of slots in which each expert is held, replicas in the rest."""
    rng = np.random.default_rng(seed)
    return [
        np.concatenate([rng.permutation(experts), rng.integers(0, experts, ranks * slots - experts)]).reshape(ranks, slots)
        for _ in range(2)
    ]


@pytest.mark.parametrize("seed", range(20))
def test_every_expert_comes_once_from_who_holds_it_in_the_fewest_rounds(seed):
    held_RP, wanted_RP = tables(seed)
    came = [set(held_P) for held_P in held_RP.tolist()]
    rounds = buffered_rounds(held_RP, wanted_RP)
    sent_R, received_R = np.zeros((2, len(held_RP)), dtype=int)
    for flows in rounds:
        senders, receivers, _ = zip(*flows, strict=True)
        assert len(set(senders)) == len(senders)
        assert len(set(receivers)) == len(receivers)
        for sender, receiver, experts in flows:
            assert set(experts) <= set(held_RP[sender].tolist())
            assert not came[receiver] & set(experts)
            came[receiver] |= set(experts)
            sent_R[sender] += len(experts)
            received_R[receiver] += len(experts)
    assert all(set(wanted_P) <= came_P for wanted_P, came_P in zip(wanted_RP.tolist(), came, strict=True))
    assert received_R.sum() == sum(len(set(w) - set(h)) for w, h in zip(wanted_RP.tolist(), held_RP.tolist(), strict=True))
    took = sum(max(len(experts) for *_, experts in flows) for flows in rounds)
    assert took == max(sent_R.max(), received_R.max())


def test_equal_tables_and_those_in_another_sequence_move_nothing():
    held_RP, _ = tables(0)
    assert buffered_rounds(held_RP, held_RP) == []
    assert buffered_rounds(held_RP, held_RP[:, ::-1]) == []


def test_empty_slots_and_experts_that_nobody_holds_are_left_out():
    held_RP, wanted_RP = np.array([[0, EMPTY], [1, EMPTY]]), np.array([[0, 1], [1, 7]])
    assert buffered_rounds(held_RP, wanted_RP) == [[(1, 0, (1,))]]
