"""Bounds on placements of several models: no placement and no token split beat them, and they see slow ports."""

from itertools import product
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aurora.algorithms.placement import placement_bounds as module
from aurora.algorithms.placement.cost_model import layer_costs
from aurora.algorithms.placement.objective import formula
from aurora.algorithms.placement.placement_bounds import colocated_bound_s
from aurora.planner.plan import make_plan
from aurora.types import Curve, Profile
from tests.conftest import cluster
from tests.strategies import clusters, profiles


def cases(gpus, models):
    each = profiles(gpus, max_experts=3, max_layers=1)
    return st.tuples(clusters(gpus), st.lists(each, min_size=models, max_size=models))


CASES = st.tuples(st.integers(1, 3), st.integers(2, 3)).flatmap(lambda drawn: cases(*drawn))


def bounds(of, costs_M, replicas):
    """The bound of one program for all GPUs, and that of GPUs of a kind as one."""
    for small in (module.SMALL, 0):
        with mock.patch.object(module, "SMALL", small):
            yield colocated_bound_s(of, costs_M, replicas)


@pytest.mark.full
@given(CASES, st.integers(0, 10**6), st.data())
@settings(max_examples=60, deadline=None)
def test_no_token_split_beats_the_bound(case, seed, data):
    machines, found = case
    of = formula(len(found))
    costs_M = [layer_costs(machines, source, 0) for source in found]
    bound_s = max(bounds(of, costs_M, True))
    rng = np.random.default_rng(seed)
    for _ in range(20):
        spread = rng.choice([0.1, 1.0, 10.0])
        splits = [rng.dirichlet(np.full(len(machines), spread), source.experts) for source in found]
        value_s = of.seconds([costs.phase_times(split_EG) for costs, split_EG in zip(costs_M, splits, strict=True)])
        assert bound_s <= value_s * (1 + 1e-9) + 1e-12


@given(st.tuples(st.integers(1, 2), st.integers(2, 3)).flatmap(lambda drawn: cases(*drawn)), st.data())
@settings(max_examples=40, deadline=None)
def test_no_placement_without_replicas_beats_the_bound(case, data):
    machines, found = case
    of = formula(len(found))
    costs_M = [layer_costs(machines, source, 0) for source in found]
    every = [
        [
            costs.phase_times(np.eye(len(machines))[list(gpu_E)])
            for gpu_E in product(range(len(machines)), repeat=source.experts)
        ]
        for costs, source in zip(costs_M, found, strict=True)
    ]
    best_s = min(of.seconds(times) for times in product(*every))
    assert max(bounds(of, costs_M, False)) <= best_s * (1 + 1e-9) + 1e-12


def test_the_bound_sees_what_slow_ports_must_send():
    """A slow GPU with a share x of the experts sends 320 (1 - x) tokens and receives 960 x: never less than 240 of one of them."""
    free = {"reference": dict.fromkeys(("gate", "expert", "aggregate"), Curve(np.array([1.0]), np.array([0.0])))}
    source = Profile("m", "", np.full((1, 1, 4, 16), 10), 1, 1, 1, 1, 0, free)
    machines = cluster(100.0, 100.0, 1.0, 1.0)
    plan = make_plan(machines, [source, source])
    assert plan.bound_s == pytest.approx(2 * 240)  # the dispatch of both models and the combine of both
    assert plan.gap == pytest.approx(0)
