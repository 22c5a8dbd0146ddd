"""Bounds on all placements: never above the best placement, replicas and every token split included, and near it."""

from dataclasses import replace
from itertools import combinations, product
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from aurora.algorithms.placement import placement_bounds
from aurora.algorithms.placement.cost_model import AIMS, aimed_costs
from aurora.algorithms.placement.linear_program import phase_program
from aurora.algorithms.placement.placement_bounds import layer_bound_s
from aurora.planner.plan import make_plan
from aurora.types import PHASES, Curve, PlanOptions, Profile, Servers
from tests.conftest import cluster
from tests.strategies import clusters, profiles

WORK, NOTHING = Curve(np.array([1.0, 1001.0]), np.array([1.0, 1001.0])), Curve(np.array([1.0]), np.array([0.0]))
CURVES = {"reference": {phase: WORK if phase == "expert" else NOTHING for phase in PHASES}}


def cases(gpus):
    return st.tuples(clusters(gpus), profiles(gpus, max_experts=4, max_layers=1))


def held_sets(experts, slots_G):
    """The (E, G) 0/1 matrices of which GPU holds which expert, within the slots, but for those that one more replica fits in.

    A split over fewer replicas is one over more, so the best of the others is the best of all.
    """
    gpus = len(slots_G)
    sets = [own for size in range(1, gpus + 1) for own in combinations(range(gpus), size)]
    for chosen in product(sets, repeat=experts):
        held_EG = np.array([[gpu in own for gpu in range(gpus)] for own in chosen])
        left_G = slots_G - held_EG.sum(axis=0)
        if (left_G >= 0).all() and not (~held_EG & (left_G > 0)).any():
            yield held_EG


def best_split_s(costs, held_EG):
    """The least seconds of one scenario over all token splits over these replicas, straight from Eq. 1."""
    experts, gpus = held_EG.shape
    edges = np.argwhere(held_EG)
    zero_s = costs.phase_times(np.zeros((experts, gpus)))

    def sums(times):
        first = times.gate_G + times.port_4G[0], times.gate_G + times.port_4G[1]
        second = times.expert_G + times.port_4G[2], times.expert_G + times.port_4G[3]
        return np.array([*first, *second])  # (4, G)

    base_XG, columns = sums(zero_s), []
    for expert, gpu in edges:
        split_EG = np.zeros((experts, gpus))
        split_EG[expert, gpu] = 1
        columns.append((sums(costs.phase_times(split_EG)) - base_XG).ravel())
    phase_X2 = -np.repeat(np.eye(2), 2 * gpus, axis=0)
    found = linprog(
        [0.0] * len(edges) + [1.0, 1.0],
        np.hstack([np.array(columns).T, phase_X2]),
        -base_XG.ravel(),
        np.hstack([(edges[:, :1] == np.arange(experts)).T.astype(float), np.zeros((experts, 2))]),
        np.ones(experts),
    )
    return found.fun + costs.aggregate_s_WG.max()


