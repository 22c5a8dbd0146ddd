"""Tokens counted once a GPU: against sets, against every placement, and from the plan to the predicted bytes."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aurora.algorithms.check.plans import check_plan
from aurora.algorithms.placement.coactivation import (
    Costs,
    Tokens,
    coactivation_counts,
    coactivation_groups,
    coactivation_search,
    distinct_tokens,
)
from aurora.algorithms.placement.cost_model import layer_costs
from aurora.algorithms.placement.explain import explain
from aurora.algorithms.workload.synthetic import draw_profile
from aurora.algorithms.workload.traffic import deduplicated_tokens, layer_traffic
from aurora.errors import BadInput, InfeasiblePlan
from aurora.io import load_plan, save
from aurora.planner.evaluate import evaluate
from aurora.planner.migrate import migrate
from aurora.planner.plan import make_plan
from aurora.planner.scenarios.exclusive import Exclusive
from aurora.simulator.interpreter import simulate_plan
from aurora.types import TRACE_PHASES, Placement, PlanOptions, SyntheticOptions
from tests.conftest import cluster
from tests.strategies import clusters, profiles, routed_profiles

ONCE = PlanOptions(coactivation=True)
CONFIG = {"num_local_experts": 8, "num_hidden_layers": 2, "num_experts_per_tok": 2, "hidden_size": 64, "intermediate_size": 64}
CASES = st.integers(1, 3).flatmap(lambda n: st.tuples(clusters(n), routed_profiles(n)))


def by_sets(profile, layer, gpu_E, gpus):
    """Tokens between GPUs, from the set of GPUs that each token visits."""
    tokens_GG = np.zeros((gpus, gpus), dtype=int)
    experts_UK, source_U = profile.routing.layer(layer)
    for chosen, source in zip(experts_UK.tolist(), source_U, strict=True):
        for gpu in {int(gpu_E[expert]) for expert in chosen}:
            tokens_GG[source, gpu] += 1
    return tokens_GG


def by_hand(machines, profile, layer, gpu_E):
    """Eq. 1 of one layer from the ports' bytes."""
    gpus = machines.gpus
    tokens_GG = by_sets(profile, layer, gpu_E, len(gpus))
    np.fill_diagonal(tokens_GG, 0)
    there, back = profile.row_bytes(True), profile.combine_bytes
    first, second, last = [], [], []
    for g, gpu in enumerate(gpus):
        sent, came = tokens_GG[g].sum(), tokens_GG[:, g].sum()
        own_T = profile.tokens_TLSE[:, layer, g].sum(axis=1) // profile.top_k
        load_TE = profile.tokens_TLSE[:, layer].sum(axis=1)[:, np.array(gpu_E) == g]
        first.append(profile.seconds("gate", gpu, own_T).sum() + max(sent * there / gpu.out_Bps, came * there / gpu.in_Bps))
        second.append(profile.seconds("expert", gpu, load_TE).sum() + max(came * back / gpu.out_Bps, sent * back / gpu.in_Bps))
        last.append(profile.seconds("aggregate", gpu, own_T).sum())
    return max(first) + max(second) + max(last)


@given(CASES, st.randoms())
def test_a_token_counts_once_for_each_gpu_that_it_visits(case, random):
    machines, profile = case
    n = len(machines)
    gpu_E = np.array([random.randrange(n) for _ in range(profile.experts)])
    found = deduplicated_tokens(*profile.routing.layer(0), gpu_E, n)
    assert found.tolist() == by_sets(profile, 0, gpu_E, n).tolist()
    every = layer_traffic(profile, 0, np.eye(n)[gpu_E])
    deduplicated = layer_traffic(profile, 0, np.eye(n)[gpu_E], deduplicated=True)
    assert (deduplicated <= every).all()
    assert (deduplicated * profile.top_k >= every).all()
    assert profile.top_k > 1 or np.array_equal(deduplicated, every)


