"""Balancing of single batches, against linear programs."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog

from aurora.algorithms.replicas.per_batch import split_least_largest


@st.composite
def replicated_batches(draw):
    """Slots (G, P) of a few GPUs that hold every expert, none twice on a GPU, and whole tokens (D, E)."""
    gpus, experts = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    holds_EG = np.array([draw(st.sets(st.integers(0, gpus - 1), min_size=1)) for _ in range(experts)])
    rows = [[expert for expert in range(experts) if gpu in holds_EG[expert]] for gpu in range(gpus)]
    width = max(map(len, rows))
    held_GP = np.array([row + [-1] * (width - len(row)) for row in rows])
    tokens = st.lists(st.integers(0, 50), min_size=experts, max_size=experts)
    return held_GP, np.array(draw(st.lists(tokens, min_size=1, max_size=3)), dtype=np.float64)


def by_expert(tokens_GP, held_GP, experts):
    """(E,): the tokens of each expert in all of its slots."""
    return np.bincount(held_GP[held_GP >= 0], tokens_GP[held_GP >= 0], experts)


@given(replicated_batches())
def test_the_split_is_that_of_the_linear_program(batches):
    held_GP, load_DE = batches
    experts = load_DE.shape[1]
    gpu_X, slot_X = np.nonzero(held_GP >= 0)
    expert_X = held_GP[gpu_X, slot_X]
    for load_E, tokens_GP in zip(load_DE, split_least_largest(load_DE, held_GP), strict=True):
        assert by_expert(tokens_GP, held_GP, experts) == pytest.approx(load_E)
        assert (tokens_GP >= -1e-9).all()
        above = np.hstack([np.arange(len(held_GP))[:, None] == gpu_X, -np.ones((len(held_GP), 1))])
        sums = np.hstack([np.arange(experts)[:, None] == expert_X, np.zeros((experts, 1))])
        cost = np.append(np.zeros(len(expert_X)), 1.0)
        solved = linprog(cost, above, np.zeros(len(held_GP)), sums, load_E, method="highs")
        assert tokens_GP.sum(axis=1).max() == pytest.approx(solved.fun, abs=1e-6)
