"""Balancing of single batches, against linear programs, brute force and outputs of published code."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog

from aurora.algorithms.replicas.per_batch import fewest_active, spill, split_least_largest


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


@given(replicated_batches())
def test_active_experts_are_whole_on_one_gpu_and_nearly_as_few_as_can_be(batches):
    held_GP, load_DE = batches
    experts, gpus = load_DE.shape[1], len(held_GP)
    for load_E, tokens_GP in zip(load_DE, fewest_active(load_DE, held_GP), strict=True):
        assert by_expert(tokens_GP, held_GP, experts) == pytest.approx(load_E)
        active_G = (tokens_GP > 0).sum(axis=1)
        assert active_G.sum() == np.count_nonzero(load_E)
        choices = [np.flatnonzero((held_GP == expert).any(axis=1)) for expert in np.flatnonzero(load_E)]
        least = min(int(np.bincount(picked, minlength=gpus).max()) for picked in product(*choices)) if choices else 0
        assert least <= active_G.max() <= 2 * least


def test_replicas_are_chosen_by_active_experts_not_by_tokens():
    held_GP = np.array([[0, 1, 2], [2, 3, -1]])
    assert fewest_active(np.array([[5.0, 5.0, 4.0, 90.0]]), held_GP)[0].tolist() == [[5, 5, 0], [4, 90, 0]]


@pytest.mark.parametrize(
    ("factor", "least", "load_E", "tokens_G", "fetched"),
    [
        (1.1, 1, [0, 696, 245, 415, 211, 747, 1034, 93], [473, 473, 245, 415, 434, 473, 473, 455], 4),
        (1.0, 64, [1497, 216, 479, 142, 83], [485, 483, 483, 483, 483], 5),
        (1.0, 16, [0, 73, 2003, 40, 547, 692, 286, 20], [462, 457, 457, 457, 457, 457, 457, 457], 8),
        (1.1, 16, [555, 199, 112, 575, 156, 1026, 390], [473, 383, 473, 473, 348, 473, 390], 4),
        (1.3, 64, [0, 2, 0, 1, 0], [0, 2, 0, 1, 0], 0),
    ],
)
def test_spilled_loads_are_those_of_the_published_code(factor, least, load_E, tokens_G, fetched):
    """The outputs are those of `compute_llep_lpt_plan` in github.com/SalesforceAIResearch/LeastLoadedEP, an expert per GPU."""
    gpus = len(load_E)
    tokens_DG, _, fetched_D = spill(np.array([load_E], dtype=np.float64), np.arange(gpus), gpus, factor, 0.0, float(least), -1)
    assert (tokens_DG[0].tolist(), fetched_D[0]) == (tokens_G, fetched)


@given(st.lists(st.integers(0, 200), min_size=6, max_size=6), st.integers(0, 3))
def test_gpus_fetch_no_more_than_they_may_and_no_token_is_lost(load_E, most):
    load_DE, home_E = np.array([load_E], dtype=np.float64), np.arange(6) // 2
    tokens_DG, active_DG, fetched_D = spill(load_DE, home_E, 3, 1.0, 1.0, 1.0, most)
    assert tokens_DG.sum() == sum(load_E)
    assert fetched_D[0] <= 3 * most
    assert tokens_DG.max() <= max(np.bincount(home_E, load_E))
    assert active_DG.sum() <= np.count_nonzero(load_E) + fetched_D[0]


def test_batches_that_are_even_enough_stay_at_home():
    load_DE = np.array([[10.0, 12.0]])
    assert spill(load_DE, np.arange(2), 2, 1.0, 1.3, 1.0, -1)[0].tolist() == load_DE.tolist()
