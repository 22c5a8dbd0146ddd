"""Moving from one placement to another: the fewest bytes, every arrival sent once, the best layers within a budget."""

from itertools import permutations, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from aurora.algorithms.recovery import fewest_moves, holds, moved_bytes, worth_moving


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


@given(moves())
def test_every_arrival_is_sent_once_by_owners(case):
    old_GE, new_GE, bytes_E, _ = case
    moved_GG = moved_bytes(old_GE, new_GE, bytes_E)
    arrivals = (new_GE == 1) & (old_GE == 0)
    assert moved_GG.sum(axis=0).tolist() == (arrivals * bytes_E).sum(axis=1).tolist()
    assert not moved_GG.diagonal().any()
    for gpu in range(len(old_GE)):
        assert moved_GG[gpu].sum() <= (old_GE[gpu] * bytes_E * arrivals.sum(axis=0)).sum()


def test_a_swap_of_names_moves_nothing():
    old_GE, new_GE = holds([[0, 1], [2], []], 3), holds([[], [0, 1], [2]], 3)
    takers = fewest_moves(old_GE, new_GE, np.array([5, 5, 5]), np.zeros(3, dtype=np.int64))
    assert takers.tolist() == [2, 0, 1]


def test_owners_share_a_transfer():
    moved_GG = moved_bytes(holds([[0], [0], []], 1), holds([[0], [0], [0]], 1), np.array([7]))
    assert moved_GG[:, 2].tolist() == [4, 3, 0]


@given(
    st.lists(st.tuples(st.integers(-3, 9), st.integers(0, 9)), min_size=1, max_size=6),
    st.integers(0, 20),
)
def test_the_budget_goes_where_it_saves_most(layers, most):
    saved, size = (np.array(column) for column in zip(*layers, strict=True))
    chosen = worth_moving(saved.astype(float), size, most)
    assert size @ chosen <= most
    best = max(saved @ np.array(p) for p in product((0, 1), repeat=len(layers)) if size @ np.array(p) <= most)
    assert saved @ chosen == pytest.approx(best)


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
