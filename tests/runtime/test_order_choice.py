"""Each exchange takes the order that calibration found for its size."""

import numpy as np

from aurora.algorithms.alltoall.registry import ORDER
from aurora.runtime.order_calibration import COLLECTIVE, OrderCalibration
from aurora.runtime.order_choice import OrderChoice
from aurora.types import Network

ONES = (np.ones((3, 3), dtype=np.int64) - np.eye(3, dtype=np.int64), Network.equal(3))
PLANNED, AT_ONCE = (ORDER[name](*ONES, rng=np.random.default_rng(0)) for name in ("openshop", "all-at-once"))
SIZES = np.array([1000, 100_000])


def choice():
    """The planned order is the fastest for small exchanges, torch's collective for large ones."""
    seconds_CW = np.array([[1.0, 1.2, 1.5], [120.0, 100.0, 150.0]])
    orders = {COLLECTIVE: None, "all-at-once": AT_ONCE}
    return OrderChoice(
        OrderCalibration(("openshop", COLLECTIVE, "all-at-once"), SIZES, seconds_CW, np.zeros((2, 3)), orders, {})
    )


def test_the_size_of_an_exchange_decides():
    """Sizes are bytes of a rank on average, of which there are 3; the combine takes what is planned for it."""
    orders = choice()
    small_SRR, large_SRR = ONES[0][None] * 2_500, ONES[0][None] * 50_000
    assert orders.order(PLANNED, small_SRR) is PLANNED
    assert orders.order(PLANNED.reversed, small_SRR) == PLANNED.reversed
    assert orders.order(PLANNED, large_SRR) is None
    assert orders.order(PLANNED, np.concatenate([small_SRR // 2] * 2)) is PLANNED
    assert orders.used.exchanges == {"openshop": 2, COLLECTIVE: 1, "openshop over servers": 1}
    assert str(orders.used) == f"exchanges by openshop 2, {COLLECTIVE} 1, openshop over servers 1"
