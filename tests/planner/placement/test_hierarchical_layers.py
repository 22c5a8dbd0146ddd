"""Placement over servers: seconds from first principles, the bound against every placement, limits, and never worse."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aurora.errors import BadInput
from aurora.planner.evaluate import evaluate
from aurora.planner.make_plan import make_plan
from aurora.planner.network.routes import route
from aurora.planner.placement.cost_model import layer_costs
from aurora.planner.placement.exclusive_layers import place_exclusive
from aurora.planner.placement.hierarchical_layers import (
    GPU_LOAD,
    SERVER_LOAD,
    hierarchical_seconds,
    place_hierarchical,
    server_bound_s,
)
from aurora.planner.workload.synthetic import synthetic_profile
from aurora.types import Cluster, Gpu, Hierarchy, PlanOptions, SyntheticOptions, TokenRouting, servers
from tests.planner.alltoall.test_hierarchical import by_hand as steps_by_hand
from tests.strategies import RATES, routed_profiles

CONFIG = {
    "num_local_experts": 16, "num_hidden_layers": 3, "num_experts_per_tok": 4, "hidden_size": 1024, "intermediate_size": 64,
}  # fmt: skip
OWN = PlanOptions("swap-search", "exact", aim="own", slots_per_gpu=4)


def two_servers(members=(2, 2), inside_Bps=100e9, nic_Bps=1e9, shared_nic=False, speeds=None):
    """Servers of some GPUs each; their speeds, where they differ."""
    node_G = np.repeat(np.arange(len(members)), members).tolist()
    gpus = tuple(
        Gpu(f"g{i}", "x", node, inside_Bps, inside_Bps, 10**12, speed)
        for i, (node, speed) in enumerate(zip(node_G, speeds or [1.0] * len(node_G), strict=True))
    )
    ports = [inside_Bps] * len(gpus)
    return Cluster("servers", gpus, servers(node_G, ports, ports, nic_Bps, shared_nic)), Hierarchy(np.array(node_G), 2)


def two_communities(ranks):
    """A profile of tokens that choose four experts with even numbers, or four with odd ones; one in ten chooses any."""
    rng = np.random.default_rng(0)
    tokens, layers = 512 * ranks, CONFIG["num_hidden_layers"]
    liking_ULE = rng.gumbel(size=(tokens, layers, 16))
    own_ULE = np.arange(16) % 2 == rng.integers(0, 2, (tokens, layers, 1))
    liking_ULE += np.where(rng.random((tokens, 1, 1)) < 0.9, 20.0 * own_ULE, 0.0)
    chosen_ULK = np.argsort(-liking_ULE, axis=2)[..., :4]
    routing = TokenRouting(chosen_ULK, np.arange(tokens) % ranks, np.zeros(tokens, dtype=np.int64))
    plain = synthetic_profile("uniform", CONFIG, SyntheticOptions(ranks, 512))
    return replace(plain, tokens_TLSE=routing.tokens_TLSE(1, ranks, 16), routing=routing)


@st.composite
def cases(draw):
    """(cluster, hierarchy, profile) of two servers; GPUs and NICs of any rates."""
    members = draw(st.sampled_from([(1, 1), (2, 1), (2, 2)]))
    inside_Bps, nic_Bps = draw(st.sampled_from(RATES)), draw(st.sampled_from(RATES))
    speeds = [draw(st.sampled_from((1.0, 0.5))) for _ in range(sum(members))]
    cluster, hierarchy = two_servers(members, inside_Bps, nic_Bps, draw(st.booleans()), speeds)
    hierarchy = replace(hierarchy, chunks=draw(st.integers(1, 3)))
    return cluster, hierarchy, draw(routed_profiles(sum(members), max_experts=5, max_layers=1))


def seconds_by_hand(cluster, hierarchy, profile, gpu_E):
    """Eq. 1 with the steps of both all-to-alls: each as long as the busiest port inside a server or NIC."""
    experts_UK, source_U = profile.routing.layer(0)
    server_G, fabric = hierarchy.server_G, cluster.fabric
    took_s = 0.0
    for step_GG in steps_by_hand(gpu_E[experts_UK], source_U, hierarchy):
        for rows_GG, size in ((step_GG, profile.row_bytes(True)), (step_GG.T, profile.combine_bytes)):
            across_GG = np.where(server_G[:, None] != server_G, rows_GG, 0)
            rates = cluster.out_Bps_G
            busy_s = [rows_GG.sum(axis=axis) * size / rates for axis in (0, 1)]
            for each_G in (across_GG.sum(axis=0), across_GG.sum(axis=1)):
                nic_X = np.bincount(server_G, weights=each_G) if fabric.shared_nic else each_G
                busy_s.append(nic_X * size / fabric.nic_Bps)
            took_s += max(each.max() for each in busy_s)
    load_TE = profile.tokens_TLSE[:, 0].sum(axis=1)
    own_TG = profile.tokens_TLSE[:, 0].sum(axis=2) // profile.top_k
    gate_s = max(profile.seconds("gate", gpu, own_TG[:, g]).sum() for g, gpu in enumerate(cluster.gpus))
    last_s = max(profile.seconds("aggregate", gpu, own_TG[:, g]).sum() for g, gpu in enumerate(cluster.gpus))
    expert_s = max(profile.seconds("expert", gpu, load_TE[:, gpu_E == g]).sum() for g, gpu in enumerate(cluster.gpus))
    return took_s + gate_s + expert_s + last_s


@given(cases(), st.randoms())
def test_a_layer_takes_what_its_ports_and_nics_take(case, random):
    cluster, hierarchy, profile = case
    gpu_E = np.array([random.randrange(len(cluster)) for _ in range(profile.experts)])
    found_s = hierarchical_seconds(
        layer_costs(cluster, profile, 0, True), np.eye(len(cluster))[gpu_E], hierarchy, route(cluster.network)
    )
    assert found_s == pytest.approx(seconds_by_hand(cluster, hierarchy, profile, gpu_E))


@given(cases(), st.integers(0, 1))
def test_no_placement_takes_less_than_the_bound(case, spare):
    cluster, hierarchy, profile = case
    costs, routes = layer_costs(cluster, profile, 0, True), route(cluster.network)
    capacity_G = np.full(len(cluster), -(-profile.experts // len(cluster)) + spare)
    least_s = server_bound_s(costs, profile.top_k, hierarchy, capacity_G, cluster.network)
    for placed in product(range(len(cluster)), repeat=profile.experts):
        gpu_E = np.array(placed)
        if (np.bincount(gpu_E, minlength=len(cluster)) <= capacity_G).all():
            assert least_s <= hierarchical_seconds(costs, np.eye(len(cluster))[gpu_E], hierarchy, routes) * (1 + 1e-9)


@given(cases())
def test_a_placement_over_servers_is_never_slower_than_its_start(case):
    cluster, hierarchy, profile = case
    options = PlanOptions("swap-search", "exact", aim="own")
    start = place_exclusive(cluster, profile, (), options)
    placed = place_hierarchical(cluster, profile, start, options, hierarchy)
    costs, routes = layer_costs(cluster, profile, 0, True), route(cluster.network)
    start_s, placed_s = (
        hierarchical_seconds(costs, each.placements_M[0].split_EG(0), hierarchy, routes) for each in (start, placed)
    )
    assert placed.objective_s == pytest.approx(placed_s)
    assert placed_s <= start_s
    assert placed.bound_s <= placed_s


@pytest.mark.parametrize("shared_nic", [False, True])
def test_experts_that_tokens_choose_together_come_to_one_server_and_load_stays_balanced(shared_nic):
    cluster, hierarchy = two_servers(shared_nic=shared_nic)
    profile = two_communities(4)
    start = place_exclusive(cluster, profile, (), OWN)
    placed = place_hierarchical(cluster, profile, start, OWN, hierarchy).placements_M[0]
    rows = [
        sum(crossing_rows(profile, layer, hierarchy.server_G[each.gpu_E(layer)], hierarchy) for layer in range(profile.layers))
        for each in (start.placements_M[0], placed)
    ]
    assert rows[1] < 0.7 * rows[0]
    for layer, load_E in enumerate(profile.load_LE):
        fullest = [
            np.bincount(each.gpu_E(layer), weights=load_E).max() / load_E.sum() * 4 for each in (start.placements_M[0], placed)
        ]
        at_servers = np.bincount(hierarchy.server_G[placed.gpu_E(layer)], weights=load_E)
        assert fullest[1] <= fullest[0] * GPU_LOAD
        assert at_servers.max() / at_servers.mean() <= SERVER_LOAD


def crossing_rows(profile, layer, server_E, hierarchy):
    """Rows that cross between servers, token by token."""
    experts_UK, source_U = profile.routing.layer(layer)
    return sum(
        len(set(server_E[chosen].tolist()) - {hierarchy.server_G[source]})
        for chosen, source in zip(experts_UK, source_U, strict=True)
    )


def test_a_faster_server_takes_more_load():
    cluster, hierarchy = two_servers(speeds=[1.0, 1.0, 0.5, 0.5])
    profile = two_communities(4)
    options = replace(OWN, slots_per_gpu=8)
    start = place_exclusive(cluster, profile, (), options)
    placed = place_hierarchical(cluster, profile, start, options, hierarchy).placements_M[0]
    for layer, load_E in enumerate(profile.load_LE):
        fast, slow = np.bincount(hierarchy.server_G[placed.gpu_E(layer)], weights=load_E)
        assert 1.5 * slow < fast < 2.6 * slow


def test_a_placement_over_servers_needs_the_choices_of_each_token():
    cluster, hierarchy = two_servers()
    profile = replace(two_communities(4), routing=None)
    start = place_exclusive(cluster, profile, (), OWN)
    with pytest.raises(BadInput, match="token-level routing"):
        place_hierarchical(cluster, profile, start, OWN, hierarchy)


def test_two_models_come_over_servers_together():
    cluster, _ = two_servers()
    profiles = [two_communities(4), replace(two_communities(4), model="other")]
    flat, over = (make_plan(cluster, profiles, PlanOptions(all_to_all=each)) for each in ("flat", "hierarchical"))
    hierarchy = over.models[0].hierarchy
    for layer in range(profiles[0].layers):
        loads = []
        for plan in (flat, over):
            split_M = [model.placement.split_EG(layer) for model in plan.models]
            loads.append(sum(each.load_LE[layer] @ split_EG for each, split_EG in zip(profiles, split_M, strict=True)))
            assert all((split_EG.sum(axis=0) == 4).all() for split_EG in split_M)
        assert loads[1].max() <= loads[0].max() * GPU_LOAD
        for before, after, profile in zip(flat.models, over.models, profiles, strict=True):
            rows = [
                crossing_rows(profile, layer, hierarchy.server_G[each.placement.gpu_E(layer)], hierarchy)
                for each in (before, after)
            ]
            assert rows[1] < 0.75 * rows[0]
    assert evaluate(over, profiles).served_s_L.sum() == pytest.approx(over.objective_s)
