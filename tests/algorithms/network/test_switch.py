"""The fluid switch: fairness, capacity and hand-computed cases."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aurora.algorithms.alltoall.registry import ORDER
from aurora.algorithms.check.plans import check_schedule
from aurora.algorithms.network.routes import route
from aurora.algorithms.network.switch import Switch, fluid_pieces, one_to_one_columns, timed
from aurora.types import Network, Order
from aurora.types.network import Servers
from tests.algorithms.network.rates import fair_rates, rates_of
from tests.algorithms.network.reference_switch import slow_rows
from tests.strategies import servers, traffics_on_ports, traffics_on_servers

PAIRS = np.array([[0, 1], [0, 2], [1, 0], [1, 2], [2, 0], [2, 1]])
TENS_GG = np.array([[0, 10, 10], [0, 0, 0], [0, 0, 0]])


@given(st.one_of(traffics_on_ports(), traffics_on_servers()))
def test_rates_fill_ports_and_nics_and_favour_nobody(case):
    """Max-min fair: none above its rate, and each flow has a full port or NIC on which no other flow is faster."""
    bytes_GG, network = case
    src, dst = np.nonzero(bytes_GG)
    capacity_Bps_R, use = route(network).capacity_Bps_R, route(network).use_GGK[src, dst]
    rates = fair_rates(src, dst, network)
    used = np.array([rates[(use == r).any(axis=1)].sum() for r in range(len(capacity_Bps_R))])
    assert (used <= capacity_Bps_R * (1 + 1e-9)).all()
    for flow in range(len(src)):
        full = [r for r in use[flow] if r >= 0 and used[r] >= capacity_Bps_R[r] * (1 - 1e-9)]
        assert any(rates[flow] >= rates[(use == r).any(axis=1)].max() * (1 - 1e-9) for r in full)


def test_fair_rates_by_hand():
    """Three flows into a port of 3 and one of them from a port of 0.5: the others share what it cannot use."""
    ports = Network([0.5, 9, 9, 9], [9, 9, 9, 3])
    rates = fair_rates(np.array([0, 1, 2]), np.array([3, 3, 3]), ports)
    assert rates == pytest.approx([0.5, 1.25, 1.25])


def test_startup_is_paid_once_a_message_and_takes_no_bandwidth():
    network = Network(np.ones(3), np.ones(3), [0.5, 0.25, 1.0])
    made = timed(Order("one", PAIRS), TENS_GG, network)
    assert made.start_s_X.tolist() == pytest.approx([0.5, 11.5])  # after 0.5 of rank 0, then 1.0 of rank 2
    assert made.end_s_X.tolist() == pytest.approx([10.5, 21.5])
    both = timed(Order("both", PAIRS, 2, 2), TENS_GG, network)
    # 0 -> 1 alone from 0.5 to 1, then both at half the rate, then 0 -> 2 alone again
    assert both.end_s_X.tolist() == pytest.approx([1.0, 20.0, 20.0, 20.5])
    assert both.rate_Bps_X.tolist() == pytest.approx([1.0, 0.5, 0.5, 1.0])


def test_nothing_to_send_is_a_valid_empty_schedule():
    made = timed(Order("none", np.empty((0, 2), dtype=np.int64)), np.zeros((1, 1), dtype=np.int64), Network.equal(1))
    assert (made.makespan_s, made.gap, len(made.src_X)) == (0.0, 0.0, 0)


def test_nanoseconds_are_times_like_any_other():
    """Four bytes at 12.5 GB/s take 0.32 ns: nothing may be rounded away."""
    bytes_GG = np.array([[0, 4, 6], [0, 0, 0], [0, 0, 0]])
    assert timed(Order("one", PAIRS), bytes_GG, Network.equal(3, 12.5e9)).end_s_X == pytest.approx([0.32e-9, 0.8e-9], rel=1e-9)


@given(traffics_on_ports(startups=(0.0, 0.3)), st.sampled_from(["openshop", "birkhoff", "matchings"]))
def test_with_one_partner_at_a_time_the_shortcut_is_the_switch(case, method):
    bytes_GG, network = case
    order = ORDER[method](bytes_GG, network, rng=np.random.default_rng(0))
    quick, slow = one_to_one_columns(order, bytes_GG, network), fluid_pieces(order, bytes_GG[None], network)
    slow = [slow.src_X, slow.dst_X, slow.bytes_X, slow.start_s_X, slow.end_s_X]
    columns = ([column_X[np.lexsort((made[3], made[1], made[0]))] for column_X in made[:3]] for made in (quick, slow))
    assert np.array_equal(*columns)
    assert np.allclose(np.sort(quick[4]), np.sort(slow[4]))


@given(traffics_on_ports(min_ranks=2, startups=(0.0, 0.3)), st.randoms(use_true_random=False))
def test_rows_come_by_start_then_source(case, random):
    bytes_GG, network = case
    pairs = [(i, j) for i in range(len(bytes_GG)) for j in range(len(bytes_GG)) if i != j]
    random.shuffle(pairs)
    made = timed(Order("any", pairs), bytes_GG, network)
    keys = list(zip(made.start_s_X.tolist(), made.src_X.tolist(), strict=True))
    assert keys == sorted(keys)
    assert made.bytes_X.tolist() == bytes_GG[made.src_X, made.dst_X].tolist()
    assert made.bytes_X.sum() == bytes_GG.sum()


@st.composite
def any_network(draw):
    bytes_GG, network = draw(traffics_on_ports(2, startups=(0.0, 0.3)))
    return bytes_GG, replace(network, servers=draw(st.none() | servers(len(bytes_GG))))


@given(any_network(), st.sampled_from(list(ORDER)), st.integers(0, 3))
def test_the_switch_is_the_one_that_looks_at_everything_at_every_event(case, method, tiers):
    """Each pair is carried in the same bytes by the same times, whatever of it flows when at which rate."""
    bytes_GG, network = case
    order = ORDER[method](bytes_GG, network, rng=np.random.default_rng(0))
    if tiers:
        tier_GG = np.random.default_rng(0).integers(0, tiers, bytes_GG.shape)
        order = replace(order, tier_X=tier_GG[*order.pairs_X2.T])
    made = fluid_pieces(order, bytes_GG[None], network)
    rows = slow_rows(order, bytes_GG, network)
    expected = np.array([(src, dst, size, start, end) for start, src, dst, size, end, _ in rows]).reshape(-1, 5)
    found = np.stack([made.src_X, made.dst_X, made.bytes_X, made.start_s_X, made.end_s_X], axis=1)
    for src, dst in np.argwhere(bytes_GG):
        ours, theirs = (part[(part[:, 0] == src) & (part[:, 1] == dst)] for part in (found, expected))
        assert ours[:, 2].sum() == theirs[:, 2].sum() == bytes_GG[src, dst]
        assert ours[:, 3].min() == pytest.approx(theirs[:, 3].min())
        assert ours[:, 4].max() == pytest.approx(theirs[:, 4].max())


def test_ranks_that_join_late_hold_up_only_those_they_meet():
    """0 -> 1 begins at once; 2 joins at 3 and only then 0 -> 2 and 2 -> 1 share the ports that they have in common."""
    bytes_GG = np.array([[0, 4, 4], [0, 0, 0], [0, 4, 0]])
    switch = Switch(Network.equal(3))
    number = switch.open(ORDER["all-at-once"](bytes_GG, Network.equal(3), rng=np.random.default_rng(0)), bytes_GG)
    assert not switch.join(number, 0)
    assert not switch.join(number, 1)
    assert switch.run(3.0) == []
    assert rates_of(switch) == {(0, 1): 1.0}
    switch.join(number, 2)
    assert switch.run(4.0) == []
    assert rates_of(switch) == {(0, 1): 0.5, (0, 2): 0.5, (2, 1): 0.5}
    # 0 -> 1 has its last byte half sent by 4 and ends at 5; the other two, a byte each sent, go on alone for three more
    ended = []
    while switch.busy:
        ended += [(switch.run(), switch.now_s)]
    assert [(sorted(done), at) for done, at in ended] == [([(number, 0), (number, 1), (number, 2)], 8.0)]
    carried = switch.close(number)
    ends = dict(zip(zip(carried.src_X.tolist(), carried.dst_X.tolist(), strict=True), carried.end_s_X.tolist(), strict=True))
    assert ends == {(0, 1): 5.0, (0, 2): 8.0, (2, 1): 8.0}


def test_two_all_to_alls_share_ports_and_leave_their_numbers():
    ones, bytes_GG = Network.equal(2), np.array([[0, 2], [0, 0]])
    order = ORDER["all-at-once"](bytes_GG, ones, rng=np.random.default_rng(0))
    switch = Switch(ones)
    first, second = switch.open(order, bytes_GG), switch.open(order, 2 * bytes_GG)
    for rank in range(2):
        switch.join(first, rank)
        switch.join(second, rank)
    assert (sorted(switch.run()), switch.now_s) == ([(first, 0), (first, 1)], 4.0)
    assert switch.close(first).end_s_X.tolist() == [4.0]
    assert switch.open(order, bytes_GG) == first
    assert (sorted(switch.run()), switch.now_s) == ([(second, 0), (second, 1)], 6.0)


def test_incast_by_hand():
    """Three flows into a port of 3 that loses a tenth for each beyond the first: 2.4, shared equally."""
    ports, three = [Network(np.full(4, 9.0), np.full(4, 3.0), incast=part) for part in (0.1, 0.9)], np.array([0, 1, 2])
    assert fair_rates(three, np.full(3, 3), ports[0]) == pytest.approx(3 * [0.8])
    assert fair_rates(three[:1], np.array([3]), ports[0]) == pytest.approx([3.0])
    assert fair_rates(three, np.full(3, 3), ports[1]) == pytest.approx(3 * [0.1])  # a tenth of the port is always left
    # one sends 4 and one 8 bytes into a port of 1 at a loss of a half: 0.25 each until 16, then the other alone for 4 more
    bytes_GG = np.array([[0, 0, 4], [0, 0, 8], [0, 0, 0]])
    network = Network(np.ones(3), np.ones(3), incast=0.5)
    order = ORDER["all-at-once"](bytes_GG, network, rng=np.random.default_rng(0))
    assert timed(order, bytes_GG, network).end_s_X.tolist() == pytest.approx([16, 16, 20])


def staged_makespan_s(order, bytes_GG, network):
    """Seconds of an order of width one in stages, number by number: a rank is free when all transfers of its stage have ended."""
    free_s = np.zeros(len(bytes_GG))
    for stage in range(int(order.stage_X.max(initial=-1)) + 1):
        next_s = free_s.copy()
        for src, dst in order.pairs_X2[order.stage_X == stage].tolist():
            if bytes_GG[src, dst]:
                startup_s, rate_Bps = network.pair_startup_s_GG[src, dst], network.pair_Bps_GG[src, dst]
                end_s = max(free_s[src], free_s[dst]) + startup_s + bytes_GG[src, dst] / rate_Bps
                next_s[src], next_s[dst] = max(next_s[src], end_s), max(next_s[dst], end_s)
        free_s = next_s
    return float(free_s.max())


@given(traffics_on_ports(startups=(0.0, 0.001, 1.0)), st.sampled_from(["openshop", "matchings"]))
def test_stages_of_one_partner_take_what_each_rank_waits_for(case, method):
    """A start-up a stage, and no barrier: a rank waits for the partners of its own stages."""
    bytes_GG, network = case
    order = ORDER[method](bytes_GG, network, rng=np.random.default_rng(0))
    staged = timed(order, bytes_GG, network, staged=True)
    assert staged.makespan_s == pytest.approx(staged_makespan_s(order, bytes_GG, network), rel=1e-9)
    assert staged.makespan_s >= timed(order, bytes_GG, network).makespan_s * (1 - 1e-9)
    check_schedule(staged, bytes_GG, network)


def test_tiers_have_ports_of_their_own():
    """On ports of 2 behind NICs of 1: by turns 0 sends for 4 + 2 s; in two tiers 4 bytes and the 4 others go side by side."""
    bytes_GG = np.array([[0, 4, 4], [0, 0, 0], [0, 0, 0]])
    servers = Servers.of([0, 0, 1], 1.0)
    network = Network(np.full(3, 2.0), np.full(3, 2.0), servers=servers)
    pairs_X2 = np.array([[0, 2], [0, 1], [1, 0], [1, 2], [2, 0], [2, 1]])
    by_turns = Order("one tier", pairs_X2)
    tiered = replace(by_turns, tier_X=np.array([1, 0, 0, 1, 1, 1]))
    assert timed(by_turns, bytes_GG, network).makespan_s == pytest.approx(6)
    made = timed(tiered, bytes_GG, network)
    assert made.makespan_s == pytest.approx(4)
    check_schedule(made, bytes_GG, network)
    assert by_turns.stage_X.tolist()[:2] == [0, 1]
    assert tiered.stage_X.tolist()[:2] == [0, 0]
    assert timed(tiered, bytes_GG, network, staged=True).makespan_s == pytest.approx(4)
    assert tiered.reversed.tier_X.tolist() == [1, 1, 1, 0, 0, 1]


def test_one_switch_carries_all_to_alls_of_different_tiers():
    """One of one tier, then one of three: each ends as on a switch of its own, where they share no port."""
    network = Network.equal(4)
    near_GG, far_GG = np.zeros((2, 4, 4), dtype=np.int64)
    near_GG[0, 1], near_GG[1, 0], far_GG[2, 3], far_GG[3, 2] = 3, 5, 7, 2
    pairs_X2 = np.argwhere(~np.eye(4, dtype=np.bool_))
    order = Order("tiers", pairs_X2, tier_X=pairs_X2.sum(axis=1) % 3)
    switch = Switch(network)
    numbers = switch.open(Order("none", pairs_X2), near_GG), switch.open(order, far_GG)
    for number in numbers:
        for rank in range(4):
            switch.join(number, rank)
    while switch.busy:
        switch.run()
    assert [sorted(switch.close(number).end_s_X.tolist()) for number in numbers] == [[3, 5], [2, 7]]


def test_a_stage_ends_as_a_whole():
    """Rank 0 sends 1 byte and receives 3 in its first stage, and sends on only then; one group waits for nothing."""
    bytes_GG = np.array([[0, 1, 2], [0, 0, 0], [3, 0, 0]])
    order = Order("by hand", np.array([[0, 1], [2, 0], [0, 2], [1, 0], [1, 2], [2, 1]]))
    assert order.stage_X.tolist() == [0, 0, 1, 1, 2, 1]
    assert timed(order, bytes_GG, Network.equal(3, 1.0)).makespan_s == pytest.approx(3)
    assert timed(order, bytes_GG, Network.equal(3, 1.0), staged=True).makespan_s == pytest.approx(5)
    at_once = ORDER["all-at-once"](bytes_GG, Network.equal(3), rng=np.random.default_rng(0))
    assert not at_once.stage_X.any()
    assert timed(at_once, bytes_GG, Network.equal(3, 1.0), staged=True).makespan_s == pytest.approx(3)
