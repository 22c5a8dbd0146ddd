"""The order of a hierarchical all-to-all: one sequence of servers, tiers that do not wait, few stages."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aurora.algorithms.alltoall.hierarchical import hierarchical_rows, step_rows
from aurora.algorithms.alltoall.hierarchical_order import RAILS, hierarchical_order
from aurora.algorithms.alltoall.registry import ORDER
from aurora.algorithms.check.plans import check_order, check_schedule
from aurora.algorithms.network.switch import timed
from aurora.types import Hierarchy, Network
from aurora.types.network import Servers

NIC_BPS, INSIDE_BPS = 1.0, 9.0


@st.composite
def traffic_over_servers(draw):
    """(bytes of each step (S, G, G), hierarchy, network) of few ranks, on servers of any sizes."""
    members = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    ranks, tokens = sum(members), draw(st.integers(0, 60))
    hierarchy = Hierarchy(rng.permutation(np.repeat(np.arange(len(members)), members)), draw(st.integers(1, 3)))
    choices = rng.integers(0, ranks, (tokens, draw(st.integers(1, 4))))
    steps_SGG = step_rows(hierarchical_rows(choices, rng.integers(0, ranks, tokens), hierarchy), hierarchy)
    ports_Bps = [INSIDE_BPS] * ranks
    servers = Servers.of(hierarchy.server_G.tolist(), NIC_BPS, draw(st.booleans()))
    return steps_SGG, hierarchy, Network(np.array(ports_Bps), np.array(ports_Bps), servers=servers)


def made(steps_SGG, hierarchy, network):
    return hierarchical_order(steps_SGG.sum(axis=0), hierarchy, network, rng=np.random.default_rng(0))


@pytest.mark.full
@given(traffic_over_servers())
def test_every_step_is_carried_there_and_back(case):
    steps_SGG, hierarchy, network = case
    order = made(*case)
    check_order(order, hierarchy.ranks)
    for bytes_GG in steps_SGG:
        for way, there_GG in ((order, bytes_GG), (order.reversed, bytes_GG.T)):
            check_schedule(timed(way, there_GG, network), there_GG, network)
            check_schedule(timed(way, there_GG, network, staged=True), there_GG, network)


@given(traffic_over_servers())
def test_all_nics_of_a_server_follow_one_sequence_of_servers(case):
    _, hierarchy, _ = case
    order, server_G = made(*case), hierarchy.server_G
    rails_X2 = order.pairs_X2[order.tier_X == RAILS]
    for src in range(hierarchy.ranks):
        served = server_G[rails_X2[rails_X2[:, 0] == src, 1]].tolist()
        first = server_G[rails_X2[rails_X2[:, 0] == np.flatnonzero(server_G == server_G[src])[0], 1]].tolist()
        assert served == first
        assert sorted(served) == sorted(set(range(hierarchy.servers)) - {server_G[src]})


@given(traffic_over_servers())
def test_rows_of_a_tier_are_rails_or_inside_or_never_carry_bytes(case):
    steps_SGG, hierarchy, _ = case
    order = made(*case)
    inside_X = np.equal(*hierarchy.server_G[order.pairs_X2].T)
    carries_X = steps_SGG.sum(axis=0)[*order.pairs_X2.T] > 0
    for tier in range(order.tiers):
        kinds = set(inside_X[order.tier_X == tier].tolist())
        assert len(kinds) <= 1
        assert tier != RAILS or kinds <= {False}
    assert not carries_X[(order.tier_X != RAILS) & ~inside_X].any()


@pytest.mark.parametrize(("nodes", "members", "stages"), [(2, 4, 1), (3, 4, 2), (4, 2, 3), (4, 4, 3)])
def test_inside_takes_no_more_stages_than_there_are_other_servers(nodes, members, stages):
    hierarchy, ranks = Hierarchy(np.repeat(np.arange(nodes), members)), nodes * members
    order = hierarchical_order(
        np.ones((ranks, ranks), dtype=np.int64), hierarchy, Network.equal(ranks), rng=np.random.default_rng(0)
    )
    inside_X = np.equal(*hierarchy.server_G[order.pairs_X2].T)
    for way, kept_X in ((order, inside_X), (order.reversed, inside_X[::-1])):
        assert np.unique(way.stage_X[kept_X]).tolist() == list(range(min(stages, members - 1)))


@given(traffic_over_servers())
def test_rails_take_less_than_twice_the_busiest_nic(case):
    """Of equal servers and a NIC a rank: as any dense open shop, if all rails carry the same."""
    steps_SGG, hierarchy, network = case
    sizes = np.bincount(hierarchy.server_G)
    if network.servers.shared or len(set(sizes.tolist())) > 1:
        return
    drawn_NN = np.random.default_rng(len(steps_SGG)).integers(0, 50, (hierarchy.servers, hierarchy.servers))
    src_X, dst_X = np.argwhere(hierarchy.server_G[:, None] != hierarchy.server_G).T.reshape(2, -1)
    keep_X = hierarchy.gateway_GN[src_X, hierarchy.server_G[dst_X]] == dst_X
    bytes_GG = np.zeros((hierarchy.ranks, hierarchy.ranks), dtype=np.int64)
    bytes_GG[src_X[keep_X], dst_X[keep_X]] = drawn_NN[hierarchy.server_G[src_X], hierarchy.server_G[dst_X]][keep_X]
    order = hierarchical_order(bytes_GG, hierarchy, network, rng=np.random.default_rng(0))
    busiest = max(bytes_GG.sum(axis=0).max(), bytes_GG.sum(axis=1).max()) / NIC_BPS
    assert timed(order, bytes_GG, network).makespan_s <= 2 * busiest


def test_the_busiest_nic_of_a_pair_of_servers_counts():
    """Server 0 has more for 2 by sum, but its busiest NIC has more for 1; with one NIC a server the sum counts."""
    hierarchy = Hierarchy(np.repeat(np.arange(3), 2))
    bytes_GG = np.zeros((6, 6), dtype=np.int64)
    bytes_GG[0, 2], bytes_GG[0, 4], bytes_GG[1, 5] = 9, 6, 6
    for shared, first in ((False, 1), (True, 2)):
        ports_Bps = [INSIDE_BPS] * 6
        servers = Servers.of(hierarchy.server_G.tolist(), NIC_BPS, shared)
        network = Network(np.array(ports_Bps), np.array(ports_Bps), servers=servers)
        order = hierarchical_order(bytes_GG, hierarchy, network, rng=np.random.default_rng(0))
        rails_X2 = order.pairs_X2[order.tier_X == RAILS]
        assert hierarchy.server_G[rails_X2[rails_X2[:, 0] == 0][0, 1]] == first


def test_by_name_it_has_the_servers_of_the_fabric():
    """Without a fabric of servers every rank is one: a plain open shop."""
    hierarchy, bytes_GG = Hierarchy(np.repeat(np.arange(3), 2)), np.random.default_rng(0).integers(1, 99, (6, 6))
    np.fill_diagonal(bytes_GG, 0)
    ports_Bps = np.full(6, INSIDE_BPS)
    network = Network(ports_Bps, ports_Bps, servers=Servers.of(hierarchy.server_G.tolist(), NIC_BPS))
    named, made = (
        make(bytes_GG, *given, rng=np.random.default_rng(0))
        for make, given in ((ORDER["hierarchical"], (network,)), (hierarchical_order, (hierarchy, network)))
    )
    assert named == made
    plain = ORDER["hierarchical"](bytes_GG, Network.equal(6), rng=np.random.default_rng(0))
    assert plain.tiers == 1
    assert timed(plain, bytes_GG, Network.equal(6)).makespan_s <= 2 * max(
        bytes_GG.sum(axis=0).max(), bytes_GG.sum(axis=1).max()
    )
