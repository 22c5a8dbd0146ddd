"""Slot search: near brute force over all placements with replicas, never worse than its start, and priced by Eq. 1."""

from dataclasses import replace
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aurora.algorithms.network.port_bounds import Nics
from aurora.algorithms.placement.cost_model import LayerCosts, aimed_costs
from aurora.algorithms.search.slot_search import fill, slot_search
from aurora.types import Placement
from tests.strategies import clusters, profiles


@st.composite
def layers(draw, max_gpus=4):
    """(costs, slots_G, held_GP) of one layer in some cases, with replicas and empty slots."""
    n = draw(st.integers(1, max_gpus))
    cluster, profile = draw(clusters(n)), draw(profiles(n, max_experts=5, max_layers=1))
    costs = replace(aimed_costs(cluster, profile, (), 0, "mean"), worst=draw(st.integers(1, profile.windows)))
    experts = profile.experts
    home_E = draw(st.lists(st.integers(0, n - 1), min_size=experts, max_size=experts))
    more = draw(st.sets(st.tuples(st.integers(0, n - 1), st.integers(0, experts - 1)), max_size=4))
    held_G = [{e for e in range(experts) if home_E[e] == g} | {e for gpu, e in more if gpu == g} for g in range(n)]
    slots_G = np.array([max(1, len(held) + draw(st.integers(0, 2))) for held in held_G])
    held_GP = np.full((n, slots_G.max()), -1, dtype=np.int64)
    for g, held in enumerate(held_G):
        held_GP[g, : len(held)] = sorted(held)
    return costs, slots_G, held_GP


def count_E(held_GP, experts):
    return np.bincount(held_GP[held_GP >= 0], minlength=experts)


def check_slots(held_GP, slots_G, experts):
    """No GPU holds more than its slots, or an expert twice; each expert is held."""
    for held_P, slots in zip(held_GP, slots_G, strict=True):
        own = held_P[held_P >= 0]
        assert len(own) <= slots
        assert len(set(own.tolist())) == len(own)
    assert (count_E(held_GP, experts) >= 1).all()


