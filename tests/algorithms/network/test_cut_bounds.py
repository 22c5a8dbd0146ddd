"""Servers: the port or NIC that limits all-to-alls, prices of orders over NICs, and the judge's own count of them."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aurora.algorithms.alltoall.registry import ORDER
from aurora.algorithms.alltoall.schedule import order as schedule_of
from aurora.algorithms.check.plans import check_plan, check_schedule
from aurora.algorithms.network.port_bounds import fluid_bound
from aurora.algorithms.network.routes import cut_bound, route
from aurora.algorithms.network.switch import timed
from aurora.algorithms.workload.synthetic import draw_profile
from aurora.algorithms.workload.traffic import layer_traffic
from aurora.errors import BrokenPlan
from aurora.planner.plan import make_plan
from aurora.types import Cluster, Cut, Gpu, Network, PlanOptions, Servers, SyntheticOptions
from tests.strategies import profiles, traffics_on_ports, traffics_on_servers

PORT = 8.0
TWO_SERVERS = Servers.of("aabb", PORT, shared_nic=True)  # a NIC carries half of what its two ports do
PORTS = Network.equal(4, PORT)
SHARED = replace(PORTS, servers=TWO_SERVERS)
SERVER = np.array([0, 0, 1, 1])
ACROSS = np.where(SERVER[:, None] != SERVER, 40, 0)
CONFIG = {"num_local_experts": 8, "num_hidden_layers": 2, "num_experts_per_tok": 2, "hidden_size": 8, "intermediate_size": 8}
RNG = np.random.default_rng(0)


def worst_s(bytes_GG, network):
    """Seconds of the busiest port or NIC, counted one by one."""
    servers, n = network.servers, network.gpus
    took_s = [bytes_GG[gpu].sum() / network.out_Bps_G[gpu] for gpu in range(n)]
    took_s += [bytes_GG[:, gpu].sum() / network.in_Bps_G[gpu] for gpu in range(n)]
    for nic in set(servers.nic_G):
        own = [gpu for gpu in range(n) if servers.nic_G[gpu] == nic]
        others = [gpu for gpu in range(n) if servers.server_G[gpu] != servers.server_G[own[0]]]
        took_s += [bytes_GG[np.ix_(*ends)].sum() / servers.nic_Bps for ends in ((own, others), (others, own))]
    return max(took_s)


def test_through_shared_nics_everything_takes_twice_the_ports_bound():
    cut = cut_bound(ACROSS, SHARED)
    assert fluid_bound(ACROSS, PORTS) == pytest.approx(80 / 8)
    assert cut == Cut(160 / 8, 160, ("sending NIC of ranks 0, 1",))
    for method in ("all-at-once", "paced"):
        made = timed(ORDER[method](ACROSS, SHARED, rng=RNG), ACROSS, SHARED)
        assert made.makespan_s == pytest.approx(20)
        assert made.gap == pytest.approx(0)


def test_the_port_or_nic_that_limits_is_named():
    bytes_GG = np.zeros((4, 4), dtype=np.int64)
    bytes_GG[0, 1] = 8
    assert cut_bound(bytes_GG, SHARED) == Cut(1.0, 8, ("sending port of rank 0",))
    bytes_GG[1, 0] = bytes_GG[2, 0] = 8
    assert cut_bound(bytes_GG, SHARED) == Cut(2.0, 16, ("receiving port of rank 0",))
    own = replace(PORTS, servers=Servers.of("aabb", 1.0))
    assert cut_bound(bytes_GG, own) == Cut(8.0, 8, ("sending NIC of rank 2",))


@given(traffics_on_servers())
def test_the_cut_is_the_busiest_port_or_nic(case):
    assert cut_bound(*case).bound_s == pytest.approx(worst_s(*case))
    assert route(case[1]).seconds(case[0]) == pytest.approx(worst_s(*case))


@given(traffics_on_ports(), st.sampled_from([*ORDER]))
def test_one_server_is_the_big_switch(case, method):
    bytes_GG, network = case
    order = ORDER[method](bytes_GG, network, rng=np.random.default_rng(0))
    on_server = replace(network, servers=Servers((0,) * network.gpus, 0.1))
    one, big = (timed(order, bytes_GG, each) for each in (on_server, network))
    assert one.makespan_s == pytest.approx(big.makespan_s)
    assert one.cut.bound_s == pytest.approx(big.fluid_bound_s)
    assert one.gap == pytest.approx(big.gap)


def test_the_judge_sees_a_nic_above_its_rate():
    order = ORDER["all-at-once"](ACROSS, PORTS, rng=RNG)
    believed = timed(order, ACROSS, PORTS)  # as if the switch were big
    check_schedule(believed, ACROSS, PORTS)
    with pytest.raises(BrokenPlan, match=r"NIC of ranks \[0, 1\] sends 12 B/s at 0 s, it carries 8"):
        check_schedule(believed, ACROSS, SHARED)


def cluster_on(servers, rate=PORT):
    return Cluster("c", tuple(Gpu(f"g{i}", "cpu", 0, rate, rate, 10**9) for i in range(servers.gpus)), servers)


def test_the_api_orders_over_the_clusters_servers():
    made = schedule_of(ACROSS, cluster_on(TWO_SERVERS), "auto")
    assert made.makespan_s >= 20 * (1 - 1e-9)
    assert made.cut.bound_s == pytest.approx(20)
    assert schedule_of(ACROSS, Cluster("c", cluster_on(TWO_SERVERS).gpus)).cut is None


@settings(max_examples=20)
@given(profiles(4, max_layers=2), st.sampled_from(["openshop", "all-at-once", "auto"]))
def test_plans_are_timed_over_the_servers(drawn, method):
    machines = cluster_on(TWO_SERVERS)
    model = make_plan(machines, [drawn], PlanOptions(order=method)).models[0]
    for layer, order in enumerate(model.dispatch_L):
        there = layer_traffic(drawn, layer, model.placement.split_EG(layer)) * drawn.dispatch_bytes
        alone = timed(order, there, machines.network)
        assert model.dispatch_s_L[layer] == alone.makespan_s
        assert model.cut_L[layer] == cut_bound(there, SHARED)
        assert model.bound_s_L[layer] == pytest.approx(worst_s(there, SHARED))


def test_a_plan_over_servers_must_say_what_limits_it():
    p = draw_profile("zipf:1", CONFIG, SyntheticOptions(sources=4, window_tokens=32))
    plan = make_plan(cluster_on(TWO_SERVERS), [p])
    check_plan(plan)
    for cuts, message in (((), "expected a cut for each layer"), ((Cut(1e9, 1, ()),) * 2, "below the fluid bound or cut")):
        with pytest.raises(BrokenPlan, match=message):
            check_plan(replace(plan, models=(replace(plan.models[0], cut_L=cuts),)))
