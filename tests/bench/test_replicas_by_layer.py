"""Replicas by layer: as many as allowed, where they help, by the windows that judge them."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parents[2] / "bench"))

from replicas_by_layer import balanced_by_layer, replicas_by_layer

sys.path.pop()  # that folder has a vllm.py, which is not vLLM

from aurora.advisor.balancers import BalancingCase
from aurora.advisor.ceiling import TOKENS, ServedTraffic
from tests.advisor.test_ceiling import SKEWED, profile


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
