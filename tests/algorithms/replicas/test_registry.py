"""Experts with replicas: against every placement in small cases, valid in all, and the cases that the methods are judged by."""

from functools import cache
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aurora.algorithms.check.plans import check_layout
from aurora.algorithms.replicas import load_bounds
from aurora.algorithms.replicas.eplb import balanced
from aurora.algorithms.replicas.packing_core import counts_by_size, eplb_counts
from aurora.algorithms.replicas.registry import REPLICAS, place
from aurora.errors import BadInput, InfeasiblePlan
from aurora.types import GpuSlots

SKEWED = [600, 560, 120, 120, 20, 10, 10, 10]


def zipf(experts, exponent):
    return (1.0 + np.arange(experts)) ** -exponent * 1e4


@cache
def every_placement(experts, slots):
    """(V, G, E) bool: all ways to hold every expert, with at most slots[g] different ones on GPU g."""
    routing = [
        [held for size in range(slots + 1) for held in combinations(range(experts), size)] for slots in slots
    ]  # fmt: skip
    table = np.zeros((int(np.prod([len(c) for c in routing])), len(slots), experts), dtype=bool)
    for row, held_G in zip(table, product(*routing), strict=True):
        for gpu, held in enumerate(held_G):
            row[gpu, list(held)] = True
    return table[table.any(axis=1).all(axis=1)]


def best_even(load_E, cost_G, slots):
    held_VGE = every_placement(len(load_E), slots)
    return ((held_VGE * (load_E / held_VGE.sum(axis=1))[:, None, :]).sum(axis=2) * cost_G).max(axis=1).min()


def best_free(load_E, cost_G, slots):
    """Some experts' load can only go to the GPUs that hold one of them; the tightest such set is what division can reach."""
    held_VGE = every_placement(len(load_E), slots)
    worst_V = np.zeros(len(held_VGE))
    for size in range(1, len(load_E) + 1):
        for some in map(list, combinations(range(len(load_E)), size)):
            worst_V = np.maximum(worst_V, load_E[some].sum() / (held_VGE[:, :, some].any(axis=2) / cost_G).sum(axis=1))
    return worst_V.min()


@st.composite
def slots_and_loads(draw, gpus=4, slots=4, layers=1, equal=None):
    number = draw(st.integers(1, gpus))
    alike = draw(st.booleans()) if equal is None else equal
    one = st.tuples(st.integers(1, slots), st.sampled_from((1.0, 0.5, 2.0, 3.0)))
    rows = [draw(one)] * number if alike else [draw(one) for _ in range(number)]
    slots = GpuSlots(np.array([row[0] for row in rows]), np.array([row[1] for row in rows]))
    experts = draw(st.integers(1, int(slots.slots_G.sum())))
    load = st.one_of(st.integers(0, 9), st.floats(1e-6, 1000), st.just(0))
    layer = st.lists(load, min_size=experts, max_size=experts)
    return slots, np.array(draw(st.lists(layer, min_size=layers, max_size=layers)), dtype=float)


@pytest.mark.full
@pytest.mark.parametrize("alike", [True, False])
def test_against_every_placement(alike):
    """E <= 4, G <= 3, at most 6 slots: bounds below the optimum, methods above it and near."""
    rng = np.random.default_rng(3)
    ratios = {"equal-split": [], "eplb": []}
    for _ in range(50):
        gpus = int(rng.integers(1, 4))
        slots = np.full(gpus, rng.integers(1, 3)) if alike else rng.integers(1, 3, gpus)
        cost = np.ones(gpus) if alike else rng.choice([1.0, 2.0, 0.5], gpus)
        load = np.round(rng.pareto(1.0, int(rng.integers(1, min(4, slots.sum()) + 1))) * 100)
        gpu_slots = GpuSlots(slots, cost)
        best, free = (optimum(load, cost, tuple(slots.tolist())) for optimum in (best_even, best_free))
        for method in ratios if alike else ("equal-split",):
            made = place(load, gpu_slots, method)
            assert made.bound_L[0] <= best * (1 + 1e-9)
            assert load_bounds.any_split(load, gpu_slots, 2 * best) <= free * (1 + 1e-9)
            ratios[method].append(made.max_load_L[0] / best if best else 1.0)
    assert min(ratios["equal-split"]) >= 1 - 1e-9
    assert max(ratios["equal-split"]) <= (1.0 + 1e-9 if alike else 1.6)
    assert np.mean(ratios["equal-split"]) <= (1.0 + 1e-9 if alike else 1.05)


