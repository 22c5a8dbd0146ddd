"""Fabrics: cuts against the LP and by hand, prices of orders on links, and the judge's own count of them."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aurora.algorithms.alltoall.registry import ORDER
from aurora.algorithms.alltoall.schedule import order as schedule_of
from aurora.algorithms.check.plans import check_plan, check_schedule
from aurora.algorithms.network.bounds import fluid_bound
from aurora.algorithms.network.routes import cut_bound, route
from aurora.algorithms.network.switch import timed
from aurora.algorithms.workload.synthetic import draw_profile
from aurora.algorithms.workload.traffic import layer_traffic
from aurora.errors import BrokenPlan
from aurora.planner.plan import make_plan
from aurora.types import Cluster, Cut, Fabric, Gpu, Link, Network, Order, PlanOptions, SyntheticOptions, leaf_spine
from tests.algorithms.network.fluid_optimum import fluid_optimum
from tests.algorithms.network.rates import fair_rates
from tests.strategies import profiles, traffics_on_fabrics, traffics_on_ports

PORT = 8.0
TWO_LEAVES = leaf_spine(["a", "a", "b", "b"], [PORT] * 4, [PORT] * 4, 2, PORT / 2)  # 2:1 oversubscribed
PORTS = Network.equal(4, PORT)
LEAVES = replace(PORTS, fabric=TWO_LEAVES)
LEAF = np.array([0, 0, 1, 1])
ACROSS = np.where(LEAF[:, None] != LEAF, 40, 0)
INSIDE = np.where((LEAF[:, None] == LEAF) & ~np.eye(4, dtype=bool), 40, 0)
CONFIG = {"num_local_experts": 8, "num_hidden_layers": 2, "num_experts_per_tok": 2, "hidden_size": 8, "intermediate_size": 8}
KINDS = ("tree", "leaf-spine", "graph")
RNG = np.random.default_rng(0)


def ring(switches, around, down):
    """GPU i on switch i by a link of `down`, switches in a ring of links of `around`, everything both ways."""
    names = [f"s{i}" for i in range(switches)]
    cables = [(*pair, down) for pair in enumerate(names)]
    cables += [(*pair, around) for pair in zip(names, names[1:] + names[:1], strict=True)]
    return Fabric(switches, tuple(Link(*ends, rate) for a, b, rate in cables for ends in ((a, b), (b, a))))


def brute_force(bytes_GG, network):
    """The worst cut of all where GPUs have links to switches only: every set of senders, of receivers and of switches."""
    fabric, out, into = network.fabric, network.out_Bps_G, network.in_Bps_G
    n, names = fabric.gpus, fabric.switches
    subsets = [np.array(list(product((0, 1), repeat=size)), dtype=bool) for size in (n, n, len(names))]
    worst = 0.0
    for sends, recvs, switches in product(*subsets):
        inside = dict(zip(names, switches, strict=True))
        room = sum(k.Bps for k in fabric.links if inside.get(k.src) and not inside.get(k.dst, True))
        for gpu in range(n):  # cut at the port or at the links, whichever carries less
            away = sum(k.Bps for k in fabric.links if k.src == gpu and not inside[k.dst])
            here = sum(k.Bps for k in fabric.links if k.dst == gpu and inside[k.src])
            room += min(out[gpu], away) * sends[gpu] + min(into[gpu], here) * (not recvs[gpu])
        crossing = bytes_GG[np.ix_(sends, ~recvs)].sum()
        worst = max(worst, crossing / room if crossing else 0.0)
    return worst


def test_across_a_two_to_one_fabric_everything_takes_twice_the_ports_bound():
    cut = cut_bound(ACROSS, LEAVES)
    assert fluid_bound(ACROSS, PORTS) == pytest.approx(80 / 8)
    assert cut.bound_s == pytest.approx(160 / 8)  # 4 x 40 bytes over two uplinks of 4
    assert (cut.load_bytes, set(cut.links)) in [
        (160, {f"leaf -> spine-{i}".replace("leaf", leaf) for i in (0, 1)}) for leaf in "ab"
    ] + [(160, {f"spine-{i} -> {leaf}" for i in (0, 1)}) for leaf in "ab"]
    assert fluid_optimum(ACROSS, LEAVES) == pytest.approx(20)
    for method in ("all-at-once", "paced"):
        made = timed(ORDER[method](ACROSS, LEAVES, rng=RNG), ACROSS, LEAVES)
        assert made.makespan_s == pytest.approx(20)
        assert made.gap == pytest.approx(0)


def test_inside_a_leaf_nothing_changes():
    assert cut_bound(INSIDE, LEAVES).bound_s == fluid_bound(INSIDE, PORTS)
    for method, maker in ORDER.items():
        order = maker(INSIDE, PORTS, rng=np.random.default_rng(0))
        on_links, on_ports = (timed(order, INSIDE, network) for network in (LEAVES, PORTS))
        assert on_links.makespan_s == pytest.approx(on_ports.makespan_s), method


def test_a_ring_of_four_switches_is_bound_by_its_bisection():
    """Each sends 6 to each: 24 cross each half's two links of 2; single switches only 18 over two."""
    bytes_GG = 6 * (1 - np.eye(4, dtype=np.int64))
    network = replace(Network.equal(4, 100.0), fabric=ring(4, 2.0, 100.0))
    cut = cut_bound(bytes_GG, network)
    assert (cut.bound_s, cut.load_bytes) == (pytest.approx(24 / 4), 24)
    assert len(cut.links) == 2
    assert fluid_optimum(bytes_GG, network) == pytest.approx(6)


