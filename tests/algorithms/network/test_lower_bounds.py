"""The spreading bound against every placement."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from aurora.algorithms.network.port_bounds import fluid_bound, one_to_one_bound, pair_seconds, spread
from aurora.types import Network
from aurora.types.network import Servers
from tests.strategies import traffics_on_ports

COSTS = st.tuples(st.integers(1, 3), st.integers(0, 4)).flatmap(
    lambda shape: arrays(np.float64, shape, elements=st.integers(0, 9).map(float))
)


@given(COSTS)
def test_spread_is_below_every_placement(cost_GE):
    gpus, experts = cost_GE.shape
    best = min(
        max(sum(cost_GE[g, e] for e in range(experts) if where[e] == g) for g in range(gpus))
        for where in product(range(gpus), repeat=experts)
    )
    assert spread(cost_GE, replicas=False) <= best + 1e-9


def test_spread_is_total_work_over_total_speed():
    work_E, speed_G = np.array([4.0, 2.0, 6.0, 3.0]), np.array([1.0, 0.5])
    assert spread(work_E[None, :] / speed_G[:, None], replicas=False) == pytest.approx(15 / 1.5)


@given(traffics_on_ports())
def test_one_to_one_is_never_below_fluid(case):
    assert one_to_one_bound(*case) >= fluid_bound(*case) * (1 - 1e-12)


@given(traffics_on_ports(equal=True))
def test_on_equal_ports_the_bounds_are_the_same(case):
    assert one_to_one_bound(*case) == pytest.approx(fluid_bound(*case))


@given(traffics_on_ports())
def test_startup_adds_a_message_each(case):
    bytes_GG, network = case
    n = len(bytes_GG)
    assert one_to_one_bound(bytes_GG, network.without_startup) == one_to_one_bound(bytes_GG, network)
    messages = max((bytes_GG > 0).sum(axis=1).max(), (bytes_GG > 0).sum(axis=0).max())
    assert one_to_one_bound(np.minimum(bytes_GG, 1), Network.equal(n, 1e9, startup_s=1.0)) == pytest.approx(messages, rel=1e-6)


def test_a_transfer_out_of_a_server_is_as_fast_as_its_nic():
    bytes_GG, rates = np.array([[0, 8, 8], [8, 0, 8], [8, 8, 0]]), np.array([4.0, 4.0, 4.0])
    network = Network(rates, rates, servers=Servers.of([0, 0, 1], 0.5))
    assert pair_seconds(bytes_GG, network).tolist() == [[0, 2, 16], [2, 0, 16], [16, 16, 0]]
    assert one_to_one_bound(bytes_GG, network) == 32
