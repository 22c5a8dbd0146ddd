"""Single experts moved and swapped: never worse, near brute force, and priced by Eq. 1 as everything else is."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aurora.planner.placement import objective
from aurora.planner.placement.cost_model import aimed_costs, group_costs, layer_costs
from aurora.planner.placement.swap_search import swap_search
from aurora.types import PHASES, Cluster, Curve, Gpu, Profile
from tests.strategies import clusters, profiles


@st.composite
def layers(draw, max_gpus=3):
    """(cluster, profile, gpu_E, slots_G) of one layer."""
    n = draw(st.integers(1, max_gpus))
    cluster, profile = draw(clusters(n)), draw(profiles(n, max_experts=5, max_layers=1))
    gpu_E = np.array(draw(st.lists(st.integers(0, n - 1), min_size=profile.experts, max_size=profile.experts)), dtype=np.int64)
    spare = np.array(draw(st.lists(st.integers(0, 2), min_size=n, max_size=n)))
    return cluster, profile, gpu_E, np.bincount(gpu_E, minlength=n) + spare


def by_window(cluster, profile, worst):
    return replace(aimed_costs(cluster, profile, (), 0, "mean"), worst=worst)


@given(layers())
def test_the_price_of_one_scenario_is_equation_1(case):
    cluster, profile, gpu_E, _ = case
    whole = layer_costs(cluster, profile, 0)
    costs = group_costs(cluster, profile, 0, gpu_E)
    expected = objective.exclusive(costs.phase_times(np.arange(len(cluster))))
    assert whole.value_s(np.eye(len(cluster))[gpu_E]) == pytest.approx(expected)


@given(layers(), st.integers(0, 3))
def test_swap_search_is_never_worse_and_fits_the_slots(case, seed):
    cluster, profile, gpu_E, slots_G = case
    for worst in {1, profile.windows}:
        costs = by_window(cluster, profile, worst)
        found = swap_search(costs, gpu_E, slots_G, np.random.default_rng(seed))
        assert (np.bincount(found, minlength=len(cluster)) <= slots_G).all()
        before_s, after_s = (costs.value_s(np.eye(len(cluster))[each]) for each in (gpu_E, found))
        assert after_s <= before_s * (1 + 1e-9)
        again = swap_search(costs, gpu_E, slots_G, np.random.default_rng(seed))
        assert found.tolist() == again.tolist()


def drawn(rng):
    """Three mixed GPUs and a profile of five experts, two windows."""
    rates, speeds = rng.choice([1e3, 2e3, 5e3], 3), rng.choice([1.0, 0.5], 3)
    gpus = (Gpu(f"g{i}", f"k{i}", 0, rate, rate, 10**9, s) for i, (rate, s) in enumerate(zip(rates, speeds, strict=True)))
    line = Curve(np.array([1.0, 101.0]), np.array([1e-3, 0.1]))
    curves = {"reference": dict.fromkeys(PHASES, line)}
    return Cluster("drawn", tuple(gpus)), Profile("m", "", rng.integers(0, 99, (2, 1, 3, 5)), 1, 4, 4, 1, 1, curves)


def test_refining_against_every_placement():
    """Thirty drawn layers of five experts on three mixed GPUs, two scenarios: what brute force finds, or within 5 %."""
    rng = np.random.default_rng(0)
    ratios = []
    for _ in range(30):
        cluster, profile = drawn(rng)
        costs = by_window(cluster, profile, 2)
        slots_G = np.array([3, 2, 2])
        start = np.array([0, 0, 1, 1, 2])
        best = min(
            costs.value_s(np.eye(3)[list(gpus)])
            for gpus in product(range(3), repeat=5)
            if (np.bincount(gpus, minlength=3) <= slots_G).all()
        )
        ratios.append(costs.value_s(np.eye(3)[swap_search(costs, start, slots_G, rng)]) / best)
    assert min(ratios) >= 1 - 1e-9
    assert max(ratios) <= 1.05
    assert np.mean(ratios) <= 1.005
