"""Servers: forwarded bytes arrive, NICs are level, and the schedule is near the two-tier bound."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from aurora.errors import BadInput, BrokenPlan
from aurora.planner.alltoall.schedule import order
from aurora.planner.alltoall.two_tier import two_tier_schedule
from aurora.planner.check.plans import check_hops
from aurora.planner.network.bounds import two_tier_bound
from aurora.types import Cluster, Gpu
from aurora.types import servers as fabric_of_servers

RNG = np.random.default_rng(0)


@st.composite
def servers(draw):
    """(bytes_GG, node_G): GPUs of a server need not be neighbours."""
    nodes, width = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    n = nodes * width
    bytes_GG = draw(arrays(np.int64, (n, n), elements=st.integers(0, 1000)))
    np.fill_diagonal(bytes_GG, 0)
    node_G = np.array(draw(st.permutations([node for node in range(nodes) for _ in range(width)])))
    return bytes_GG, node_G


@given(servers(), st.sampled_from([1.0, 9.0]))
def test_every_byte_arrives_and_no_port_is_above_its_rate(case, inside):
    bytes_GG, node_G = case
    n = len(node_G)
    made = two_tier_schedule(bytes_GG, node_G, np.ones(n), inside, np.zeros(n), rng=RNG)
    check_hops(made, bytes_GG, node_G, np.ones(n), inside)
    assert made.makespan_s >= made.fluid_bound_s * (1 - 1e-9)


@given(servers())
def test_all_nics_of_a_server_send_the_same_to_each_other_server(case):
    bytes_GG, node_G = case
    made = two_tier_schedule(bytes_GG, node_G, np.ones(len(node_G)), 9.0, np.zeros(len(node_G)), rng=RNG)
    at, to = made.hop_X2.T
    for a in set(node_G):
        for b in set(node_G) - {a}:
            across = (node_G[at] == a) & (node_G[to] == b)
            sent = [made.bytes_X[across & (at == gpu)].sum() for gpu in np.flatnonzero(node_G == a)]
            got = [made.bytes_X[across & (to == gpu)].sum() for gpu in np.flatnonzero(node_G == b)]
            assert max(sent) - min(sent) <= 1
            assert sent == got


def test_one_busy_gpu_uses_all_nics_of_its_server():
    """80 bytes from one GPU of two: both NICs carry 40, after 40 moved inside at ten times the rate; then all is handed over."""
    bytes_GG = np.zeros((4, 4), dtype=np.int64)
    bytes_GG[0, 2] = 80
    made = two_tier_schedule(bytes_GG, np.array([0, 0, 1, 1]), np.ones(4), 10.0, np.zeros(4), rng=RNG)
    hops = sorted(zip(made.hop_X2.tolist(), made.bytes_X.tolist(), made.start_s_X.tolist(), made.end_s_X.tolist(), strict=True))
    assert hops == [([0, 1], 40, 0.0, 4.0), ([0, 2], 40, 4.0, 44.0), ([1, 3], 40, 4.0, 44.0), ([3, 2], 40, 44.0, 48.0)]
    assert made.fluid_bound_s == 40


def test_the_judge_finds_hops_that_cannot_be():
    bytes_GG = np.zeros((4, 4), dtype=np.int64)
    bytes_GG[0, 2] = 80
    ports = (np.array([0, 0, 1, 1]), np.ones(4), 10.0)
    good = two_tier_schedule(bytes_GG, *ports, np.zeros(4), rng=RNG)
    with pytest.raises(BrokenPlan, match="expected 81 bytes at rank 2"):
        check_hops(good, bytes_GG + (bytes_GG > 0), *ports)
    with pytest.raises(BrokenPlan, match="rank 0 sends inside its server 10 B/s at 0 s, its port carries 5"):
        check_hops(good, bytes_GG, *ports[:2], 5.0)
    early = replace(
        good, start_s_X=good.start_s_X - 2.0 * (good.hop_X2[:, 0] == 1), end_s_X=good.end_s_X - 2.0 * (good.hop_X2[:, 0] == 1)
    )
    with pytest.raises(BrokenPlan, match="rank 1 sends bytes of 0 -> 2 that it does not have"):
        check_hops(early, bytes_GG, *ports)
    with pytest.raises(BrokenPlan, match="rate and time"):
        check_hops(replace(good, rate_Bps_X=good.rate_Bps_X / 2), bytes_GG, *ports)


def test_gpus_that_share_a_nic_have_it_once():
    """80 bytes of each of two GPUs leave by one NIC of 1 B/s: 160 s, and a NIC a GPU takes half."""
    gpus = tuple(Gpu(f"g{i}", "x", i // 2, 10.0, 10.0, 10**9) for i in range(4))
    bytes_GG = np.zeros((4, 4), dtype=np.int64)
    bytes_GG[0, 2] = bytes_GG[1, 3] = 80
    for shared, seconds in ((False, 80.0), (True, 160.0)):
        fabric = fabric_of_servers([0, 0, 1, 1], [10.0] * 4, [10.0] * 4, 1.0, shared)
        schedule = order(bytes_GG, Cluster("test", gpus, fabric), method="two-tier")
        assert schedule.fluid_bound_s == pytest.approx(seconds)
        assert schedule.makespan_s == pytest.approx(seconds)
        check_hops(schedule, bytes_GG, np.array([0, 0, 1, 1]), np.ones(4), 10.0, shared)
    apart = order(bytes_GG, Cluster("test", gpus, fabric_of_servers([0, 0, 1, 1], [10.0] * 4, [10.0] * 4, 1.0)), "two-tier")
    with pytest.raises(BrokenPlan, match="server 0 sends by its NIC 2 B/s at 0 s, its port carries 1"):
        check_hops(apart, bytes_GG, np.array([0, 0, 1, 1]), np.ones(4), 10.0, shared_nic=True)


@given(servers(), st.sampled_from([1.0, 9.0]))
def test_a_shared_nic_is_never_above_its_rate(case, inside):
    bytes_GG, node_G = case
    n, members = len(node_G), int(np.bincount(node_G).max())
    made = two_tier_schedule(bytes_GG, node_G, np.full(n, 1 / members), inside, np.zeros(n), rng=RNG)
    check_hops(made, bytes_GG, node_G, np.ones(n), inside, shared_nic=True)
    assert made.fluid_bound_s == pytest.approx(two_tier_bound(bytes_GG, node_G, 1.0, inside, shared_nic=True))


def test_servers_must_be_alike():
    bytes_GG = np.ones((3, 3), dtype=np.int64)
    with pytest.raises(BadInput, match=r"servers of as many GPUs with equal NICs, found \[1, 2\] GPUs a server"):
        two_tier_schedule(bytes_GG, np.array([0, 0, 1]), np.ones(3), 9.0, np.zeros(3), rng=RNG)


@pytest.mark.parametrize("rate_Bps", [1e3, 1e12])
def test_ports_of_any_rate_are_timed_at_it(rate_Bps):
    """A rate below the default of `order` counts as well: on equal ports without servers the bound is bytes over rate."""
    machines = Cluster("test", tuple(Gpu(f"g{i}", "x", i, rate_Bps, rate_Bps, 10**9) for i in range(3)))
    schedule = order([[0, 400, 600], [500, 0, 200], [300, 700, 0]], machines, method="two-tier")
    assert schedule.makespan_s >= 1100 / rate_Bps * (1 - 1e-9)
    assert schedule.makespan_s == pytest.approx(1100 / rate_Bps, rel=0.6)
