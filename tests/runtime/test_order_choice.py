"""Each exchange takes the order that calibration found for its size, flat or over servers."""

import numpy as np

from aurora.algorithms.alltoall.registry import ORDER
from aurora.runtime.order_calibration import COLLECTIVE, FLAT, OVER_SERVERS, OrderCalibration
from aurora.runtime.order_choice import OrderChoice
from aurora.types import Network

ONES = (np.ones((3, 3), dtype=np.int64) - np.eye(3, dtype=np.int64), Network.equal(3))
PLANNED, AT_ONCE, SPREAD_OUT = (
    ORDER[name](*ONES, rng=np.random.default_rng(0)) for name in ("openshop", "all-at-once", "spread-out")
)
SIZES = np.array([1000, 100_000])


def choice(servers=None):
    """The planned order is the fastest for small exchanges, torch's collective for large ones."""
    seconds_CW = np.array([[1.0, 1.2, 1.5], [120.0, 100.0, 150.0]])
    orders = {COLLECTIVE: None, "all-at-once": AT_ONCE}
    return OrderChoice(
        OrderCalibration(("openshop", COLLECTIVE, "all-at-once"), SIZES, seconds_CW, np.zeros((2, 3)), orders, {}), servers
    )


def test_the_size_of_an_exchange_decides():
    """Sizes are bytes of a rank on average, of which there are 3; the combine takes what is planned for it."""
    orders = choice()
    small_SRR, large_SRR = ONES[0][None] * 500, ONES[0][None] * 50_000
    assert orders.order(PLANNED, "dispatch", small_SRR) is PLANNED
    assert orders.order(PLANNED.reversed, "combine", small_SRR) == PLANNED.reversed
    assert orders.order(PLANNED, "dispatch", large_SRR) is None
    assert orders.is_hierarchical(ONES[0], 1), "the plan decides"
    assert orders.used.exchanges == {"openshop": 2, COLLECTIVE: 1}
    assert list(orders.used.lines("m")) == [f"m: exchanges by openshop 2, {COLLECTIVE} 1"]


def test_flat_or_over_servers_is_decided_by_the_flat_size_with_an_order_of_its_own():
    """The plan has none for the way that it does not take; here it goes over servers, and small batches are faster flat."""
    servers = OrderCalibration(
        (FLAT, OVER_SERVERS), SIZES, np.array([[1.0, 2.0], [200.0, 100.0]]), np.zeros((2, 2)), {FLAT: SPREAD_OUT}, {}
    )
    orders, steps_SRR = choice(servers), np.stack([ONES[0]] * 2)
    assert not orders.is_hierarchical(ONES[0] + 7 * np.eye(3, dtype=np.int64), 4_000)
    assert orders.is_hierarchical(ONES[0], 6_000)
    assert orders.order(PLANNED, "dispatch", 500 * steps_SRR[:1]) is SPREAD_OUT
    assert orders.order(PLANNED.reversed, "combine", 500 * steps_SRR[:1]) == SPREAD_OUT.reversed
    assert orders.order(PLANNED, "dispatch", 250 * steps_SRR) is PLANNED
    assert orders.used.exchanges == {"openshop": 2, f"openshop {OVER_SERVERS}": 1}
    assert list(orders.used.lines("m"))[1] == f"m, before serving: {servers}"
