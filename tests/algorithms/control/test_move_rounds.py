"""Rounds of moves, replayed slot by slot, and into buffers: no rank sends or receives two at once."""

from itertools import groupby

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aurora.algorithms.control.move_rounds import buffered_rounds, move_sequence

EMPTY = -1


@st.composite
def pairs_of_placements(draw):
    """Two tables of slots (L, G, P) that hold all experts, none twice on a GPU; some slots are empty."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    layers, gpus, slots = draw(st.integers(1, 3)), draw(st.integers(1, 6)), draw(st.integers(1, 4))
    experts = draw(st.integers(1, gpus * slots))

    def table():
        held_LGP = np.full((layers, gpus, slots), EMPTY)
        for layer in held_LGP:
            places = rng.permutation(gpus * slots)
            layer.reshape(-1)[places[:experts]] = np.arange(experts)
            for place in places[experts:]:
                other = rng.integers(-1, experts)
                if other not in layer[place // slots]:
                    layer.reshape(-1)[place] = other
        return held_LGP

    return table(), table(), experts


def spread(held_GP, of_G, experts):
    """(E,) on how many GPUs or nodes each expert is; of_G (G,) are their numbers."""
    return np.array([len({of for of, held in zip(of_G, held_GP, strict=True) if e in held}) for e in range(experts)])


@given(pairs_of_placements(), st.integers(2, 3), st.integers(1, 3))
def test_no_round_takes_min_replicas_from_an_expert(pair, min_replicas, of_a_node):
    held_LGP, wanted_LGP, experts = pair
    node_G = np.arange(held_LGP.shape[1]) // of_a_node
    moves, reached_LGP = move_sequence(held_LGP, wanted_LGP, min_replicas, node_G)
    free_LGP, now_LGP = move_sequence(held_LGP, wanted_LGP)[1], held_LGP.copy()
    for _, group in groupby(moves, key=lambda move: move.round):
        for move in group:
            now_LGP[move.layer, move.dst, move.slot] = move.expert
        for now_GP, held_GP, wanted_GP in zip(now_LGP, held_LGP, wanted_LGP, strict=True):
            for of_G in (range(len(node_G)), node_G):
                now_E, was_E, will_E = (spread(each, of_G, experts) for each in (now_GP, held_GP, wanted_GP))
                assert (now_E >= np.minimum(min_replicas, np.minimum(was_E, will_E))).all()
    for reached_GP, free_GP, held_GP in zip(reached_LGP, free_LGP, held_LGP, strict=True):
        reached, free, held = ([sorted(set(row) - {EMPTY}) for row in each.tolist()] for each in (reached_GP, free_GP, held_GP))
        assert reached in (free, held)  # a layer changes as wanted, or not at all


def test_a_layer_whose_moves_would_take_min_replicas_stays_and_others_move():
    held_LGP, wanted_LGP = np.array([[[0], [0], [1], [1]]] * 2), np.array([[[1], [1], [0], [0]], [[0], [1], [0], [1]]])
    moves, reached_LGP = move_sequence(held_LGP, wanted_LGP, 2, np.array([0, 1, 1, 0]))
    assert {move.layer for move in moves} == {1}
    assert reached_LGP.tolist() == [held_LGP[0].tolist(), wanted_LGP[1].tolist()]
    other_nodes = np.array([0, 1, 0, 1])
    assert {move.layer for move in move_sequence(held_LGP, wanted_LGP, 2, other_nodes)[0]} == {0, 1}


@given(pairs_of_placements())
def test_every_round_is_a_matching_and_leaves_a_placement(pair):
    held_LGP, wanted_LGP, experts = pair
    moves, reached_LGP = move_sequence(held_LGP, wanted_LGP)
    now_LGP = held_LGP.copy()
    for _, group in groupby(moves, key=lambda move: move.round):
        made = list(group)
        assert len({move.src for move in made}) == len({move.dst for move in made}) == len(made)
        assert all(move.expert in now_LGP[move.layer, move.src] for move in made)  # before the round ends
        for move in made:
            now_LGP[move.layer, move.dst, move.slot] = move.expert
        for layer in now_LGP:
            assert set(layer.ravel().tolist()) - {EMPTY} == set(range(experts))
    assert (reached_LGP[(held_LGP == EMPTY) & (wanted_LGP == EMPTY)] == EMPTY).all()
    for l, g in np.ndindex(held_LGP.shape[:2]):
        wanted = set(wanted_LGP[l, g].tolist()) - {EMPTY}
        assert sorted(e for e in reached_LGP[l, g].tolist() if e != EMPTY) == sorted(wanted)
        assert wanted <= set(now_LGP[l, g].tolist())
        for p, e in enumerate(held_LGP[l, g].tolist()):
            if e in wanted:
                assert reached_LGP[l, g, p] == e  # what stays keeps its slot
    travelling = sum(len(set(w) - set(h) - {EMPTY}) for h, w in zip(held_LGP.reshape(-1, held_LGP.shape[2]).tolist(),
                                                                    wanted_LGP.reshape(-1, held_LGP.shape[2]).tolist(), strict=True))  # fmt: skip
    assert len(moves) == travelling


def test_gpus_in_a_circle_move_in_one_round():
    moves, reached_LGP = move_sequence(np.array([[[0], [1], [2]]]), np.array([[[2], [0], [1]]]))
    assert {move.round for move in moves} == {0}
    assert reached_LGP.tolist() == [[[2], [0], [1]]]


def test_circles_of_other_gpus_share_a_round():
    held_LGP = np.array([[[0], [1], [2], [3]]] * 2)
    moves, _ = move_sequence(held_LGP, np.array([[[1], [0], [2], [3]], [[0], [1], [3], [2]]]))
    assert [(move.round, move.layer) for move in moves] == [(0, 0), (0, 0), (0, 1), (0, 1)]


def test_an_expert_that_a_gpu_holds_twice_leaves_a_slot_for_another():
    moves, reached_LGP = move_sequence(np.array([[[0, 0], [1, 2]]]), np.array([[[0, 1], [0, 2]]]))
    assert [(move.expert, move.src, move.dst) for move in moves] == [(1, 1, 0), (0, 0, 1)]
    assert reached_LGP.tolist() == [[[0, 1], [0, 2]]]


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
