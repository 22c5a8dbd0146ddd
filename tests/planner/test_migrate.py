"""From the plan in force to the next: what moves, what it is worth, and what stays."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aurora.algorithms.check.plans import check_plan, check_schedule
from aurora.errors import BadInput
from aurora.planner.migrate import migrate
from aurora.planner.plan import make_plan
from aurora.types import Placement, PlanOptions
from tests.conftest import cluster
from tests.planner.scenarios.test_exclusive import LINEAR, drawn, priced, profile
from tests.strategies import clusters, profiles

OLD = PlanOptions("random", "random", "random")


@st.composite
def moves(draw):
    """(cluster, profiles of one or two models, options of the new plan)."""
    n = draw(st.integers(1, 4))
    machines = draw(clusters(n))
    found = [draw(profiles(n)) for _ in range(draw(st.integers(1, 2)))]
    if len(found) == 2:
        return machines, found, PlanOptions()
    slots = draw(st.sampled_from([None, -(-found[0].experts // n) + 1]))
    return machines, found, PlanOptions(slots_per_gpu=slots, aim=draw(st.sampled_from(["sum", "mean", "worst"])))


def arrivals(old, new, source):
    """Bytes of experts that a GPU holds now and did not before."""
    return sum(
        len(set(now) - set(before)) * source.expert_bytes
        for old_G, new_G in zip(old.slots_LG, new.slots_LG, strict=True)
        for before, now in zip(old_G, new_G, strict=True)
    )


@pytest.mark.full
@given(moves(), st.sampled_from([None, 0, 10, 35]))
@settings(max_examples=50)
def test_a_move_is_never_slower_and_carries_what_arrives(case, budget):
    machines, found, options = case
    old = replace(make_plan(machines, found, OLD), epoch=4)
    new = make_plan(machines, found, options)
    plan, moved = migrate(new, old, found, max_move_bytes=budget)
    check_plan(plan)
    assert plan.epoch == 5
    assert plan.options == new.options
    assert plan.objective_s == moved.moved_s <= moved.kept_s * (1 + 1e-9)
    assert moved.planned_s == pytest.approx(new.objective_s)
    if options.aim == "sum" and len(found) == 1:
        assert moved.moved_s == pytest.approx(priced(plan, found[0]))
        assert moved.kept_s == pytest.approx(priced(old, found[0]))
    bytes_in = sum(arrivals(a.placement, b.placement, p) for a, b, p in zip(old.models, plan.models, found, strict=True))
    assert moved.bytes_GG.sum() == bytes_in
    assert not moved.bytes_GG.diagonal().any()
    assert budget is None or bytes_in <= budget
    check_schedule(moved.schedule, moved.bytes_GG, machines.network)
    for index, source in enumerate(found):
        for layer in range(source.layers):
            if layer % min(p.layers for p in found) not in moved.layers:
                stays, stayed = (each.models[index].placement.split_EG(layer) for each in (plan, old))
                assert stays.tolist() == stayed.tolist()
    if budget is None:
        assert moved.moved_s <= moved.planned_s * (1 + 1e-9) or bytes_in < sum(
            arrivals(a.placement, b.placement, p) for a, b, p in zip(old.models, new.models, found, strict=True)
        )


def test_the_same_groups_on_gpus_of_other_names_stay():
    """Every rank has the same traffic, so names do not matter."""
    source = profile([[[[9, 7, 5, 3, 2, 1, 1, 1]] * 4]])
    new = make_plan(cluster(1e3, 1e3, 1e3, 1e3), [source])
    renamed = new.models[0].placement.relabelled(np.array([2, 3, 1, 0]))
    assert renamed != new.models[0].placement
    old = replace(new, models=(replace(new.models[0], placement=renamed),))
    plan, moved = migrate(new, old, [source])
    assert (moved.layers, moved.bytes_GG.sum()) == ((), 0)
    assert plan.models[0].placement == renamed
    assert moved.moved_s == pytest.approx(moved.kept_s)


def test_gpus_that_differ_do_not_stand_in_for_each_other():
    """The popular expert moves to the fast GPU, though with names exchanged nothing would."""
    source = profile([[[[9, 1], [9, 1]]]])
    fast = cluster(1e3, 1e3)
    machines = replace(fast, gpus=(fast.gpus[0], replace(fast.gpus[1], speed=0.25)))
    old = make_plan(machines, [source], PlanOptions("contiguous", "contiguous"))
    old = replace(old, models=(replace(old.models[0], placement=Placement((((1,), (0,)),))),))
    plan, moved = migrate(make_plan(machines, [source], PlanOptions("contiguous")), old, [source])
    assert plan.models[0].placement.slots_LG == (((0,), (1,)),)
    assert moved.layers == (0,)
    assert moved.bytes_GG.tolist() == [[0, 10], [10, 0]]


def test_the_budget_moves_the_layer_that_saves_most():
    """Two layers of two experts swap; the second has ten times the tokens."""
    source = profile([[[[9, 1], [9, 1]], [[90, 10], [90, 10]]]])
    machines = cluster(1e3, 1e3)
    machines = replace(machines, gpus=(machines.gpus[0], replace(machines.gpus[1], speed=0.25)))
    new = make_plan(machines, [source], PlanOptions("contiguous"))
    old = replace(new, models=(replace(new.models[0], placement=Placement((((1,), (0,)),) * 2)),))
    for budget, layers in ((None, (0, 1)), (40, (0, 1)), (39, (1,)), (20, (1,)), (19, ()), (0, ())):
        plan, moved = migrate(new, old, [source], max_move_bytes=budget)
        assert moved.layers == layers
        assert moved.bytes_GG.sum() == 20 * len(layers)
    assert plan.models[0].placement == old.models[0].placement


def test_layers_that_meet_move_together():
    """A model of two layers meets one of five: layers 0, 2 and 4 of the longer go with 0 of the shorter."""
    rng = np.random.default_rng(0)
    pair = [profile(rng.integers(1, 30, (1, layers, 4, 8)), name=f"l{layers}") for layers in (5, 2)]
    machines = cluster(1e2, 2e2, 1e2, 2e2)
    new, old = make_plan(machines, pair), make_plan(machines, pair, OLD)
    whole = int(migrate(new, old, pair)[1].bytes_GG.sum())
    plan, moved = migrate(new, old, pair, max_move_bytes=whole - 1)
    assert moved.layers in ((0, 2, 4), (1, 3))
    assert 0 < moved.bytes_GG.sum() < whole
    assert plan.objective_s < moved.kept_s


def test_layers_of_three_models_that_meet_by_way_of_another_move_together():
    """Layers 0 and 2 of the longest meet in a model of two layers, 0 and 3 in one of three, so all move or none does."""
    rng = np.random.default_rng(0)
    three = [profile(rng.integers(1, 30, (1, layers, 4, 8)), name=f"l{layers}") for layers in (6, 2, 3)]
    machines = cluster(1e2, 2e2, 1e2, 2e2)
    new, old = make_plan(machines, three), make_plan(machines, three, OLD)
    plan, moved = migrate(new, old, three)
    assert moved.layers == (0, 1, 2, 3, 4, 5)
    assert plan.objective_s < moved.kept_s
    stays, none = migrate(new, old, three, max_move_bytes=int(moved.bytes_GG.sum()) - 1)
    assert (none.layers, none.bytes_GG.sum()) == ((), 0)
    assert [m.placement for m in stays.models] == [m.placement for m in old.models]


def test_replicas_come_from_their_owners():
    source = profile([[[[90, 5, 5, 5]] * 4]])
    machines = cluster(1e6, 1e6, 1e6, 1e6)
    old, new = make_plan(machines, [source]), make_plan(machines, [source], PlanOptions(slots_per_gpu=2))
    plan, moved = migrate(new, old, [source])
    assert moved.bytes_GG.sum() == arrivals(old.models[0].placement, plan.models[0].placement, source) > 0
    kept, back = migrate(replace(old, epoch=9), new, [source])
    assert back.layers == ()
    assert kept.models[0].placement == new.models[0].placement
    assert kept.bound_s == old.bound_s  # replicas fit, so it held for them before
    assert kept.assignment_bound_s is None


def test_domains_and_aims_price_the_move():
    found = [drawn(seed, expert=LINEAR) for seed in range(4)]
    machines = cluster(1e3, 2e3, 1e3, 4e3)
    new = make_plan(machines, found[:1], PlanOptions(aim="cvar"), domains=found[1:])
    old = make_plan(machines, found[:1], OLD)
    plan, moved = migrate(new, old, found[:1], domains=found[1:])
    each = sorted(priced(plan, source) for source in found)
    assert moved.planned_s == pytest.approx(new.objective_s)
    assert plan.objective_s == pytest.approx(np.mean(each[-2:]))
    assert plan.bound_s == new.bound_s


def test_plans_that_cannot_follow_one_another():
    source = drawn(0)
    machines = cluster(1.0, 1.0, 1.0, 1.0)
    new = make_plan(machines, [source])
    others = [
        make_plan(cluster(1.0, 1.0, 1.0, 2.0), [source]),
        make_plan(machines, [drawn(0, experts=4)]),
        make_plan(machines, [replace(source, fingerprint="another")]),
        make_plan(machines, [source, source]),
    ]
    for old in others:
        with pytest.raises(BadInput, match="`previous`: expected a plan for the same cluster and the same models"):
            migrate(new, old, [source])
    with pytest.raises(BadInput, match="`max_move_bytes`: expected zero or more, found -1"):
        migrate(new, new, [source], max_move_bytes=-1)