@given(slots_and_loads(layers=2))
def test_every_layout_is_what_it_says(case):
    slots, load_LE = case
    made = place(load_LE, slots)
    check_layout(made, load_LE, slots)
    again = place(load_LE, slots)
    assert again.placement == made.placement


@given(slots_and_loads(gpus=3, slots=3, equal=True))
def test_replicas_take_equal_parts(case):
    slots, load_LE = case
    even, eplb = (place(load_LE, slots, method) for method in REPLICAS)
    check_layout(eplb, load_LE, slots)
    for shares in even.placement.split_EG(0):
        assert np.allclose(shares[shares > 0], 1 / (shares > 0).sum())


def test_two_hot_experts():
    slots = GpuSlots.equal(8, 2)
    even, eplb = (place(SKEWED, slots, method) for method in ("equal-split", "eplb"))
    assert even.max_load_L[0] == pytest.approx(590 / 3)  # 560 / 3 + 10
    assert 181 < even.bound_L[0] <= even.max_load_L[0]
    assert eplb.max_load_L[0] == 232


def test_on_most_gpus_the_mean_is_reached_within_a_thousandth():
    rng = np.random.default_rng(0)
    slots = GpuSlots.equal(64, 5)
    for exponent in (0.8, 1.2):
        load_LE = zipf(256, exponent) * rng.lognormal(0.0, 0.2, (3, 256))
        even, eplb = (place(load_LE, slots, method) for method in ("equal-split", "eplb"))
        assert (even.max_load_L <= 1.002 * even.mean_load_L).all()
        assert (even.max_load_L <= eplb.max_load_L).all()


def test_two_slots_a_gpu_come_near_the_bound():
    load, slots = zipf(256, 0.8), GpuSlots.equal(144, 2)
    assert load_bounds.mean_load(load, slots) / load_bounds.by_counting(load, slots) == pytest.approx(0.6774, abs=1e-4)
    made = place(load, slots)
    assert made.gap_L[0] < 0.011
    assert made.bound_L[0] > 1.09 * load_bounds.by_counting(load, slots)  # the wasted parts of slots count
    assert place(load, GpuSlots.equal(144, 3)).max_load_L[0] <= made.mean_load_L[0] / 0.82


def test_given_counts_are_kept():
    counts = [3, 3, 1, 2, 1]
    made = place([9, 7, 3, 3, 1], GpuSlots.equal(5, 2), replicas=counts)
    check_layout(made, np.array([[9.0, 7, 3, 3, 1]]), GpuSlots.equal(5, 2))
    held = [expert for gpu in made.placement.slots_LG[0] for expert in gpu]
    assert np.bincount(held).tolist() == counts
    assert made.max_load_L[0] >= made.bound_L[0] >= 23 / 5


def test_counts_by_size_divide_experts_of_medium_load_before_the_hottest_once_more():
    load_E = np.array([90.0, 40, 10])
    assert counts_by_size(load_E, 45.0, 2, 6) is None
    assert counts_by_size(load_E, 45.0, 5, 6).tolist() == [2, 2, 1]
    assert counts_by_size(load_E, 20.0, 9, 3).tolist() == [3, 3, 3], "no more than GPUs"


def test_spare_slots_go_to_hot_experts():
    """Few tokens can be balanced exactly without replicas; no more than those of idle experts would then fit into spare slots."""
    rng = np.random.default_rng(0)
    share_E = (1.0 + np.arange(128)) ** -0.8
    for _ in range(4):
        load_E = rng.multinomial(656, share_E / share_E.sum())
        count_E = place(load_E, GpuSlots.equal(8, 20)).placement.holds_EG(0).sum(axis=1)
        assert count_E.sum() == 160
        assert load_E[count_E > 1].mean() > 2 * load_E.mean()