def test_traffic_is_divided_equally_over_all_shortest_paths():
    """Opposite corners of a ring of four have two paths, neighbours one; so the neighbour's flow takes the shared link first."""
    network = replace(Network.equal(4, 100.0), fabric=ring(4, 2.0, 2.0))
    assert fair_rates(np.array([0]), np.array([2]), network).tolist() == [2.0]  # its own link of 2, half each way round
    both = fair_rates(np.array([0, 1]), np.array([2, 2]), network)
    assert both == pytest.approx([1, 1])  # what they share is the last link: 2


def test_links_that_no_set_of_vertices_cuts():
    """Two nodes of two GPUs, fast inside, one rail a GPU number; what changes node and rail must take its rail's one uplink.

    No vertex set parts just those pairs from the rest, but the uplink does: 2 x 12 bytes over 2.
    """
    cables = [("rail-0", "spine", 2.0), ("rail-1", "spine", 2.0)]
    for gpu in range(4):
        cables += [(gpu, f"inside-{gpu // 2}", 100.0), (gpu, f"nic-{gpu}", 10.0), (f"nic-{gpu}", f"rail-{gpu % 2}", 10.0)]
    fabric = Fabric(4, tuple(Link(*way, rate) for a, b, rate in cables for way in ((a, b), (b, a))))
    bytes_GG = 12 * (1 - np.eye(4, dtype=np.int64))
    network = replace(Network.equal(4, 100.0), fabric=fabric)
    cut = cut_bound(bytes_GG, network)
    assert (cut.bound_s, cut.load_bytes) == (pytest.approx(12), 24)
    assert fluid_optimum(bytes_GG, network) == pytest.approx(12)


def test_gpus_do_not_forward():
    """0 - 1 - 2 by direct cables would need GPU 1 to forward; with the long way round by switches it need not."""
    links = [Link(0, 1, 9.0), Link(1, 2, 9.0)]
    for gpu in range(3):
        links += [Link(gpu, "s", 1.0), Link("s", gpu, 1.0)]
    network = replace(Network.equal(3, 100.0), fabric=Fabric(3, tuple(links)))
    bytes_GG = np.array([[0, 18, 4], [0, 0, 0], [0, 0, 0]])
    made = timed(ORDER["all-at-once"](bytes_GG, network, rng=RNG), bytes_GG, network)
    assert sorted(made.end_s_X) == pytest.approx([2, 4])
    assert fluid_optimum(bytes_GG, network) == pytest.approx(4)