@given(st.integers(1, 3).flatmap(cases), st.integers(0, 2))
@settings(max_examples=60, deadline=None)
def test_no_replicas_and_no_split_beat_the_bound(case, spare):
    machines, source = case
    slots_G = np.full(len(machines), min(source.experts, -(-source.experts // len(machines)) + spare))
    costs = aimed_costs(machines, source, (), 0, "sum")
    best_s = min(best_split_s(costs, held_EG) for held_EG in held_sets(source.experts, slots_G))
    for small in (placement_bounds.SMALL, 0):
        with mock.patch.object(placement_bounds, "SMALL", small):
            assert layer_bound_s(costs, slots_G) <= best_s * (1 + 1e-6) + 1e-7  # what the solver leaves open


@given(st.integers(2, 3).flatmap(cases))
@settings(max_examples=30, deadline=None)
def test_the_bound_is_reached_where_every_gpu_may_hold_every_expert(case):
    machines, source = case
    costs, slots_G = aimed_costs(machines, source, (), 0, "sum"), np.full(len(machines), source.experts)
    best_s = best_split_s(costs, np.ones((source.experts, len(machines)), dtype=bool))
    assert layer_bound_s(costs, slots_G) == pytest.approx(best_s, rel=1e-6, abs=1e-7)


@given(st.integers(2, 3).flatmap(cases), st.sampled_from(sorted(AIMS)), st.booleans(), st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_no_split_beats_the_bound_over_scenarios(case, aim, small, seed):
    machines, source = case
    costs, slots_G = aimed_costs(machines, source, (), 0, aim), np.full(len(machines), source.experts)
    with mock.patch.object(placement_bounds, "SMALL", placement_bounds.SMALL if small else 0):
        bound_s = layer_bound_s(costs, slots_G)
    rng = np.random.default_rng(seed)
    for _ in range(20):
        split_EG = rng.dirichlet(np.full(len(machines), rng.choice([0.1, 1.0, 10.0])), source.experts)
        assert costs.value_s(split_EG) >= bound_s * (1 - 1e-9)


@given(st.integers(2, 3).flatmap(cases), st.sampled_from(sorted(AIMS)), st.integers(0, 10**6))
@settings(max_examples=30, deadline=None)
def test_any_prices_give_a_bound(case, aim, seed):
    """The proof does not rest on the solver: whatever the prices, the best split is not below."""
    machines, source = case
    costs, slots_G = aimed_costs(machines, source, (), 0, aim), np.full(len(machines), source.experts)
    layer = costs.phase_sums(slots_G)
    program = phase_program(layer, np.zeros((2, len(costs.own_WGE))), np.arange(len(machines)))
    price_R = program.prices()
    rng = np.random.default_rng(seed)
    split_EG = rng.dirichlet(np.ones(len(machines)), source.experts)
    for scale in (0.0, 0.1, 1.0, 10.0):
        assert program.dual_s(rng.random(len(price_R)) * scale) <= costs.value_s(split_EG) * (1 + 1e-9)


def test_slots_that_are_few_are_counted():
    """Two hot experts and one spare slot: one of them stays on one GPU."""
    source = Profile("m", "", np.array([[[[50, 50, 1, 1, 1]] * 3]]), 1, 1, 0, 1, 0, CURVES)
    machines = cluster(1e12, 1e12, 1e12)
    costs = aimed_costs(machines, source, (), 0, "sum")
    assert layer_bound_s(costs, np.full(3, 5)) == pytest.approx(103)  # all work on three GPUs
    assert layer_bound_s(costs, np.full(3, 2)) == pytest.approx(150)  # six slots
    plan = make_plan(machines, [source], PlanOptions(slots_per_gpu=2))
    assert plan.bound_s == pytest.approx(150)


def test_the_nic_of_a_hot_experts_gpu_is_counted():
    """Four experts fill four slots: one GPU's NIC takes the 200 tokens of the other server."""
    source = Profile("m", "", np.array([[[[100, 1, 1, 1]] * 4]]), 1, 1, 0, 1, 0, CURVES)
    ports = [1e12] * 4
    machines = replace(cluster(*ports), servers=Servers.of([0, 0, 1, 1], 1.0))
    costs = aimed_costs(machines, source, (), 0, "sum")
    assert layer_bound_s(costs, np.ones(4, dtype=np.int64)) == pytest.approx(200 + 400)
    assert costs.value_s(np.eye(4)) == pytest.approx(200 + 400)
    assert layer_bound_s(costs, np.full(4, 4)) < 400


def test_a_hot_expert_has_company_where_slots_are_full():
    source = Profile("m", "", np.array([[[[90, 2, 1, 1]] * 2]]), 1, 1, 0, 1, 0, CURVES)
    costs = aimed_costs(cluster(1e12, 1e12), source, (), 0, "sum")
    assert layer_bound_s(costs, np.full(2, 2)) == pytest.approx(2 * 91)


def test_a_slow_port_that_must_send_is_in_the_bound():
    """GPU 1 holds few experts, so that it sends nearly all tokens of its rank whatever is placed there."""
    tokens = np.full((1, 1, 2, 8), 10)
    curves = {"reference": dict.fromkeys(PHASES, NOTHING)}
    source = Profile("m", "", tokens, 1, 1, 1, 1, 0, curves)
    machines = cluster(100.0, 1.0)
    costs = aimed_costs(machines, source, (), 0, "sum")
    assert layer_bound_s(costs, np.array([8, 1])) == pytest.approx(2 * 70.0)  # dispatch and combine of seven experts' tokens