def test_eplb_by_hand():
    assert eplb_counts(np.array([90.0, 40, 10]), 6, 6).tolist() == [3, 2, 1]
    packed = balanced(np.array([30.0, 30, 30, 20, 20, 10]), np.full(3, 2), np.random.default_rng(0))
    assert packed.tolist() == [0, 1, 2, 0, 1, 2]
    made = place([90, 40, 10], GpuSlots.equal(3, 2), "eplb")
    assert made.max_load_L[0] == 50
    twice = place([90, 1], GpuSlots.equal(2, 3), "eplb")  # five replicas of one expert on two GPUs
    assert twice.placement.slots_LG[0] == ((0,), (0, 1))
    assert twice.placement.split_EG(0)[0].tolist() == pytest.approx([0.6, 0.4])


def test_eplb_keeps_groups_on_their_node():
    load = [9, 8, 1, 1, 2, 2, 7, 7]
    made = place(load, GpuSlots.equal(4, 3, nodes=2, groups=4), "eplb")
    check_layout(made, np.array([load], dtype=float), GpuSlots.equal(4, 3))
    split_EG = made.placement.split_EG(0)
    on_first_E = split_EG[:, :2].sum(axis=1)
    assert sorted(set(np.round(on_first_E, 9))) == [0, 1]
    assert (on_first_E[::2] == on_first_E[1::2]).all()  # both of a group
    assert on_first_E @ load == pytest.approx(19)  # 17 + 2 on one node, 14 + 4 on the other


@pytest.mark.parametrize(
    ("load", "slots", "given", "error", "message"),
    [
        ([1] * 5, GpuSlots.equal(2, 2), {}, InfeasiblePlan, "5 experts need 5 slots; 2 GPUs have 4"),
        ([1, 2], GpuSlots.equal(2, 2), {"replicas": [1]}, BadInput, "expected 2 counts"),
        ([1, 2], GpuSlots.equal(2, 2), {"replicas": [0, 2]}, BadInput, "counts of 1 or more"),
        ([1, 2], GpuSlots.equal(2, 2), {"replicas": [3, 1]}, InfeasiblePlan, "3 replicas for 2 GPUs"),
        ([1, 2], GpuSlots.equal(2, 1), {"replicas": [2, 1]}, InfeasiblePlan, "3 replicas need as many slots; 2 GPUs have 2"),
        ([1, -2], GpuSlots.equal(2, 2), {}, BadInput, "zero or more, found -2"),
        ([1, np.nan], GpuSlots.equal(2, 2), {}, BadInput, "finite numbers, found nan"),
        ([], GpuSlots.equal(2, 2), {}, BadInput, "at least one layer and one expert"),
        ([[1, 2], [1]], GpuSlots.equal(2, 2), {}, BadInput, "loads: expected rows of one length"),
        ([1, 2], GpuSlots.equal(2, 2), {"method": "best"}, BadInput, "`method`: expected one of equal-split"),
        ([1, 2], GpuSlots.equal(2, 2, groups=3), {"method": "eplb"}, BadInput, "groups that divide 2 experts"),
        ([1, 2], GpuSlots(np.array([1, 2]), np.ones(2)), {"method": "eplb"}, BadInput, "equal slots and costs"),
    ],
)
def test_what_cannot_be(load, slots, given, error, message):
    with pytest.raises(error, match=message):
        place(load, slots, **given)


def test_slots_that_cannot_be():
    for wrong in (
        {"gpus": 0, "slots": 1},
        {"gpus": 2, "slots": 0},
        {"gpus": 3, "slots": 1, "nodes": 2},
        {"gpus": 1, "slots": 1, "groups": 0},
    ):
        with pytest.raises(BadInput):
            GpuSlots.equal(**wrong)
    with pytest.raises(BadInput, match="above zero"):
        GpuSlots(np.array([1]), np.array([0.0]))
