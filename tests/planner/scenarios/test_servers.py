"""Placement over servers: seconds from first principles, bounds against every placement, limits, and never worse."""

from dataclasses import replace
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aurora.algorithms.placement.cost_model import layer_costs
from aurora.algorithms.placement.objective import formula, seconds
from aurora.algorithms.placement.phase_times import exclusive_s
from aurora.algorithms.placement.placement_bounds import (
    colocated_bound_s,
    hierarchical_bound_s,
    layer_bound_s,
)
from aurora.algorithms.workload.synthetic import draw_profile
from aurora.planner.evaluate import evaluate
from aurora.planner.plan import make_plan
from aurora.planner.scenarios.exclusive import Exclusive
from aurora.planner.scenarios.servers import GPU_LOAD, SERVER_LOAD, OverServers
from aurora.simulator.interpreter import simulate_plan
from aurora.types import Cluster, Curve, Gpu, Hierarchy, PlanOptions, Servers, SyntheticOptions, TokenRouting
from tests.algorithms.alltoall.test_hierarchical import by_hand as steps_by_hand
from tests.strategies import RATES, routed_profiles

CONFIG = {
    "num_local_experts": 16, "num_hidden_layers": 3, "num_experts_per_tok": 4, "hidden_size": 1024, "intermediate_size": 64,
}  # fmt: skip
OWN = PlanOptions("swap-search", "exact", aim="own", slots_per_gpu=4)


def two_servers(members=(2, 2), out_Bps=100e9, in_Bps=100e9, nic_Bps=1e9, shared_nic=False, speeds=1.0):
    """Servers of some GPUs each, whose ports and speeds may differ."""
    node_G = np.repeat(np.arange(len(members)), members).tolist()
    out_Bps_G, in_Bps_G, speed_G = (np.broadcast_to(each, len(node_G)).tolist() for each in (out_Bps, in_Bps, speeds))
    columns = zip(node_G, out_Bps_G, in_Bps_G, speed_G, strict=True)
    gpus = tuple(Gpu(f"g{i}", "x", node, out, into, 10**12, speed) for i, (node, out, into, speed) in enumerate(columns))
    servers = Servers.of(node_G, nic_Bps, shared_nic)
    return Cluster("servers", gpus, servers), Hierarchy(np.array(node_G), 2)


def two_communities(ranks):
    """A profile of tokens that choose four experts with even numbers, or four with odd ones; one in ten chooses any."""
    rng = np.random.default_rng(0)
    tokens, layers = 512 * ranks, CONFIG["num_hidden_layers"]
    liking_ULE = rng.gumbel(size=(tokens, layers, 16))
    own_ULE = np.arange(16) % 2 == rng.integers(0, 2, (tokens, layers, 1))
    liking_ULE += np.where(rng.random((tokens, 1, 1)) < 0.9, 20.0 * own_ULE, 0.0)
    chosen_ULK = np.argsort(-liking_ULE, axis=2)[..., :4]
    routing = TokenRouting(chosen_ULK, np.arange(tokens) % ranks, np.zeros(tokens, dtype=np.int64))
    plain = draw_profile("uniform", CONFIG, SyntheticOptions(ranks, 512))
    return replace(plain, tokens_TLSE=routing.tokens_TLSE(1, ranks, 16), routing=routing)


@st.composite
def cases(draw):
    """(cluster, hierarchy, profile) of two servers; GPUs and NICs of any rates."""
    members = draw(st.sampled_from([(1, 1), (2, 1), (2, 2)]))
    rates = st.lists(st.sampled_from(RATES), min_size=sum(members), max_size=sum(members))
    speeds = [draw(st.sampled_from((1.0, 0.5))) for _ in range(sum(members))]
    nic_Bps, shared_nic = draw(st.sampled_from(RATES)), draw(st.booleans())
    cluster, hierarchy = two_servers(members, draw(rates), draw(rates), nic_Bps, shared_nic, speeds)
    hierarchy = replace(hierarchy, chunks=draw(st.integers(1, 3)))
    return cluster, hierarchy, draw(routed_profiles(sum(members), max_experts=5, max_layers=1))


