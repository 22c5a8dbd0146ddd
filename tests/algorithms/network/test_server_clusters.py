"""Hosts are servers or not, by the rates of links, with noise."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aurora.algorithms.network.measured_links import find_servers
from tests.strategies import RATES

NOISE = 0.05
SEEDS = st.integers(0, 2**32)


def noisy(rate_GG, rng):
    """Rates that are up to NOISE off, without a diagonal."""
    return np.asarray(rate_GG) * rng.uniform(1 - NOISE, 1 + NOISE, np.shape(rate_GG)) * (1 - np.eye(len(rate_GG)))


@given(st.lists(st.sampled_from(RATES), min_size=4, max_size=12), SEEDS)
def test_hosts_on_one_switch_are_no_servers(port_G, seed):
    rate_GG, host_G = np.minimum.outer(port_G, port_G) * 1e9, np.arange(len(port_G)) % 2
    found_G = find_servers(noisy(np.full_like(rate_GG, 1e9), np.random.default_rng(seed)), host_G)
    assert not found_G.any()
    assert not find_servers(rate_GG, np.zeros_like(host_G)).any(), "a slow port is no server"


def test_a_host_of_one_rank_and_pairs_of_nvlink_on_one_host_are_no_servers():
    pair_G = np.repeat(np.arange(4), 2)
    rate_GG = np.where(np.equal.outer(pair_G, pair_G), 200.0, 12.0) * (1 - np.eye(8))
    assert not find_servers(rate_GG, np.zeros(8)).any()
    assert not find_servers(rate_GG, [0, 0, 1, 1, 2, 2, 3, 4]).any()
    assert find_servers(rate_GG, pair_G).tolist() == pair_G.tolist()


@pytest.mark.parametrize(
    ("inside", "rail", "across"),
    [([400.0], 50.0, 50.0), ([400.0], 50.0, 20.0), ([25.0, 200.0], 12.0, 12.0), ([25.0, 200.0], 22.0, 10.0)],
)
def test_two_hosts_of_eight_are_two_servers(inside, rail, across):
    """Inside, all links are alike, or pairs have NVLink and others PCIe; between hosts, GPUs of a number may have a rail."""
    host_G, local_G = np.divmod(np.arange(16), 8)
    same_host_GG, pair_GG = np.equal.outer(host_G, host_G), np.equal.outer(np.arange(16) // 2, np.arange(16) // 2)
    between_GG = np.where(np.equal.outer(local_G, local_G), rail, across)
    rate_GG = np.where(pair_GG, inside[-1], np.where(same_host_GG, inside[0], between_GG))
    assert find_servers(noisy(rate_GG, np.random.default_rng(0)), host_G).tolist() == host_G.tolist()