@given(CASES)
def test_tokens_alike_are_one_and_pairs_are_counted(case):
    _, profile = case
    experts_UK, source_U = profile.routing.layer(0)
    n = profile.sources
    experts_VK, source_V, count_V = distinct_tokens(experts_UK, source_U)
    rows = sorted((int(s), *sorted(row)) for s, row in zip(source_U, experts_UK.tolist(), strict=True))
    again = sorted(
        (int(s), *row) for s, row, many in zip(source_V, experts_VK.tolist(), count_V, strict=True) for _ in range(many)
    )
    assert rows == again
    counts_SEE = coactivation_counts(experts_VK, source_V, count_V, profile.experts, n)
    for s, a, b in product(range(n), range(profile.experts), range(profile.experts)):
        assert counts_SEE[s, a, b] == sum({a, b} <= set(row) for row in experts_UK[source_U == s].tolist())


@given(CASES, st.data())
def test_groups_fit_the_slots(case, data):
    machines, profile = case
    n = len(machines)
    slots_G = np.array(data.draw(st.lists(st.integers(0, 4), min_size=n, max_size=n)))
    slots_G[0] += max(0, profile.experts - slots_G.sum())
    counts_SEE = coactivation_counts(*distinct_tokens(*profile.routing.layer(0)), profile.experts, n)
    gpu_E = coactivation_groups(counts_SEE.sum(axis=0), slots_G)
    assert (gpu_E >= 0).all()
    assert (np.bincount(gpu_E, minlength=n) <= slots_G).all()


def test_clusters_find_pairs():
    counts_SEE = np.array([[9, 0, 8, 0], [0, 9, 0, 7], [8, 0, 9, 0], [0, 7, 0, 9]])
    assert coactivation_groups(counts_SEE, np.array([2, 2])).tolist() == [0, 1, 0, 1]


def search(machines, profile, gpu_E, slots_G, seed=0):
    costs = layer_costs(machines, profile, 0, deduplicated=True).grouped(gpu_E)
    tokens = Tokens.of(*distinct_tokens(*profile.routing.layer(0)), profile.experts)
    expert_s_GE = np.array(layer_costs(machines, profile, 0).expert_s_WGE[0], order="C")
    searched = Costs(expert_s_GE, costs.gate_s_G, costs.port_s_XG, slots_G)
    return coactivation_search(tokens, searched, gpu_E, np.random.default_rng(seed), kicks=8)


@given(CASES, st.data())
def test_the_search_is_never_worse_and_fits_the_slots(case, data):
    machines, profile = case
    n = len(machines)
    gpu_E = np.array(data.draw(st.lists(st.integers(0, n - 1), min_size=profile.experts, max_size=profile.experts)))
    slots_G = np.bincount(gpu_E, minlength=n) + np.array(data.draw(st.lists(st.integers(0, 2), min_size=n, max_size=n)))
    found = search(machines, profile, gpu_E, slots_G)
    assert (np.bincount(found, minlength=n) <= slots_G).all()
    assert by_hand(machines, profile, 0, found) <= by_hand(machines, profile, 0, gpu_E) * (1 + 1e-9)
    assert found.tolist() == search(machines, profile, gpu_E, slots_G).tolist()


@pytest.mark.full
@given(CASES)
def test_plans_are_priced_by_hand_and_never_longer_than_refined_ones_counted_once(case):
    machines, profile = case
    plan, refined = (
        make_plan(machines, [profile], ONCE),
        make_plan(machines, [profile], PlanOptions(place="swap-search", aim="own")),
    )
    check_plan(plan)
    near, start = near_and_start(machines, profile)
    seconds, longer = (
        sum(by_hand(machines, profile, layer, each.placements_M[0].gpu_E(layer)) for layer in range(profile.layers))
        for each in (near, start)
    )
    assert near.objective_s == pytest.approx(seconds)
    assert near.bound_s <= near.assignment_bound_s <= near.objective_s
    assert seconds <= longer * (1 + 1e-9)
    assert plan.objective_s == min(refined.objective_s, near.objective_s)
    assert plan.models[0].deduplicated == (near.objective_s < refined.objective_s)
    assert ("coactivation" in plan.strategies) == plan.models[0].deduplicated
    assert make_plan(machines, [profile], ONCE).models[0].placement == plan.models[0].placement


