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


def test_a_swap_of_names_moves_nothing():
    old_GE, new_GE = holds([[0, 1], [2], []], 3), holds([[], [0, 1], [2]], 3)
    takers = fewest_moves(old_GE, new_GE, np.array([5, 5, 5]), np.zeros(3, dtype=np.int64))
    assert takers.tolist() == [2, 0, 1]


@given(moves(), st.booleans(), st.data())
def test_no_other_labels_move_fewer_bytes(case, on_nodes, data):
    """Against every renaming of GPUs that are alike; or of all, that keeps GPUs of a node together."""
    old_GE, new_GE, bytes_E, alike_G = case
    gpus, node_G = len(old_GE), None
    if on_nodes:
        node_G = np.array(data.draw(st.lists(st.integers(0, 2), min_size=gpus, max_size=gpus)))
        alike_G = np.zeros(gpus, dtype=np.int64)
    takers = fewest_moves(old_GE, new_GE, bytes_E, alike_G, node_G)

    def together(p):
        return all((node_G[a] == node_G[b]) == (node_G[p[a]] == node_G[p[b]]) for a, b in product(range(gpus), repeat=2))

    def arriving(p):
        renamed = np.empty_like(new_GE)
        renamed[list(p)] = new_GE
        return int((renamed * (1 - old_GE)).sum(axis=0) @ bytes_E)

    every = [p for p in permutations(range(gpus)) if (alike_G[list(p)] == alike_G).all()]
    allowed = [p for p in every if not on_nodes or together(p)]
    assert tuple(takers) in allowed
    assert arriving(takers) == min(arriving(p) for p in allowed)
