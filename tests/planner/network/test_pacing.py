"""Rates held by clocks against the switch's own timing of the same order."""

import numpy as np
import pytest
from hypothesis import given

from aurora.planner.alltoall.registry import ORDER
from aurora.planner.network.bounds import fluid_bound
from aurora.planner.network.routes import row_pacing
from aurora.planner.network.switch import timed
from tests.strategies import traffics_on_ports


def ends(order, bytes_GG, network):
    start, rate = row_pacing(order, bytes_GG, network)
    src, dst = order.pairs_X2.T
    cuts = order.cuts(bytes_GG[src, dst])
    size = cuts[:, 1] - cuts[:, 0]
    carrying = size > 0
    return (start + size / np.where(carrying, rate, 1.0))[carrying]


@given(traffics_on_ports())
def test_paced_sub_channels_take_as_long_as_on_the_switch(case):
    bytes_GG, network = case
    order = ORDER["sub-channels"](bytes_GG, network, rng=np.random.default_rng(0))
    expected = timed(order, bytes_GG, network).makespan_s
    assert ends(order, bytes_GG, network).max(initial=0.0) == pytest.approx(expected)


@given(traffics_on_ports())
def test_paced_rows_all_end_at_the_fluid_bound(case):
    bytes_GG, network = case
    order = ORDER["paced"](bytes_GG, network, rng=np.random.default_rng(0))
    assert ends(order, bytes_GG, network) == pytest.approx(fluid_bound(bytes_GG, network))
    assert not row_pacing(order, bytes_GG, network)[0].any()
