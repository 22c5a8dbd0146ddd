"""Orders and placements of one's own are priced, checked, saved and loaded like ours."""

from dataclasses import replace

import numpy as np
import pytest

import aurora
from aurora.algorithms.alltoall.registry import ORDER
from aurora.algorithms.workload.synthetic import draw_profile
from aurora.errors import BadInput, BrokenPlan
from aurora.types import Order, Placement, PlanOptions, SyntheticOptions
from tests.conftest import cluster

CONFIG = {"num_local_experts": 8, "num_hidden_layers": 2, "num_experts_per_tok": 2, "hidden_size": 8, "intermediate_size": 8}
BYTES = [[0, 4, 6], [5, 0, 2], [3, 7, 0]]
TWO = cluster(1e6, 1e6)


def rotation(bytes_GG, network, *, rng):
    ranks = len(bytes_GG)
    return Order("rotation", [[i, (i + step) % ranks] for step in range(1, ranks) for i in range(ranks)])


def traffic(seed=0):
    return draw_profile("zipf:1", CONFIG, SyntheticOptions(sources=2, window_tokens=64, seed=seed))


def test_an_order_as_a_function_or_itself():
    made = aurora.order(BYTES, method=rotation)
    assert made == aurora.order(BYTES, method=rotation(BYTES, None, rng=None))
    assert made.makespan_s >= made.fluid_bound_s
    with pytest.raises(BrokenPlan, match="expected each of 6 ordered pairs once"):
        aurora.order(BYTES, method=Order("half", [[0, 1], [1, 0]]))
    with pytest.raises(BadInput, match="a function that returns an Order, found one that returns list"):
        aurora.order(BYTES, method=lambda *_, rng: [])


def test_registered_methods_plan_save_load_and_simulate(registries, tmp_path):
    aurora.register("order", "rotation", rotation)
    aurora.register("place", "even-odd", lambda load_E, slots_J, rng: np.arange(len(load_E)) % len(slots_J))
    plan = aurora.plan(TWO, traffic(), PlanOptions(order="rotation", place="even-odd", assign="contiguous"))
    assert plan.models[0].placement.slots_LG[0] == ((0, 2, 4, 6), (1, 3, 5, 7))
    aurora.save(plan, tmp_path / "plan.json")
    read = aurora.load(tmp_path / "plan.json")
    assert aurora.simulate(read, traffic(), orders="batch").seconds > 0
    assert aurora.evaluate(read, traffic(1)).replanned.options.place == "even-odd"
    del ORDER["rotation"]  # as in a process that has not registered it
    assert aurora.simulate(read, traffic()).seconds > 0
    with pytest.raises(BadInput, match=r"`order`: expected one of auto, .*found 'rotation'; `aurora.register` adds one"):
        aurora.simulate(read, traffic(), orders="batch")


def test_a_registered_name_is_taken_wherever_a_name_is(registries):
    aurora.register("order", "rotation", rotation)
    aurora.register("place", "even-odd", lambda load_E, slots_J, rng: np.arange(len(load_E)) % len(slots_J))
    assert aurora.order(BYTES, method="rotation") == aurora.order(BYTES, method=rotation)
    slots = aurora.GpuSlots.equal(2, 3)
    placed = aurora.place([5, 1, 1, 1], slots, "even-odd")
    assert placed.placement.slots_LG == (((0, 2), (1, 3)),)
    assert (placed.method, placed.max_load_L.tolist()) == ("even-odd", [6.0])
    for loads, how, said in (
        ([1] * 4, {"replicas": [2, 1, 1, 1]}, "`replicas`: expected one of each expert with `method` even-odd, found 2"),
        ([1] * 6, {"method": "first"}, r"`method` first: expected at most \[3, 3\] experts on GPUs, found \[6, 0\]"),
        ([1] * 6, {"method": "none"}, r"experts on GPUs, found float64 of shape \(6,\)"),
    ):
        aurora.register("place", "first", lambda load_E, slots_J, rng: np.zeros(len(load_E), dtype=int))
        aurora.register("place", "none", lambda load_E, slots_J, rng: load_E)
        with pytest.raises(BadInput, match=said):
            aurora.place(loads, slots, **({"method": "even-odd"} | how))
    with pytest.raises(BadInput, match=r"`method`: expected one of equal-split, eplb, even-odd.*, found 'odd'"):
        aurora.place([1, 1], slots, "odd")


def test_what_cannot_be_registered(registries):
    for given in (
        ("sort", "mine", rotation),
        ("order", "openshop", rotation),
        ("place", "auto", rotation),
        ("order", "a b", len),
    ):
        with pytest.raises(BadInput, match="expected"):
            aurora.register(*given)
    aurora.register("place", "all-on-one", lambda load_E, slots_J, rng: np.zeros(len(load_E), dtype=int))
    with pytest.raises(BadInput, match=r"`place` all-on-one: expected at most \[4, 4\] experts in groups, found \[8, 0\]"):
        aurora.plan(TWO, traffic(), PlanOptions(place="all-on-one"))


def test_a_placement_of_ones_own_has_the_price_that_a_plan_has(tmp_path):
    ours = aurora.plan(TWO, traffic())
    same = aurora.price(TWO, traffic(), ours.models[0].placement)
    assert same.objective_s == pytest.approx(ours.objective_s)
    assert same.models[0].dispatch_s_L.tolist() == ours.models[0].dispatch_s_L.tolist()
    mine = Placement((((0, 1, 2, 3), (4, 5, 6, 7)),) * 2)
    plan = aurora.price(TWO, traffic(), mine)
    assert ours.bound_s * (1 - 1e-9) <= plan.objective_s
    aurora.save(plan, tmp_path / "mine.json")
    read = aurora.load(tmp_path / "mine.json")
    assert (read.models[0].placement, read.options.place) == (mine, "given")
    assert aurora.simulate(read, traffic(), orders="batch").seconds > 0
    assert aurora.evaluate(read, traffic()).replanned.objective_s == ours.objective_s
    both = aurora.price(TWO, [traffic(), traffic(1)], [mine, mine])
    assert both.bound_s <= both.objective_s
    with pytest.raises(BadInput, match=r"expected \(layers, experts, GPUs\) \(2, 8, 2\), found \(1, 8, 2\)"):
        aurora.price(TWO, traffic(), mine.layer(0))
    small = replace(TWO, gpus=tuple(replace(gpu, memory_bytes=4000) for gpu in TWO.gpus))
    with pytest.raises(BrokenPlan, match="has 4000 bytes of memory"):
        aurora.price(small, traffic(), Placement((((0, 1, 2, 3, 4, 5, 6, 7), ()),) * 2))


def test_a_replaced_placement_keeps_no_stale_objective():
    plan = aurora.plan(TWO, traffic())
    other = Placement((((0, 1, 2, 3), (4, 5, 6, 7)),) * 2)
    stale = replace(plan, models=(replace(plan.models[0], placement=other),))
    with pytest.raises(BrokenPlan, match=r"price a changed placement anew with `aurora\.price`"):
        aurora.evaluate(stale, traffic())
