"""Replicas by layer: as many as allowed, where they help, by the windows that judge them."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aurora.errors import InfeasiblePlan

sys.path.append(str(Path(__file__).parents[2] / "bench"))

from replicas_by_layer import _most_saved, balanced_by_layer, replicas_by_layer

sys.path.pop()  # that folder has a vllm.py, which is not vLLM

from aurora.advisor.balancers import BalancingCase
from aurora.advisor.ceiling import TOKENS, ServedTraffic
from tests.advisor.test_ceiling import SKEWED, profile


def largest(load_TE, held_GP, part_GP):
    load_TG = np.zeros((len(load_TE), len(held_GP)))
    for gpu, row in enumerate(held_GP.tolist()):
        for slot, expert in enumerate(row):
            if expert >= 0:
                load_TG[:, gpu] += load_TE[:, expert] * part_GP[gpu, slot]
    return load_TG.max(axis=1).sum()


@given(st.integers(1, 4), st.integers(0, 9), st.integers(1, 3), st.integers(1, 3))
def test_no_more_replicas_than_allowed_nor_slots_of_a_gpu(gpus, replicas, layers, windows):
    load_TLE = np.random.default_rng(gpus).gamma(1.0, size=(windows, layers, 5))
    tables = replicas_by_layer(load_TLE, gpus, replicas)
    assert sum(int((held_GP >= 0).sum()) for held_GP, _ in tables) <= 5 * layers + replicas
    for held_GP, part_GP in tables:
        assert set(held_GP[held_GP >= 0].tolist()) == set(range(5))
        assert np.bincount(held_GP[held_GP >= 0], part_GP[held_GP >= 0]) == pytest.approx(np.ones(5))
    held_G = sum((held_GP >= 0).sum(axis=1) for held_GP, _ in tables)
    assert held_G.max() <= -(-(5 * layers + replicas) // gpus) + layers  # slots stay empty where a replica would not help


def test_replicas_go_to_the_layer_that_needs_them():
    even, skewed = np.ones(8), np.array([9.0, 1, 1, 1, 1, 1, 1, 1])
    tables = replicas_by_layer(np.stack([even, skewed])[None], 4, 4)
    assert [int((held_GP >= 0).sum()) > 8 for held_GP, _ in tables] == [False, True]
    assert largest(skewed[None], *tables[1]) <= 4.5  # half of the hot expert; all of it is 9


def test_a_placement_is_chosen_by_the_largest_loads_of_windows_not_by_their_mean():
    together = np.array([[4.0, 4, 0, 0], [0, 0, 4, 4]] * 3)  # in the mean all experts are alike
    (table,) = replicas_by_layer(together[:, None], 2, 0)
    assert largest(together, *table) == min(
        largest(together, np.array(held), np.ones((2, 2))) for held in ([[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 3], [1, 2]])
    )


@given(st.lists(st.lists(st.integers(0, 20), min_size=4, max_size=4), min_size=1, max_size=3), st.integers(0, 9))
def test_steps_save_at_least_what_one_layer_alone_would(largest_LK, replicas):
    largest_LK = np.array(largest_LK, dtype=np.float64)
    at_L = _most_saved(largest_LK, np.arange(4), replicas)
    assert at_L.sum() <= replicas
    saved = largest_LK[:, 0].sum() - largest_LK[np.arange(len(at_L)), at_L].sum()
    alone = max((row[0] - row[: replicas + 1].min()) for row in largest_LK)
    assert saved >= alone / 2


@pytest.mark.parametrize(("gpus", "replicas", "found"), [(2, -1, "found -1"), (3, 4, "at most 2 GPUs, .* found 3")])
def test_numbers_that_cannot_be_are_refused(gpus, replicas, found):
    with pytest.raises(InfeasiblePlan, match=f"replicas by layer: expected .*{found}"):
        replicas_by_layer(np.ones((1, 1, 2)), gpus, replicas)


def test_as_a_method_it_does_not_know_the_windows_that_judge_it():
    rng = np.random.default_rng(0)
    walk_TE = np.exp(np.cumsum(rng.normal(0, 0.05, (20, 8)), axis=0)) * SKEWED
    traffic = ServedTraffic.of(profile(walk_TE, 4000, rng), 200, rng)
    other, last_T = traffic.load_TLE.copy(), traffic.block_T == traffic.block_T[-1]
    other[last_T] = other[last_T][:, :, ::-1]
    before, after = (
        balanced_by_layer(BalancingCase(each, 4, 3, TOKENS, 1000)) for each in (traffic, replace(traffic, load_TLE=other))
    )
    at_D = traffic.block_D == traffic.block_T[-1]
    assert (before.seconds_D[at_D] == after.seconds_D[at_D]).all()
    assert (before.seconds_D[~at_D] != after.seconds_D[~at_D]).any()
    assert 2 <= before.slots <= 3
