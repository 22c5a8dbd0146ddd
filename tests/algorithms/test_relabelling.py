"""Relabelling GPUs so that the fewest bytes move from one placement to another."""

from itertools import permutations, product

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from aurora.algorithms.recovery import fewest_moves, holds


@st.composite
def moves(draw):
    """(old_GE, new_GE, bytes_E, alike_G), replicas included; every expert has an owner."""
    gpus, experts = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    old_GE, new_GE = (draw(arrays(np.int64, (gpus, experts), elements=st.integers(0, 1))) for _ in range(2))
    old_GE[draw(st.integers(0, gpus - 1))] = 1
    bytes_E = draw(arrays(np.int64, experts, elements=st.integers(0, 9)))
    return old_GE, new_GE, bytes_E, draw(arrays(np.int64, gpus, elements=st.integers(0, 1)))


@given(moves())
def test_no_other_labels_move_fewer_bytes(case):
    old_GE, new_GE, bytes_E, alike_G = case

    def arriving(takers):
        renamed = np.empty_like(new_GE)
        renamed[list(takers)] = new_GE
        return int(((renamed == 1) & (old_GE == 0)).astype(int).sum(axis=0) @ bytes_E)

    takers = fewest_moves(old_GE, new_GE, bytes_E, alike_G)
    allowed = [p for p in permutations(range(len(alike_G))) if (alike_G[list(p)] == alike_G).all()]
    assert tuple(takers) in allowed
    assert arriving(takers) == min(arriving(p) for p in allowed)


def test_a_swap_of_names_moves_nothing():
    old_GE, new_GE = holds([[0, 1], [2], []], 3), holds([[], [0, 1], [2]], 3)
    takers = fewest_moves(old_GE, new_GE, np.array([5, 5, 5]), np.zeros(3, dtype=np.int64))
    assert takers.tolist() == [2, 0, 1]


@given(moves(), st.data())
def test_nodes_as_a_whole_take_each_others_places(case, data):
    """Against every renaming that keeps GPUs of a node together."""
    old_GE, new_GE, bytes_E, _ = case
    gpus = len(old_GE)
    node_G = np.array(data.draw(st.lists(st.integers(0, 2), min_size=gpus, max_size=gpus)))
    takers = fewest_moves(old_GE, new_GE, bytes_E, np.zeros(gpus, dtype=np.int64), node_G)

    def together(p):
        return all((node_G[a] == node_G[b]) == (node_G[p[a]] == node_G[p[b]]) for a, b in product(range(gpus), repeat=2))

    def arriving(p):
        renamed = np.empty_like(new_GE)
        renamed[list(p)] = new_GE
        return int((renamed * (1 - old_GE)).sum(axis=0) @ bytes_E)

    allowed = [p for p in permutations(range(gpus)) if together(p)]
    assert tuple(takers) in allowed
    assert arriving(takers) == min(arriving(p) for p in allowed)
