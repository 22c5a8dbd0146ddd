"""Sequences of moves, replayed slot by slot."""

from itertools import groupby

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from aurora.planner.control.move_sequence import move_sequence

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