@given(st.sampled_from(["tree", "leaf-spine"]).flatmap(traffics_on_fabrics))
def test_on_trees_and_leaf_spine_the_cut_is_the_optimum(case):
    assert cut_bound(*case).bound_s == pytest.approx(fluid_optimum(*case), rel=1e-6)


@given(traffics_on_fabrics("graph"))
def test_a_cut_is_below_the_optimum_and_that_below_shortest_paths(case):
    bytes_GG, network = case
    cut, optimum = cut_bound(*case), fluid_optimum(*case)
    assert fluid_bound(bytes_GG, network) <= cut.bound_s * (1 + 1e-9)
    assert cut.bound_s <= optimum * (1 + 1e-6)
    assert optimum <= route(network).seconds(bytes_GG) * (1 + 1e-6)


@pytest.mark.full
@settings(max_examples=25)
@given(traffics_on_fabrics("graph", max_ranks=3))
def test_no_cut_is_worse_than_the_worst(case):
    assert cut_bound(*case).bound_s <= brute_force(*case) * (1 + 1e-9)


@settings(max_examples=40)
@given(st.sampled_from(KINDS).flatmap(lambda kind: traffics_on_fabrics(kind, startups=(0.0, 0.3))), st.sampled_from([*ORDER]))
def test_every_order_keeps_to_links_and_bounds(case, method):
    bytes_GG, network = case
    order = ORDER[method](bytes_GG, network, rng=np.random.default_rng(0))
    made = timed(order, bytes_GG, network)
    check_schedule(made, bytes_GG, network)
    assert made.makespan_s >= made.cut.bound_s * (1 - 1e-9)
    assert made.gap >= -1e-9


@given(st.sampled_from(KINDS).flatmap(traffics_on_fabrics), st.sampled_from(("all-at-once", "openshop")))
def test_the_judge_counts_links_like_the_price(case, method):
    """Behind fast ports some link is always full, so the same schedule breaks links that are one percent slower."""
    bytes_GG, fabric = case[0], case[1].fabric
    network = replace(Network.equal(len(bytes_GG), 1000.0), fabric=fabric)
    made = timed(ORDER[method](bytes_GG, network, rng=RNG), bytes_GG, network)
    slower = replace(fabric, links=tuple(replace(link, Bps=0.99 * link.Bps) for link in fabric.links))
    check_schedule(made, bytes_GG, network)
    if bytes_GG.any():
        with pytest.raises(BrokenPlan, match="its link carries"):
            check_schedule(made, bytes_GG, replace(network, fabric=slower))


def test_one_gpu_needs_no_links():
    alone = np.zeros((1, 1), dtype=np.int64), replace(Network.equal(1), fabric=Fabric(1, ()))
    made = timed(ORDER["openshop"](*alone, rng=RNG), *alone)
    assert (made.makespan_s, made.cut.bound_s, made.gap) == (0, 0, 0)


@given(traffics_on_ports(), st.sampled_from([*ORDER]))
def test_a_star_of_fast_links_is_the_big_switch(case, method):
    bytes_GG, network = case
    links = [Link(*ends, 10.0) for gpu in range(network.gpus) for ends in ((gpu, "hub"), ("hub", gpu))]
    order = ORDER[method](bytes_GG, network, rng=np.random.default_rng(0))
    on_links = replace(network, fabric=Fabric(network.gpus, tuple(links)))
    star, big = (timed(order, bytes_GG, each) for each in (on_links, network))
    assert star.makespan_s == pytest.approx(big.makespan_s)
    assert star.cut.bound_s == pytest.approx(big.fluid_bound_s)
    assert star.gap == pytest.approx(big.gap)