def loads_by_hand(cluster, rows_GG):
    """(8, G) bytes over rates of ports and NICs: sent and received by each, if these rows of one byte are sent, and back."""
    server_G, servers = np.array(cluster.servers.server_G), cluster.servers
    found = []
    for there_GG in (rows_GG, rows_GG.T):
        far_GG = np.where(server_G[:, None] != server_G, there_GG, 0)
        found += [there_GG.sum(axis=1) / cluster.out_Bps_G, there_GG.sum(axis=0) / cluster.in_Bps_G]
        for far_G in (far_GG.sum(axis=1), far_GG.sum(axis=0)):
            found.append(
                np.bincount(server_G, weights=far_G)[server_G] / servers.nic_Bps if servers.shared else far_G / servers.nic_Bps
            )
    return np.array(found)


def compute_by_hand(cluster, profile, gpu_E):
    """(G,) seconds of gates, experts and aggregations."""
    load_TE = profile.tokens_TLSE[:, 0].sum(axis=1)
    own_TG = profile.tokens_TLSE[:, 0].sum(axis=2) // profile.top_k
    gate_G, last_G = (
        np.array([profile.seconds(phase, gpu, own_TG[:, g]).sum() for g, gpu in enumerate(cluster.gpus)])
        for phase in ("gate", "aggregate")
    )
    return (
        gate_G,
        np.array([profile.seconds("expert", gpu, load_TE[:, gpu_E == g]).sum() for g, gpu in enumerate(cluster.gpus)]),
        last_G,
    )


def seconds_by_hand(cluster, hierarchy, profile, gpu_E):
    """Eq. 1 with the steps of both all-to-alls: each as long as the busiest port inside a server or NIC."""
    experts_UK, source_U = profile.routing.layer(0)
    took_s = sum(each.max() for each in compute_by_hand(cluster, profile, gpu_E))
    for step_GG in steps_by_hand(gpu_E[experts_UK], source_U, hierarchy):
        load_8G = loads_by_hand(cluster, step_GG)
        took_s += load_8G[:4].max() * profile.row_bytes(True) + load_8G[4:].max() * profile.combine_bytes
    return took_s


def placed_at_random(cluster, profile, random):
    """(E,) a GPU for each expert, and the table of their shares."""
    gpu_E = np.array([random.randrange(len(cluster)) for _ in range(profile.experts)])
    return gpu_E, np.eye(len(cluster))[gpu_E]


@given(cases(), st.randoms())
def test_a_layer_takes_what_its_ports_and_nics_take(case, random):
    cluster, hierarchy, profile = case
    gpu_E, split_EG = placed_at_random(cluster, profile, random)
    found_s = exclusive_s(layer_costs(cluster, profile, 0, True).phase_times(split_EG, hierarchy))
    assert found_s == pytest.approx(seconds_by_hand(cluster, hierarchy, profile, gpu_E))


@given(cases(), st.randoms())
def test_flat_all_to_alls_take_what_ports_and_nics_take(case, random):
    """A row goes for each choice of a token."""
    cluster, _, profile = case
    gpu_E, split_EG = placed_at_random(cluster, profile, random)
    rows_GG = np.zeros((len(cluster), len(cluster)))
    for chosen, source in zip(*profile.routing.layer(0), strict=True):
        for gpu in gpu_E[chosen].tolist():
            rows_GG[source, gpu] += source != gpu
    load_8G, (gate_G, expert_G, last_G) = loads_by_hand(cluster, rows_GG), compute_by_hand(cluster, profile, gpu_E)
    first_G = gate_G + load_8G[:4].max(axis=0) * profile.row_bytes(deduplicated=False)
    second_G = expert_G + load_8G[4:].max(axis=0) * profile.combine_bytes
    times = layer_costs(cluster, profile, 0).phase_times(split_EG)
    assert exclusive_s(times) == pytest.approx(first_G.max() + second_G.max() + last_G.max())


def placements(cluster, profile, slots_G):
    """The tables of shares of all unreplicated placements within the slots."""
    for placed in product(range(len(cluster)), repeat=profile.experts):
        if (np.bincount(placed, minlength=len(cluster)) <= slots_G).all():
            yield np.eye(len(cluster))[list(placed)]