@given(layers(), st.booleans())
def test_even_replicas_are_priced_as_their_shares_are(case, in_servers):
    costs, _, held_GP = case
    if in_servers:
        gpus = len(held_GP)
        costs = replace(costs, nics=Nics(np.arange(gpus) // 2, np.linspace(1.0, 2.0, gpus), np.arange(gpus)))
    assert costs.evenly_s(held_GP) == pytest.approx(value_s(costs, held_GP), rel=1e-9, abs=1e-12)


def value_s(costs, held_GP):
    return costs.value_s(Placement.of_slots(held_GP[None]).split_EG(0))


@given(layers(), st.integers(0, 3), st.booleans())
def test_a_search_keeps_its_rules_and_is_never_worse(case, seed, replicas):
    costs, slots_G, held_GP = case
    layer, experts = costs.phase_sums(slots_G), costs.own_WGE.shape[2]
    found_GP, found_s = slot_search(layer, held_GP, np.random.default_rng(seed), 3, replicas)
    check_slots(found_GP, slots_G, experts)
    assert found_s == pytest.approx(value_s(costs, found_GP), rel=1e-9)
    assert found_s <= value_s(costs, held_GP) * (1 + 1e-9) + 1e-12  # parts that cancel leave their rounding
    if not replicas:
        assert count_E(found_GP, experts).tolist() == count_E(held_GP, experts).tolist()
    again_GP, again_s = slot_search(layer, held_GP, np.random.default_rng(seed), 3, replicas)
    assert (found_GP.tolist(), found_s) == (again_GP.tolist(), again_s)


@given(layers())
def test_filled_slots_are_all_used(case):
    costs, slots_G, held_GP = case
    experts = costs.own_WGE.shape[2]
    filled_GP, filled_s = fill(costs.phase_sums(slots_G), held_GP)
    check_slots(filled_GP, slots_G, experts)
    assert (filled_GP >= 0).sum(axis=1).tolist() == np.minimum(slots_G, experts).tolist()
    assert (filled_GP[:, : held_GP.shape[1]][held_GP >= 0] == held_GP[held_GP >= 0]).all()
    assert filled_s == pytest.approx(value_s(costs, filled_GP), rel=1e-9)


def drawn(rng, gpus, experts, cases):
    """Costs of a small layer on mixed GPUs."""
    own_WGE = rng.integers(0, 99, (cases, gpus, experts)) * rng.integers(1, 6, experts)
    rate_G, speed_G = rng.choice([1e3, 2e3, 5e3], gpus), rng.choice([1.0, 0.5], gpus)
    return LayerCosts(
        own_WGE=own_WGE,
        expert_s_WGE=own_WGE.sum(axis=1)[:, None, :] * 1e-3 / speed_G[:, None],
        gate_s_WG=np.full((cases, gpus), 0.01),
        aggregate_s_WG=np.full((cases, gpus), 0.01),
        dispatch_bytes=4,
        combine_bytes=4,
        out_Bps=rate_G,
        in_Bps=rate_G,
        worst=cases,
    )


def all_placements(gpus, experts, slots):
    """(G, P) tables of all placements that fit `slots` on each GPU, replicas included."""
    sets = [each for size in range(slots + 1) for each in combinations(range(experts), size)]
    for held in product(sets, repeat=gpus):
        if len({expert for each in held for expert in each}) == experts:
            yield np.array([(*each, *[-1] * (slots - len(each))) for each in held])


def test_search_against_every_placement_with_replicas():
    """Twenty drawn layers of four experts on three mixed GPUs with two slots, two cases: what brute force finds, nearly."""
    rng, ratios = np.random.default_rng(0), []
    for _ in range(20):
        costs = drawn(rng, 3, 4, 2)
        best_s = min(value_s(costs, held_GP) for held_GP in all_placements(3, 4, 2))
        start_GP = np.array([[0, 3], [1, -1], [2, -1]])
        _, found_s = slot_search(costs.phase_sums(np.array([2, 2, 2])), start_GP, rng, 100)
        ratios.append(found_s / best_s)
    assert min(ratios) >= 1 - 1e-9
    assert max(ratios) <= 1.05
    assert np.mean(ratios) <= 1.005


def test_search_against_every_placement_without_replicas():
    """Thirty drawn layers of five experts on three mixed GPUs, two cases, no replicas: what brute force finds, nearly."""
    rng, ratios = np.random.default_rng(1), []
    for _ in range(30):
        costs = drawn(rng, 3, 5, 2)
        best_s = min(
            costs.value_s(np.eye(3)[list(gpus)])
            for gpus in product(range(3), repeat=5)
            if (np.bincount(gpus, minlength=3) <= [3, 2, 2]).all()
        )
        start_GP = np.array([[0, 1, -1], [2, 3, -1], [4, -1, -1]])
        _, found_s = slot_search(costs.phase_sums(np.array([3, 2, 2])), start_GP, rng, 30, replicas=False)
        ratios.append(found_s / best_s)
    assert min(ratios) >= 1 - 1e-9
    assert max(ratios) <= 1.02
    assert np.mean(ratios) <= 1.002


def test_restarts_find_what_no_single_swap_leads_to():
    """Each GPU's own tokens go to what the other holds, and no single swap helps."""
    costs = drawn(np.random.default_rng(0), 2, 4, 1)
    own_WGE = np.array([[[0, 0, 50, 50], [50, 50, 0, 0]]])
    costs = replace(costs, own_WGE=own_WGE, expert_s_WGE=np.zeros((1, 2, 4)), out_Bps=np.ones(2), in_Bps=np.ones(2))
    start_GP = np.array([[0, 1], [2, 3]])
    found_GP, found_s = slot_search(costs.phase_sums(np.array([2, 2])), start_GP, np.random.default_rng(0), 16)
    assert found_s < value_s(costs, start_GP)
    assert [sorted(held) for held in found_GP.tolist()] == [[2, 3], [0, 1]]


def test_a_search_ends_where_all_tokens_can_stay_at_home():
    """The objective is zero but for rounding, which must not count as a gain."""
    rng = np.random.default_rng(0)
    for experts in range(2, 9):
        own_GE = np.diag(rng.random(experts)) / 3
        costs = LayerCosts(
            own_WGE=own_GE[None], expert_s_WGE=np.zeros((1, experts, experts)), gate_s_WG=np.zeros((1, experts)),
            aggregate_s_WG=np.zeros((1, experts)), dispatch_bytes=7, combine_bytes=3, out_Bps=np.full(experts, 0.3),
            in_Bps=np.full(experts, 0.7),
        )  # fmt: skip
        layer = costs.phase_sums(np.full(experts, 2))
        for replicas in (False, True):
            held_GP = np.stack([rng.permutation(experts), np.full(experts, -1)], axis=1)
            _, value_s = slot_search(layer, held_GP, rng, 16, replicas)
            assert abs(value_s) < 1e-9
