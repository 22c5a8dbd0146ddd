"""One model's groups onto GPUs: Eq. 1's optimum against brute force."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from aurora.algorithms.placement.assignment import ASSIGN, bottleneck_matching, bottleneck_sum_matching
from aurora.algorithms.placement.cost_model import layer_costs
from aurora.algorithms.placement.phase_times import exclusive_s
from aurora.planner.plan import make_plan
from aurora.types import PlanOptions
from tests.conftest import cluster
from tests.planner.test_plan import profile
from tests.strategies import clusters, profiles

MATRICES = st.integers(1, 5).flatmap(lambda n: arrays(np.float64, (2, n, n), elements=st.integers(0, 12).map(float)))


def used(matrices, group_G):
    return sum(matrix[np.arange(len(group_G)), list(group_G)].max() for matrix in matrices)


@given(MATRICES)
def test_no_permutation_has_a_smaller_sum_of_bottlenecks_or_a_smaller_bottleneck(matrices):
    for found, of in ((bottleneck_sum_matching(*matrices), matrices), (bottleneck_matching(matrices[0]), matrices[:1])):
        assert sorted(found) == list(range(len(found)))
        assert used(of, found) == min(used(of, p) for p in permutations(range(len(found))))


def test_the_first_threshold_rises_where_the_second_pays_for_it():
    """The identity is best for the first matrix (1 against 3) and loses 9 by the second."""
    first, second = np.array([[1.0, 3], [3, 1]]), np.array([[9.0, 0], [0, 9]])
    assert bottleneck_sum_matching(first, second).tolist() == [1, 0]


@pytest.mark.full
@given(st.integers(1, 4).flatmap(lambda n: st.tuples(clusters(n), profiles(n, max_layers=2))))
def test_exact_is_the_optimum_of_the_plans_own_objective(case):
    machines, source = case
    n = len(machines)
    plan = make_plan(machines, [source], PlanOptions(assign="exact", aim="own"))
    best = 0.0
    for layer in range(source.layers):
        costs = layer_costs(machines, source, layer).grouped(plan.models[0].placement.gpu_E(layer))
        best += min(exclusive_s(costs.times_alone(np.array(p))) for p in permutations(range(n)))
    assert plan.objective_s == pytest.approx(best, rel=1e-12)
    assert plan.assignment_bound_s == pytest.approx(plan.objective_s, rel=1e-12)
    for name in ASSIGN:
        assert make_plan(machines, [source], PlanOptions(assign=name, aim="own")).objective_s >= plan.assignment_bound_s * (
            1 - 1e-12
        )


def test_an_expert_spares_the_tokens_that_start_where_it_sits():
    """Two equal GPUs, no compute: expert 0 is asked for by rank 1 only, expert 1 by rank 0 only, so they swap."""
    plan = make_plan(cluster(1.0, 1.0), [profile([[[[0, 5], [5, 0]]]])])
    assert plan.options.assign == "exact"
    assert plan.models[0].placement.slots_LG[0] == ((1,), (0,))
    assert plan.objective_s == 0