@given(cases(), st.integers(0, 1))
@settings(max_examples=30, deadline=None)
def test_no_placement_takes_less_than_the_bound(case, spare):
    cluster, hierarchy, profile = case
    costs = layer_costs(cluster, profile, 0, True)
    slots_G = np.full(len(cluster), -(-profile.experts // len(cluster)) + spare)
    given = [costs], [profile.top_k], [slots_G]
    least_s = hierarchical_bound_s(*given, True)
    alone_s = hierarchical_bound_s(*given, False)
    assert least_s <= alone_s * (1 + 1e-9)
    for split_EG in placements(cluster, profile, slots_G):
        assert alone_s <= exclusive_s(costs.phase_times(split_EG, hierarchy)) * (1 + 1e-9)


def test_the_bound_counts_the_slots_that_hot_experts_lack():
    """Nine slots hold eight experts and one more replica: of three hot experts, two are on one GPU each."""
    cluster, _ = two_servers(nic_Bps=1e18)
    plain = draw_profile("uniform", CONFIG | {"num_local_experts": 8, "num_hidden_layers": 1}, SyntheticOptions(4, 512))
    profile = replace(plain, tokens_TLSE=np.full((1, 1, 4, 1), 8) * np.array([200] * 3 + [1] * 5))
    costs = layer_costs(cluster, profile, 0, True)
    few_s, many_s = (hierarchical_bound_s([costs], [4], [np.array([slots, 2, 2, 2])], True) for slots in (3, 7))
    hot_s, mean_s = costs.expert_s_WGE[0, 0, 0], costs.expert_s_WGE[0, 0].sum() / 4
    assert few_s - many_s == pytest.approx(hot_s - mean_s)


@st.composite
def pairs(draw):
    """(cluster, hierarchies, profiles) of two or three models on two servers."""
    cluster, hierarchy, first = draw(cases().filter(lambda case: case[2].experts <= 3))
    each = routed_profiles(len(cluster), max_experts=3, max_layers=1, max_tokens=6)
    profiles = [first, *draw(st.lists(each, min_size=1, max_size=2 if len(cluster) < 3 else 1))]
    return cluster, [replace(hierarchy, chunks=draw(st.integers(1, 2))) for _ in profiles], profiles


@given(cases(), st.randoms())
@settings(max_examples=40, deadline=None)
def test_no_placement_with_replicas_takes_less_than_the_bound(case, random):
    cluster, hierarchy, profile = case
    costs, slots = layer_costs(cluster, profile, 0, True), -(-profile.experts // len(cluster)) + 1
    given = [costs], [profile.top_k], [np.full(len(cluster), slots)]
    least_s = hierarchical_bound_s(*given, True)
    for _ in range(20):
        gpu_E = [slot // slots for slot in random.sample(range(slots * len(cluster)), profile.experts)]
        holds_EG = np.eye(len(cluster))[gpu_E]
        for gpu in np.flatnonzero(holds_EG.sum(axis=0) < slots).tolist():
            holds_EG[random.randrange(profile.experts), gpu] = 1
        split_EG = holds_EG / holds_EG.sum(axis=1, keepdims=True)
        assert least_s <= exclusive_s(costs.phase_times(split_EG, hierarchy)) * (1 + 1e-9)


@given(pairs())
@settings(max_examples=12, deadline=None)
def test_no_placements_of_several_models_take_less_than_their_bound(case):
    """Neither hierarchical nor flat, and on ports alone no more than with NICs."""
    cluster, hierarchies, profiles = case
    slots_G = np.full(len(cluster), 3)
    for hierarchical in (True, False):
        costs_M = [layer_costs(cluster, each, 0, hierarchical) for each in profiles]
        if hierarchical:
            top_k_M = [each.top_k for each in profiles]
            bound_s = hierarchical_bound_s(costs_M, top_k_M, [slots_G] * len(profiles), False)
        else:
            bound_s = colocated_bound_s(formula(len(profiles)), costs_M, False)
        every = [
            [
                costs.phase_times(split_EG, hierarchy if hierarchical else None)
                for split_EG in placements(cluster, each, slots_G)
            ]
            for costs, each, hierarchy in zip(costs_M, profiles, hierarchies, strict=True)
        ]
        some = [of_one[:: max(1, len(of_one) // 30)] for of_one in every] if len(profiles) > 2 else every
        for times_M in product(*some):
            assert bound_s <= seconds(times_M, nics=True) * (1 + 1e-9)
            assert seconds(times_M, nics=False) <= seconds(times_M, nics=True) * (1 + 1e-9)


@given(cases(), st.sampled_from((0, 1, 2, 9)), st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_no_replicas_in_few_slots_or_many_beat_the_bound_on_nics(case, spare, seed):
    cluster, _, profile = case
    costs, gpus, rng = layer_costs(cluster, profile, 0), len(cluster), np.random.default_rng(seed)
    slots = min(profile.experts, -(-profile.experts // gpus) + spare)
    least_s = layer_bound_s(costs, np.full(gpus, slots))
    for _ in range(20):
        held_EG = np.eye(gpus)[rng.permutation(np.resize(np.arange(gpus), profile.experts))]
        for held_E in held_EG.T:
            more = rng.permutation(np.flatnonzero(held_E == 0))[: slots - int(held_E.sum())]
            held_E[more] = rng.random(len(more)) < 0.7
        split_EG = held_EG * (rng.dirichlet(np.full(gpus, rng.choice([0.1, 1.0, 10.0])), profile.experts) + 1e-12)
        assert least_s <= costs.value_s(split_EG / split_EG.sum(axis=1, keepdims=True)) * (1 + 1e-9)


@settings(max_examples=12, deadline=None)
@given(cases(), st.integers(0, 2))
def test_a_placement_keeps_its_slots_and_bound_and_is_never_slower_than_its_start(case, spare):
    """Without replicas where no slot is spare."""
    cluster, hierarchy, profile = case
    slots = -(-profile.experts // len(cluster)) + spare if spare else None
    options = PlanOptions("equal-split" if spare else "swap-search", "exact", aim="own", slots_per_gpu=slots)
    start = Exclusive(replace(cluster, servers=None), [profile], options).place(np.random.default_rng(0))
    placement = OverServers(cluster, [profile], options).improve_on_servers(start.placements_M, [hierarchy])[0]
    found = OverServers(cluster, [profile], options, hierarchy_M=(hierarchy,)).priced([placement])
    costs = layer_costs(cluster, profile, 0, True)
    start_s, found_s = (
        exclusive_s(costs.phase_times(each.split_EG(0), hierarchy)) for each in (start.placements_M[0], placement)
    )
    assert found.bound_s <= found_s * (1 + 1e-9)
    assert found_s <= start_s
    assert found.objective_s == pytest.approx(found_s)
    assert max(map(len, placement.slots_LG[0])) <= (slots or profile.experts)


@pytest.mark.parametrize("shared_nic", [False, True])
def test_experts_that_tokens_choose_together_come_to_one_server_and_load_stays_balanced(shared_nic):
    cluster, hierarchy = two_servers(shared_nic=shared_nic)
    profile = two_communities(4)
    start = Exclusive(cluster, [profile], OWN).place(np.random.default_rng(0))
    placed = OverServers(cluster, [profile], OWN).improve_on_servers(start.placements_M, [hierarchy])[0]
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


def test_counts_alone_level_the_replicas_inside_servers():
    """Servers keep their experts, since counts tell no rows that others would save; their GPUs share what a server serves."""
    cluster, hierarchy = two_servers((4, 4))
    profile = draw_profile("zipf:0.8", CONFIG | {"num_local_experts": 64}, SyntheticOptions(8, 512))
    for options in (replace(OWN, slots_per_gpu=8), PlanOptions("equal-split", "exact", aim="own", slots_per_gpu=10)):
        (start,) = Exclusive(replace(cluster, servers=None), [profile], options).place(np.random.default_rng(0)).placements_M
        (found,) = OverServers(cluster, [profile], options).improve_on_servers([start], [hierarchy])
        for layer in range(profile.layers):
            costs = layer_costs(cluster, profile, layer, True)
            split_XEG = [placement.split_EG(layer) for placement in (start, found)]
            on_EN, then_EN = (
                np.stack([split_EG[:, :4].sum(axis=1), split_EG[:, 4:].sum(axis=1)], axis=1) for split_EG in split_XEG
            )
            np.testing.assert_allclose(on_EN, then_EN)
            start_s, found_s = (exclusive_s(costs.phase_times(split_EG, hierarchy)) for split_EG in split_XEG)
            assert found_s <= start_s
        assert (found == start) == (options.place == "swap-search")


@pytest.mark.full
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
        assert loads[1].max() <= loads[0].max() * GPU_LOAD**2  # each model keeps the limit from where the one before left off
        for before, after, profile in zip(flat.models, over.models, profiles, strict=True):
            rows = [
                crossing_rows(profile, layer, hierarchy.server_G[each.placement.gpu_E(layer)], hierarchy)
                for each in (before, after)
            ]
            assert rows[1] < 0.75 * rows[0]
    assert evaluate(over, profiles).served_s_L.sum() == pytest.approx(over.objective_s)


@pytest.mark.parametrize("token_s", [1e-5, 0.0])
def test_a_server_of_a100_beside_one_of_h20(token_s):
    """A100s compute twice as fast as H20s, whose ports inside are faster: load follows compute where that decides.

    Whatever decides, the plan is served no later than a flat one or than experts in index order, and not below its bounds.
    """
    speeds, inside_Bps = np.repeat([1.0, 0.474], 2), np.repeat([300e9, 450e9], 2)
    cluster, _ = two_servers((2, 2), inside_Bps, inside_Bps, 25e9, speeds=speeds)
    works = {phase: Curve([0.0, 1.0], [0.0, token_s * (phase == "expert")]) for phase in ("gate", "expert", "aggregate")}
    profile = replace(two_communities(4), curves={"reference": works})
    ways = PlanOptions(), PlanOptions("contiguous", all_to_all="hierarchical"), PlanOptions(all_to_all="hierarchical")
    plans = [make_plan(cluster, [profile], options) for options in ways]
    served_s, plan = [simulate_plan(each, [profile]).seconds for each in plans], plans[-1]
    assert served_s[-1] <= min(served_s) * 1.001
    assert plan.objective_s == pytest.approx(served_s[-1], rel=0.1)
    assert plan.bound_s <= plan.assignment_bound_s <= plan.objective_s
    load_G = sum(profile.load_LE[layer] @ plan.models[0].placement.split_EG(layer) for layer in range(profile.layers))
    fast, slow = load_G[:2].sum(), load_G[2:].sum()
    assert 1.8 * slow < fast < 3.2 * slow if token_s else 0.8 * slow < fast < 1.25 * slow


def test_a_small_plan_is_about_as_fast_as_the_best_of_all_even_placements():
    cluster, _ = two_servers((1, 1, 1), 450e9, 450e9, 50e9)
    config = CONFIG | {"num_local_experts": 5, "num_hidden_layers": 1, "num_experts_per_tok": 2}
    config |= {"hidden_size": 2048, "intermediate_size": 1024}
    profile = draw_profile("zipf:0.8", config, SyntheticOptions(3, 128, token_level=True))
    plan = make_plan(cluster, [profile], PlanOptions(all_to_all="hierarchical", slots_per_gpu=3, aim="own"))
    costs, hierarchy = layer_costs(cluster, profile, 0, True), plan.models[0].hierarchy
    held = [np.isin(np.arange(5), each) for each in combinations(range(5), 3)]
    every = [np.stack(each, axis=1).astype(float) for each in product(held, repeat=3)]
    splits = [holds_EG / holds_EG.sum(axis=1, keepdims=True) for holds_EG in every if holds_EG.any(axis=1).all()]
    assert plan.objective_s <= 1.02 * min(exclusive_s(costs.phase_times(split_EG, hierarchy)) for split_EG in splits)
