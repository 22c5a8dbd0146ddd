"""Whole plans: scenarios, bounds, strategies, and inputs that do not fit."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import aurora
from aurora.algorithms import layers_in_threads
from aurora.algorithms.alltoall import schedule as alltoall
from aurora.algorithms.alltoall.registry import ORDER
from aurora.algorithms.check.plans import check_plan, check_schedule
from aurora.algorithms.placement.assignment import ASSIGN
from aurora.algorithms.placement.colocation import COLOCATE, JOINT
from aurora.algorithms.placement.cost_model import layer_costs
from aurora.algorithms.placement.grouping import PLACE
from aurora.algorithms.placement.phase_times import exclusive_s
from aurora.algorithms.workload.traffic import layer_traffic
from aurora.errors import BadInput, InfeasiblePlan
from aurora.planner.plan import make_plan
from aurora.types import Curve, Network, PlanOptions, Profile
from tests.conftest import cluster
from tests.strategies import clusters, profiles


def profile(tokens, *, rate=0.0, name="m", expert_bytes=10, other_bytes=10):
    curve = Curve(np.array([1.0, 1001.0]), np.array([rate, 1001 * rate]))
    zero = Curve(np.array([1.0]), np.array([0.0]))
    curves = {"reference": {"gate": zero, "expert": curve, "aggregate": zero}}
    return Profile(name, "print", np.array(tokens), 1, 1, 1, expert_bytes, other_bytes, curves)


TWO = st.integers(1, 4).flatmap(lambda n: st.tuples(clusters(n), profiles(n), profiles(n)))


@given(TWO, st.sampled_from(sorted(PLACE)), st.sampled_from(["auto", *ASSIGN]), st.sampled_from(["auto", *COLOCATE]),
       st.sampled_from(sorted(ORDER)), st.booleans())  # fmt: skip
def test_every_combination_gives_a_plan_that_stands(case, place, assign, colocate, order, both):
    machines, a, b = case
    chosen = [a, b] if both else [a]
    if colocate in JOINT:
        assign = "auto"
    plan = make_plan(machines, chosen, PlanOptions(place, assign, colocate, order, seed=3))
    check_plan(plan)
    assert plan.objective_s >= plan.bound_s * (1 - 1e-9)
    if plan.assignment_bound_s is not None:
        assert plan.objective_s >= plan.assignment_bound_s * (1 - 1e-9)
        assert plan.assignment_bound_s >= plan.bound_s * (1 - 1e-9)
    assert plan.scenario == f"{'colocated' if both else 'exclusive'}, {'equal' if machines.equal else 'mixed'} GPUs"
    for model, source in zip(plan.models, chosen, strict=True):
        assert model.placement.experts == source.experts
        assert len(model.dispatch_L) == source.layers
        sizes = {len(held) for layer in model.placement.slots_LG for held in layer}
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("order", ["random", "openshop", "openshop-best"])
def test_plans_do_not_depend_on_the_number_of_threads(monkeypatch, order):
    source, told = profile(np.random.default_rng(1).poisson(9.0, (1, 5, 4, 8))), []

    def made(cores, **more):
        monkeypatch.setattr(layers_in_threads, "_cores", lambda: cores)
        return make_plan(cluster(*[1.0] * 4), [source], PlanOptions("random", order=order, seed=5), **more)

    assert made(1) == made(3, progress=lambda *each: told.append(each))
    assert [each for each in told if each[0] == "ordering all-to-alls"] == [("ordering all-to-alls", n, 5) for n in range(6)]


def test_auto_takes_the_shorter_order_on_mixed_ports():
    """One fast sender, two slow receivers: one at a time takes twice as long as both at once."""
    machines = cluster(2.0, 1.0, 1.0)
    source = profile([[[[0, 8, 8], [0, 0, 0], [0, 0, 0]]]])
    keep = PlanOptions("contiguous", "contiguous")
    chosen, ordered = (make_plan(machines, [source], replace(keep, order=o)).models[0] for o in ("auto", "openshop"))
    assert chosen.dispatch_L[0].method == "all-at-once"
    assert chosen.dispatch_s_L[0] == pytest.approx(8)
    assert ordered.dispatch_s_L[0] == pytest.approx(16)


def test_many_ranks_keep_the_first_order_that_is_near_its_bound(monkeypatch):
    source = profile([[[[0, 8, 8], [0, 0, 0], [0, 0, 0]]]])
    monkeypatch.setattr(alltoall, "MANY_RANKS", 3)
    for near, method in ((1.01, "openshop-best"), (0.99, "all-at-once")):
        monkeypatch.setattr(alltoall, "NEAR", near)
        plan = make_plan(cluster(2.0, 1.0, 1.0), [source], PlanOptions("contiguous", "contiguous"))
        assert plan.models[0].dispatch_L[0].method == method


def test_baselines_order_each_direction_by_its_own_senders():
    source = profile(np.random.default_rng(0).integers(1, 99, (1, 1, 4, 4)))
    model = make_plan(cluster(1.0, 1.0, 1.0, 1.0), [source], PlanOptions(order="sjf")).models[0]
    assert (model.combine_L[0].sends_open, model.combine_L[0].recvs_open) == (1, 3)
    dense = make_plan(cluster(1.0, 1.0, 1.0, 1.0), [source], PlanOptions(order="openshop")).models[0]
    assert dense.combine_L[0].pairs_X2.tolist() == dense.dispatch_L[0].reversed.pairs_X2.tolist()


def test_what_places_both_models_decides_the_assignment_too():
    rng = np.random.default_rng(0)
    pair = [profile(rng.integers(1, 9, (1, 1, 2, 2))) for _ in range(2)]
    assert make_plan(cluster(1.0, 2.0), pair).options.colocate == "local-search"
    assert make_plan(cluster(1.0, 2.0), pair, PlanOptions(assign="random")).options.colocate == "matching"
    for name in JOINT:
        with pytest.raises(BadInput, match=f"`assign`: random has no effect with `colocate` {name}"):
            make_plan(cluster(1.0, 2.0), pair, PlanOptions(assign="random", colocate=name))


def test_equal_gpus_can_differ_in_nothing_that_matters():
    assert cluster(2.0, 2.0).equal
    assert not cluster(2.0, 3.0).equal
    slower = replace(cluster(2.0, 2.0).gpus[0], speed=0.5)
    assert not replace(cluster(2.0, 2.0), gpus=(slower, cluster(2.0).gpus[0])).equal


def test_balanced_groups_are_lighter_than_contiguous():
    load = np.array([9, 8, 7, 1, 1, 1])
    room = np.array([2, 2, 2])

    def heaviest(name):
        return np.bincount(PLACE[name](load, room, np.random.default_rng(0)), load).max()

    assert heaviest("balanced") == 10
    assert heaviest("contiguous") == 17


def test_local_tokens_do_not_travel():
    tokens = np.array([[[[5, 1], [2, 7]]]])
    assert layer_traffic(profile(tokens), 0, np.eye(2)).tolist() == [[0, 1], [2, 0]]
    assert layer_traffic(profile(tokens), 0, np.eye(2)[[0, 0]]).tolist() == [[0, 0], [9, 0]]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"tokens": [[[[1, 1]] * 3]]}, BadInput, "come from 3 source ranks, but cluster 'test' has 2 GPUs"),
        ({"other_bytes": 2 * 10**9}, InfeasiblePlan, "gpu 'g0': 1000000000 bytes of memory, but the weights outside"),
        ({"expert_bytes": 7 * 10**8, "tokens": [[[[1] * 4] * 2]]}, InfeasiblePlan, "has 2 expert slots a layer for 'm', its 4"),
    ],
)
def test_inputs_that_do_not_fit(change, error, message):
    tokens = change.pop("tokens", [[[[1, 1], [1, 1]]]])
    with pytest.raises(error, match=message):
        make_plan(cluster(1.0, 1.0), [profile(tokens, **change)])


def test_a_clusters_name_is_no_cluster():
    with pytest.raises(BadInput, match=r"`cluster`: expected a Cluster, as aurora\.load reads it, found 'demo-4'"):
        aurora.plan("demo-4", profile([[[[1, 1]]]]))


@pytest.mark.full
@given(st.integers(1, 3).flatmap(lambda n: st.tuples(clusters(n), *[profiles(n, max_layers=2)] * 3)))
def test_three_models_take_what_the_busiest_resource_does(case):
    """Every term of the objective is counted anew from the placement of single experts."""
    machines, *sources = case
    plan = make_plan(machines, sources)
    assert (plan.objective, plan.options.colocate, plan.scenario.split(",")[0]) == (
        "busiest-resource",
        "local-search",
        "colocated",
    )
    total = 0.0
    for layer in range(max(source.layers for source in sources)):
        at = [layer % source.layers for source in sources]
        times = [
            layer_costs(machines, source, l).grouped(model.placement.gpu_E(l)).times_alone(np.arange(len(machines)))
            for source, model, l in zip(sources, plan.models, at, strict=True)
        ]
        sends, receives = sum(t.port_4G[0] + t.port_4G[2] for t in times), sum(t.port_4G[1] + t.port_4G[3] for t in times)
        compute = sum(t.gate_G + t.expert_G + t.aggregate_G for t in times)
        total += max(*map(exclusive_s, times), sends.max(), receives.max(), compute.max())
    assert plan.objective_s == pytest.approx(total)
    assert plan.bound_s <= plan.objective_s * (1 + 1e-9)
    assert plan.assignment_bound_s is None


def test_three_models_must_fit_into_memory():
    machines = cluster(1.0, 1.0)
    small = replace(machines, gpus=tuple(replace(gpu, memory_bytes=60) for gpu in machines.gpus))
    one, larger = (profile([[[[1, 1], [1, 1]]]], other_bytes=size) for size in (10, 11))
    assert len(make_plan(small, [one] * 3).models) == 3
    with pytest.raises(InfeasiblePlan, match=r"60 bytes of memory, but an equal share of .* experts of 3 models needs 61"):
        make_plan(small, [one, one, larger])


def test_the_api_orders_a_bare_matrix():
    bytes_GG = np.array([[9, 4, 6], [5, 0, 2], [3, 7, 0]])
    made = aurora.order(bytes_GG, cluster(2.0, 2.0, 2.0))
    off_diagonal = bytes_GG - np.diag(np.diag(bytes_GG))
    check_schedule(made, off_diagonal, Network.equal(3, 2.0))
    assert made.makespan_s == pytest.approx(11 / 2)


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        ([[0, 1]], "square"),
        ([[0.0, 1.5], [1.0, 0.0]], "expected integers, found float64"),
        ([[0, -1], [0, 0]], "zero or more, found -1"),
        (np.array([[0, 2**62], [2**62, 0]]), "more than 64 bits"),
        ([[0, 1], [1]], "expected rows of one length"),
        (np.array([[0, 2**63 + 1], [0, 0]], dtype=np.uint64), "does not fit into 64 bits"),
        ([[0, 1, 1]] * 3, "has 2 GPUs, the traffic matrix 3 rows"),
    ],
)
def test_bad_traffic(matrix, message):
    with pytest.raises(BadInput, match=message):
        aurora.order(matrix, cluster(1.0, 1.0))
