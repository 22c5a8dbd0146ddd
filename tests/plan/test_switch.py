"""The fluid switch: fairness, capacity and hand-computed cases."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aurora.plan.order import ORDER
from aurora.plan.routes import route
from aurora.plan.switch import fair_rates
from aurora.plan.timing import fluid_rows, one_to_one_rows, timed
from aurora.types import Order
from tests.strategies import RATES, traffics_on_ports


@st.composite
def flows(draw):
    n = draw(st.integers(2, 5))
    ends = st.lists(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)), min_size=1, max_size=8)
    src, dst = np.array(draw(ends)).T
    rates = st.lists(st.sampled_from(RATES), min_size=n, max_size=n).map(np.array)
    return src, dst, draw(rates), draw(rates)


@given(flows())
def test_fair_rates_fill_ports_and_favour_nobody(case):
    """Max-min fair: no port above its rate, and every flow has a full port on which no other flow is faster."""
    src, dst, out, into = case
    rates = fair_rates(src, dst, route(out, into))
    n = len(out)
    used = np.concatenate([np.bincount(src, rates, n), np.bincount(dst, rates, n)])
    room = np.concatenate([out, into])
    assert (used <= room * (1 + 1e-9)).all()
    for flow in range(len(src)):
        bottlenecks = []
        for port, mates in ((src[flow], src == src[flow]), (dst[flow] + n, dst == dst[flow])):
            full = used[port] >= room[port] * (1 - 1e-9)
            bottlenecks.append(full and rates[flow] >= rates[mates].max() * (1 - 1e-9))
        assert any(bottlenecks)


def test_fair_rates_by_hand():
    """Three flows into a port of 3 and one of them from a port of 0.5: the others share what it cannot use."""
    ports = route(np.array([0.5, 9, 9, 9]), np.array([9, 9, 9, 3.0]))
    rates = fair_rates(np.array([0, 1, 2]), np.array([3, 3, 3]), ports)
    assert rates == pytest.approx([0.5, 1.25, 1.25])


def test_a_fast_port_serves_slow_ones_side_by_side():
    bytes_GG = np.array([[0, 10, 10], [0, 0, 0], [0, 0, 0]])
    out, into = np.array([2.0, 1, 1]), np.array([2.0, 1, 1])
    pairs = np.array([[0, 1], [0, 2], [1, 0], [1, 2], [2, 0], [2, 1]])
    assert timed(Order("one", pairs), bytes_GG, out, into).makespan_s == pytest.approx(20)
    assert timed(Order("both", pairs, 2, 2), bytes_GG, out, into).makespan_s == pytest.approx(10)


def test_startup_is_paid_once_a_message_and_takes_no_bandwidth():
    bytes_GG = np.array([[0, 10, 10], [0, 0, 0], [0, 0, 0]])
    pairs = np.array([[0, 1], [0, 2], [1, 0], [1, 2], [2, 0], [2, 1]])
    ones = np.ones(3)
    made = timed(Order("one", pairs), bytes_GG, ones, ones, np.array([0.5, 0.25, 1.0]))
    assert made.start_s_X.tolist() == pytest.approx([0.5, 11.5])  # after 0.5 of rank 0, then 1.0 of rank 2
    assert made.end_s_X.tolist() == pytest.approx([10.5, 21.5])
    both = timed(Order("both", pairs, 2, 2), bytes_GG, ones, ones, np.array([0.5, 0.25, 1.0]))
    # 0 -> 1 alone from 0.5 to 1, then both at half the rate, then 0 -> 2 alone again
    assert both.end_s_X.tolist() == pytest.approx([1.0, 20.0, 20.0, 20.5])
    assert both.rate_Bps_X.tolist() == pytest.approx([1.0, 0.5, 0.5, 1.0])


def test_a_receiver_that_keeps_its_order_makes_senders_wait():
    bytes_GG = np.array([[0, 0, 5], [0, 0, 5], [0, 0, 0]])
    pairs = np.array([[1, 2], [0, 2], [0, 1], [1, 0], [2, 0], [2, 1]])
    made = timed(Order("kept", pairs), bytes_GG, np.ones(3), np.ones(3))
    assert made.src_X.tolist() == [1, 0]
    assert made.start_s_X.tolist() == pytest.approx([0, 5])


def test_nothing_to_send_is_a_valid_empty_schedule():
    made = timed(Order("none", np.empty((0, 2), dtype=np.int64)), np.zeros((1, 1), dtype=np.int64), np.ones(1), np.ones(1))
    assert (made.makespan_s, made.gap, len(made.src_X)) == (0.0, 0.0, 0)


def test_nanoseconds_are_times_like_any_other():
    """Four bytes at 12.5 GB/s take 0.32 ns: nothing may be rounded away."""
    bytes_GG = np.array([[0, 4, 6], [0, 0, 0], [0, 0, 0]])
    rate = np.full(3, 12.5e9)
    pairs = np.array([[0, 1], [0, 2], [1, 0], [1, 2], [2, 0], [2, 1]])
    assert timed(Order("one", pairs), bytes_GG, rate, rate).end_s_X == pytest.approx([0.32e-9, 0.8e-9], rel=1e-9)


@given(traffics_on_ports(), st.sampled_from(["openshop", "birkhoff", "aurora-alg1"]), st.sampled_from([0.0, 0.3]))
def test_with_one_partner_at_a_time_the_shortcut_is_the_switch(case, method, startup):
    bytes_GG, out, into = case
    order = ORDER[method](bytes_GG, out, into, np.random.default_rng(0))
    startup_s = np.full(len(bytes_GG), startup)
    quick, slow = (sorted(rows(order, bytes_GG, out, into, startup_s)) for rows in (one_to_one_rows, fluid_rows))
    assert [row[1:4] for row in quick] == [row[1:4] for row in slow] or np.allclose(
        sorted(row[0] for row in quick), sorted(row[0] for row in slow)
    )
    assert np.allclose([row[4] for row in quick], [row[4] for row in slow])
