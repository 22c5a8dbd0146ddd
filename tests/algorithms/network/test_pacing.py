"""Rates held by clocks: a paced order's rows all end at the fluid bound."""

import numpy as np
import pytest
from hypothesis import given

from aurora.algorithms.alltoall.registry import ORDER
from aurora.algorithms.network.port_bounds import fluid_bound
from aurora.algorithms.network.routes import route, rows_to_send
from tests.strategies import traffics_on_ports


@given(traffics_on_ports())
def test_paced_rows_all_end_at_the_fluid_bound(case):
    bytes_GG, network = case
    order = ORDER["paced"](bytes_GG, network, rng=np.random.default_rng(0))
    row_X, size_X, limit_Bps_X = rows_to_send(order, bytes_GG, route(network))
    assert np.array_equal(size_X, bytes_GG[*order.pairs_X2[row_X].T])
    assert size_X.sum() == bytes_GG.sum()
    assert size_X / limit_Bps_X == pytest.approx(fluid_bound(bytes_GG, network))