@given(traffics_on_fabrics("graph"))
def test_rates_fill_links_and_favour_nobody(case):
    """Each flow has a full port or link on which no other flow is faster."""
    bytes_GG, network = case
    src, dst = np.nonzero(bytes_GG)
    routes = route(network)
    rates = fair_rates(src, dst, network)
    use, share = routes.use_GGK[src, dst], routes.share_GGK[src, dst]
    used = np.bincount(use.ravel(), (share * rates[:, None]).ravel(), minlength=len(routes.capacity_Bps_R))
    assert (used <= routes.capacity_Bps_R * (1 + 1e-9)).all()
    for flow in range(len(src)):
        full = [
            r
            for r, part in zip(use[flow], share[flow], strict=True)
            if part and used[r] >= routes.capacity_Bps_R[r] * (1 - 1e-9)
        ]
        assert any(rates[flow] >= rates[((use == r) & (share > 0)).any(axis=1)].max() * (1 - 1e-9) for r in full)


def test_the_judge_sees_a_link_above_its_rate():
    order = ORDER["all-at-once"](ACROSS, PORTS, rng=RNG)
    believed = timed(order, ACROSS, PORTS)  # as if the switch were big
    check_schedule(believed, ACROSS, PORTS)
    with pytest.raises(BrokenPlan, match="a -> spine-0 takes 6 B/s at 0 s, its link carries 4"):
        check_schedule(believed, ACROSS, LEAVES)


def cluster_on(fabric, rate=PORT):
    return Cluster("c", tuple(Gpu(f"g{i}", "cpu", 0, rate, rate, 10**9) for i in range(fabric.gpus)), fabric)


def test_the_api_orders_on_the_clusters_fabric():
    made = schedule_of(ACROSS, cluster_on(TWO_LEAVES), "auto")
    assert made.makespan_s >= 20 * (1 - 1e-9)
    assert made.cut.bound_s == pytest.approx(20)
    assert schedule_of(ACROSS, Cluster("c", cluster_on(TWO_LEAVES).gpus)).cut is None


@settings(max_examples=20)
@given(profiles(4, max_layers=2), st.sampled_from(["openshop", "all-at-once", "auto"]))
def test_plans_are_timed_on_the_fabric(drawn, method):
    machines = cluster_on(TWO_LEAVES)
    model = make_plan(machines, [drawn], PlanOptions(order=method)).models[0]
    for layer, order in enumerate(model.dispatch_L):
        there = layer_traffic(drawn, layer, model.placement.split_EG(layer)) * drawn.dispatch_bytes
        alone = timed(order, there, machines.network)
        assert model.dispatch_s_L[layer] == alone.makespan_s
        assert model.cut_L[layer] == cut_bound(there, LEAVES)
        assert model.bound_s_L[layer] == pytest.approx(fluid_optimum(there, LEAVES), rel=1e-6)


def test_a_plan_on_a_fabric_must_say_what_limits_it():
    p = draw_profile("zipf:1", CONFIG, SyntheticOptions(sources=4, window_tokens=32))
    plan = make_plan(cluster_on(TWO_LEAVES), [p])
    check_plan(plan)
    for cuts, message in (((), "expected a cut for each layer"), ((Cut(1e9, 1, ()),) * 2, "below the fluid bound or cut")):
        with pytest.raises(BrokenPlan, match=message):
            check_plan(replace(plan, models=(replace(plan.models[0], cut_L=cuts),)))


def test_one_to_one_orders_share_links():
    """Two pairs across at once, one partner each: 4 + 4 of uplinks carry both at 4, not at the ports' 8."""
    order = Order(
        "one",
        np.array([[0, 2], [1, 3], *((i, j) for i in range(4) for j in range(4) if i != j and (i, j) not in ((0, 2), (1, 3)))]),
    )
    bytes_GG = np.zeros((4, 4), dtype=np.int64)
    bytes_GG[0, 2] = bytes_GG[1, 3] = 40
    made = timed(order, bytes_GG, LEAVES)
    assert made.rate_Bps_X.tolist() == pytest.approx([4, 4])
    assert made.makespan_s == pytest.approx(10)