def near_and_start(machines, profile, slots=None):
    options, rng = PlanOptions("swap-search", "exact", slots_per_gpu=slots, aim="own"), np.random.default_rng(0)
    scenario = Exclusive(machines, [profile], options)
    start = scenario.place(rng)
    return scenario.place_deduplicated(start.placements_M[0], rng), start


@pytest.mark.full
@given(
    st.integers(2, 3).flatmap(lambda n: st.tuples(clusters(n), routed_profiles(n, max_experts=5, max_layers=1))),
    st.integers(1, 5),
)
def test_no_placement_is_below_the_bound(case, slots):
    machines, profile = case
    slots = min(max(slots, -(-profile.experts // len(machines))), profile.experts)
    near, _ = near_and_start(machines, profile, slots)
    best = min(
        by_hand(machines, profile, 0, gpu_E)
        for gpu_E in product(range(len(machines)), repeat=profile.experts)
        if np.bincount(gpu_E).max() <= slots
    )
    assert near.bound_s <= best * (1 + 1e-9)
    assert best <= near.objective_s * (1 + 1e-9)
    assert max(map(len, near.placements_M[0].slots_LG[0])) <= slots


def invented(seed=0, sources=2, tokens=200, correlation=0.8, **changes):
    options = SyntheticOptions(sources, tokens, 2, seed, True, correlation)
    return draw_profile("zipf:0.5", CONFIG | changes, options)


@pytest.mark.full
def test_near_the_best_of_every_placement():
    """Twelve layers of seven experts, top-3, on three mixed GPUs: the optimum or within 5 %."""
    ratios = []
    for seed in range(12):
        profile = invented(seed, 3, 60, num_local_experts=7, num_hidden_layers=1, num_experts_per_tok=3)
        machines = cluster(2e6, 1e6, 5e5)
        near, _ = near_and_start(machines, profile, 3)
        costs = {}
        for gpu_E in product(range(3), repeat=7):
            if np.bincount(gpu_E, minlength=3).max() <= 3:
                priced = layer_costs(machines, profile, 0, deduplicated=True).grouped(np.array(gpu_E))
                terms = priced.phase_times(np.arange(3))
                costs[gpu_E] = (
                    (terms.gate_G + terms.dispatch_G).max() + (terms.expert_G + terms.combine_G).max() + terms.aggregate_G.max()
                )
        ratios.append(near.objective_s / min(costs.values()))
    assert min(ratios) >= 1 - 1e-9
    assert max(ratios) <= 1.05
    assert np.mean(ratios) <= 1.01


def test_pairs_of_experts_come_to_sit_together():
    profile = invented(correlation=1.0, tokens=400)
    machines = cluster(1e6, 1e6)
    plan, refined = (
        make_plan(machines, [profile], replace(o, slots_per_gpu=4)) for o in (ONCE, PlanOptions(place="swap-search", aim="own"))
    )
    for layer in range(profile.layers):
        there = [
            layer_traffic(profile, layer, each.models[0].placement.split_EG(layer), deduplicated=True).sum()
            for each in (plan, refined)
        ]
        assert there[0] < 0.9 * there[1]


def test_the_simulator_sends_a_token_once_in_every_window(tmp_path):
    profile = invented()
    machines = cluster(1e6, 2e6)
    save(make_plan(machines, [profile], ONCE), tmp_path / "plan.json")
    plan = load_plan(tmp_path / "plan.json")
    assert plan.models[0].deduplicated
    trace = simulate_plan(plan, [profile])
    for phase, size in (("dispatch", profile.row_bytes(True)), ("combine", profile.combine_bytes)):
        for window, layer in product(range(profile.windows), range(profile.layers)):
            keep = (
                (trace.phase_X == TRACE_PHASES.index(phase))
                & (trace.step_X == window)
                & (trace.layer_X == layer)
                & trace.sent_X
            )
            experts_UK, _ = profile.routing.layer(layer, window)
            gpu_UK = plan.models[0].placement.gpu_E(layer)[experts_UK]
            source_U = profile.routing.layer(layer, window)[1]
            visits = sum(len(set(row) - {int(source)}) for row, source in zip(gpu_UK.tolist(), source_U, strict=True))
            assert trace.bytes_X[keep].sum() == visits * size


def test_other_traffic_and_the_plan_in_force_are_counted_once_too():
    machines, profile, later = cluster(1e6, 2e6), invented(), invented(1)
    plan = make_plan(machines, [profile], ONCE)
    same = evaluate(plan, [profile])
    assert same.served_s_L.sum() == pytest.approx(plan.objective_s)
    assert same.slowdown == pytest.approx(0)
    assert same.dispatch_s_ML[0] == pytest.approx(plan.models[0].dispatch_s_L)
    assert evaluate(plan, [later]).replanned.models[0].deduplicated
    assert sum(layer.value_s for layer in explain(plan, [profile])) == pytest.approx(plan.objective_s)
    again = make_plan(machines, [later], ONCE)
    moved, done = migrate(again, plan, [later])
    assert moved.models[0].deduplicated
    assert done.moved_s <= min(done.kept_s, again.objective_s) * (1 + 1e-9)
    everywhere = Placement(((tuple(range(8)),) * 2,) * 2, (((0.5,) * 8,) * 2,) * 2)
    with pytest.raises(BadInput, match=r"expected every expert held once where flat all-to-alls .*, found replicas"):
        replace(plan.models[0], placement=everywhere)
    in_force = replace(plan, models=(replace(plan.models[0], placement=everywhere, deduplicated=False),))
    with pytest.raises(BadInput, match="expected a placement without replicas, found replicas"):
        migrate(again, in_force, [later])


def test_counts_alone_do_not_price_a_plan_that_counts_once():
    machines, profile = cluster(1e6, 2e6), invented()
    plan, counted = make_plan(machines, [profile], ONCE), replace(profile, routing=None)
    for price in (lambda: evaluate(plan, [counted]), lambda: simulate_plan(plan, [counted])):
        with pytest.raises(BadInput, match="expected token-level routing, found counts alone; `aurora profile --tokens`"):
            price()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"place": "balanced"}, "`coactivation`: expected no `place` balanced"),
        ({"assign": "matching"}, "`coactivation`: expected no `assign` matching"),
        ({"aim": "worst"}, "`coactivation`: expected no `aim` worst"),
    ],
)
def test_what_affinity_does_not_go_with(options, message):
    profile = invented()
    with pytest.raises(BadInput, match=message):
        make_plan(cluster(1e6, 2e6), [profile], replace(ONCE, **options))


def test_affinity_wants_one_model_alone_with_its_choices():
    machines, profile = cluster(1e6, 2e6), invented()
    with pytest.raises(BadInput, match="`coactivation`: is for a plan of one model, found 2 models"):
        make_plan(machines, [profile, profile], ONCE)
    with pytest.raises(BadInput, match="`coactivation`: expected no `domain`"):
        make_plan(machines, [profile], ONCE, domains=[profile])
    with pytest.raises(BadInput, match=r"`coactivation`: profile of .*: expected token-level routing"):
        make_plan(machines, [replace(profile, routing=None)], ONCE)
    with pytest.raises(InfeasiblePlan, match="expert slots"):
        make_plan(machines, [profile], replace(ONCE, slots_per_gpu=3))
    plan = make_plan(machines, [profile], ONCE)
    with pytest.raises(BadInput, match="deduplicated in plans of one model, found 2 models"):
        replace(plan, models=plan.models * 2)


@given(profiles(2))
def test_one_expert_a_token_travels_as_it_always_did(profile):
    assert profile.row_bytes(deduplicated=True) == profile.dispatch_bytes
