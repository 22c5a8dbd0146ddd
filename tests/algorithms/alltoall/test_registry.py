"""Orders against bounds, brute force and the paper's figure."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aurora.algorithms.alltoall.decomposition import slots
from aurora.algorithms.alltoall.registry import ORDER
from aurora.algorithms.check.plans import check_order, check_schedule
from aurora.algorithms.network.port_bounds import fluid_bound, one_to_one_bound
from aurora.algorithms.network.switch import timed
from aurora.types import Network, Order
from tests.strategies import traffics_on_ports, traffics_on_servers


def schedule(method, bytes_GG, network):
    return timed(ORDER[method](bytes_GG, network, rng=np.random.default_rng(0)), bytes_GG, network)


@pytest.mark.parametrize("method", ORDER)
@given(case=st.one_of(traffics_on_ports(startups=(0.0, 0.3)), traffics_on_servers(startups=(0.0, 0.3))))
def test_every_order_carries_every_byte_within_ports_and_nics(method, case):
    bytes_GG, network = case
    order = ORDER[method](bytes_GG, network, rng=np.random.default_rng(1))
    check_order(order, len(bytes_GG))
    check_order(order.reversed, len(bytes_GG))
    made = timed(order, bytes_GG, network)
    check_schedule(made, bytes_GG, network)
    assert made.makespan_s >= (fluid_bound(bytes_GG, network) if made.cut is None else made.cut.bound_s) * (1 - 1e-9)
    assert made.gap >= -1e-9
    if order.one_to_one and order.tiers == 1:
        assert made.makespan_s >= one_to_one_bound(bytes_GG, network) * (1 - 1e-9)


@given(case=traffics_on_ports())
def test_openshop_is_dense(case):
    """No dense open-shop schedule takes twice the one-to-one bound, and none has more messages than pairs with traffic."""
    bytes_GG, network = case
    made = schedule("openshop", bytes_GG, network)
    assert made.makespan_s <= 2 * one_to_one_bound(bytes_GG, network) * (1 + 1e-9)
    assert len(made.src_X) == (bytes_GG > 0).sum()
    assert made.one_to_one


@given(case=traffics_on_ports(min_ranks=2))
def test_a_reversed_order_serves_the_transpose_in_the_same_time(case):
    bytes_GG, network = case
    order = ORDER["openshop"](bytes_GG, network, rng=np.random.default_rng(0))
    there = timed(order, bytes_GG, network).makespan_s
    turned = Network(network.in_Bps_G, network.out_Bps_G)
    back = timed(order.reversed, bytes_GG.T, turned).makespan_s
    assert back <= there * (1 + 1e-9)


def test_the_papers_figure_4():
    """GPU 1 sends to 2 and 3, GPU 2 to 1 and 3, a unit each: two units ordered, three when both go to GPU 3 first."""
    bytes_GG = np.array([[0, 1, 1], [1, 0, 1], [0, 0, 0]])
    ones = Network.equal(3)
    assert schedule("openshop", bytes_GG, ones).makespan_s == pytest.approx(2)
    unordered = Order("by hand", np.array([[0, 2], [1, 2], [0, 1], [1, 0], [2, 0], [2, 1]]), 1, 2)
    assert timed(unordered, bytes_GG, ones).makespan_s == pytest.approx(3)


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_all_at_once_posts_to_the_next_rank_first(ranks):
    """As engines' own all-to-alls do: if all posted to rank 0 first, its port would be busy while others rest."""
    order = ORDER["all-at-once"](
        np.ones((ranks, ranks), dtype=int) - np.eye(ranks, dtype=int), Network.equal(ranks), rng=np.random.default_rng(0)
    )
    for rank in range(ranks):
        sent_to = [dst for src, dst in order.pairs_X2.tolist() if src == rank]
        received_of = [src for src, dst in order.pairs_X2.tolist() if dst == rank]
        assert sent_to == [(rank + step) % ranks for step in range(1, ranks)]
        assert received_of == [(rank - step) % ranks for step in range(1, ranks)]


def test_orders_repeat_for_a_seed_and_differ_between_seeds():
    bytes_GG = np.arange(36).reshape(6, 6) * (1 - np.eye(6, dtype=int))
    ones = Network.equal(6)

    def pairs(seed):
        return ORDER["random"](bytes_GG, ones, rng=np.random.default_rng(seed)).pairs_X2.tolist()

    assert pairs(3) == pairs(3)
    assert pairs(3) != pairs(4)


def test_openshop_mean_gap_on_equal_ports():
    """What the README says of the default: measured over the bound, close at n = 16."""
    rng = np.random.default_rng(0)
    gaps = []
    for _ in range(10):
        bytes_GG = rng.integers(1, 1000, (16, 16))
        np.fill_diagonal(bytes_GG, 0)
        gaps.append(schedule("openshop", bytes_GG, Network.equal(16)).gap)
    assert np.mean(gaps) < 0.05


@given(case=traffics_on_ports(min_ranks=1, max_ranks=6))
def test_birkhoff_meets_the_one_to_one_bound(case):
    """Exactly in bytes on equal ports; a rounding of 2^-40 elsewhere. Bytes are whole and conserved either way."""
    bytes_GG, network = case
    order = ORDER["birkhoff"](bytes_GG, network, rng=np.random.default_rng(0))
    check_order(order, len(bytes_GG))
    made = timed(order, bytes_GG, network)
    check_schedule(made, bytes_GG, network)
    slowest_Bps = min(*network.out_Bps_G, *network.in_Bps_G)
    rounding = 0.0 if network.equal_ports else len(bytes_GG) ** 2 / slowest_Bps  # a byte a part
    assert made.makespan_s <= one_to_one_bound(bytes_GG, network) * (1 + 1e-9) + rounding


@pytest.mark.full
@given(st.integers(1, 5), st.integers(1, 6), st.randoms(use_true_random=False))
def test_each_slot_is_as_long_as_possible(n, count, random):
    """Brute force over all perfect matchings of what is left; rows and columns have one sum, so that nothing is padded."""
    left = np.zeros((n, n), dtype=np.int64)
    for _ in range(count):
        left[np.arange(n), random.sample(range(n), n)] += random.randint(1, 9)
    for length, partner, units in zip(*slots(left, 10**6), strict=True):
        assert length == max(min(left[i, j] for i, j in enumerate(match)) for match in permutations(range(n)))
        assert (units == length).all()
        left[np.arange(n), partner] -= units
    assert not left.any()


@given(case=traffics_on_ports())
def test_paced_flows_all_end_at_the_fluid_bound(case):
    bytes_GG, network = case
    made = schedule("paced", bytes_GG, network)
    assert made.makespan_s == pytest.approx(fluid_bound(bytes_GG, network))
    assert made.end_s_X == pytest.approx(np.full(len(made.end_s_X), made.makespan_s))
