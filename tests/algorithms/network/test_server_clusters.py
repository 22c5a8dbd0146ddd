"""Servers found in the rates of links whose servers are known, with noise."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aurora.algorithms.network.measured_links import find_servers
from aurora.errors import BadInput
from tests.strategies import RATES

NOISE = 0.05
SEEDS = st.integers(0, 2**32)


def noisy(rate_GG, rng):
    """Rates that are up to NOISE off, without a diagonal."""
    return np.asarray(rate_GG) * rng.uniform(1 - NOISE, 1 + NOISE, np.shape(rate_GG)) * (1 - np.eye(len(rate_GG)))


def first_seen(label_G):
    """Labels numbered in the order of their first ranks."""
    names = list(dict.fromkeys(label_G))
    return [names.index(label) for label in label_G]


@given(
    st.lists(st.integers(1, 8), min_size=1, max_size=5),
    st.lists(st.floats(1.6, 40.0), min_size=7, max_size=7),
    SEEDS,
)
def test_servers_of_any_sizes_are_found_where_two_have_several_ranks(sizes, faster, seed):
    """GPUs of one server are of one kind, those of others may be of another."""
    sizes = [2, 2, *sizes]
    rng = np.random.default_rng(seed)
    server_G = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    inside_GG = np.equal.outer(server_G, server_G)
    rate_GG = np.where(inside_GG, np.array(faster)[server_G][:, None], 1.0) * 1e9
    assert find_servers(noisy(rate_GG, rng)).tolist() == first_seen(server_G.tolist())


@given(st.lists(st.sampled_from(RATES), min_size=2, max_size=12), SEEDS)
def test_ports_of_one_switch_are_no_servers(port_G, seed):
    rate_GG = np.minimum.outer(port_G, port_G) * 1e9
    assert not find_servers(noisy(rate_GG, np.random.default_rng(seed))).any()


@given(SEEDS)
def test_one_measurement_that_was_disturbed_hides_no_servers(seed):
    rng = np.random.default_rng(seed)
    server_G = np.repeat([0, 1, 2], 4)
    rate_GG = noisy(np.where(np.equal.outer(server_G, server_G), 10.0, 1.0), rng)
    src, dst = rng.choice(12, 2, replace=False)
    rate_GG[src, dst] /= 2
    assert find_servers(rate_GG).tolist() == server_G.tolist()


def test_racks_of_servers_are_told_from_servers():
    """Links are 20 inside servers, 2 inside racks of two servers, and 1 between racks: the servers are what is uniform inside."""
    server_G, rack_G = np.repeat(np.arange(4), 3), np.repeat(np.arange(2), 6)
    in_rack_GG = np.where(np.equal.outer(rack_G, rack_G), 2.0, 1.0)
    rate_GG = np.where(np.equal.outer(server_G, server_G), 20.0, in_rack_GG) * (1 - np.eye(12))
    assert find_servers(rate_GG).tolist() == server_G.tolist()


def test_servers_are_not_smaller_than_hosts():
    """Pairs of GPUs are linked inside hosts of four, whose other links are 20, 2 times as fast as those between hosts."""
    pair_G, host_G = np.repeat(np.arange(4), 2), np.repeat([0, 1], 4)
    in_host_GG = np.where(np.equal.outer(host_G, host_G), 20.0, 10.0)
    rate_GG = np.where(np.equal.outer(pair_G, pair_G), 100.0, in_host_GG) * (1 - np.eye(8))
    assert find_servers(rate_GG).tolist() == pair_G.tolist()
    assert find_servers(rate_GG, host_G).tolist() == host_G.tolist()


def test_pairs_of_nvlink_on_one_host_are_no_servers():
    """Eight GPUs of one host: pairs have NVLink, halves a PCIe switch. Only rates without hosts tell servers there."""
    pair_G, half_G = np.repeat(np.arange(4), 2), np.repeat([0, 1], 4)
    rate_GG = np.where(np.equal.outer(half_G, half_G), 20.0, 12.0)
    rate_GG = np.where(np.equal.outer(pair_G, pair_G), 200.0, rate_GG) * (1 - np.eye(8))
    assert not find_servers(rate_GG, np.zeros(8, dtype=np.int64)).any()
    assert find_servers(rate_GG).tolist() == pair_G.tolist()


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


def test_servers_of_several_hosts_are_found():
    """Racks of two hosts each, which one switch connects at the rate inside hosts."""
    rack_G = np.repeat([0, 1], 4)
    rate_GG = np.where(np.equal.outer(rack_G, rack_G), 900.0, 50.0) * (1 - np.eye(8))
    assert find_servers(rate_GG, np.arange(8) // 2).tolist() == rack_G.tolist()


def test_rates_are_above_zero():
    with pytest.raises(BadInput, match="find_servers: rate_Bps_GG: expected a square of rates above zero"):
        find_servers(np.zeros((3, 3)))
