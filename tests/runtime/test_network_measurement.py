"""What timed exchanges tell of a network."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aurora.algorithms.network.switch import steps_seconds
from aurora.runtime.order_calibration import measured_network, startups_and_share
from aurora.types import Cluster, Gpu, Servers


@given(st.floats(0, 0.1), st.floats(0.1, 2))
def test_a_line_is_found_again(startups_s, share):
    found = startups_and_share((0.001, 0.3), (startups_s + 0.001 / share, startups_s + 0.3 / share))
    assert found == pytest.approx((startups_s, share), abs=1e-9)


def test_a_small_exchange_that_passes_in_a_burst_tells_no_rate():
    assert startups_and_share((0.001, 0.3), (0.0002, 0.4)) == (0.0, pytest.approx(0.75))


def test_a_network_too_fast_to_be_timed_keeps_its_rates():
    assert startups_and_share((0.001, 0.3), (0.02, 0.01)) == (0.02, 1.0)


class Emulated:
    """Rank 0's transport, where an exchange takes what a network says; ranks of a server send alike, as do those of others."""

    rank = 0

    def __init__(self, network, server_G):
        self.ranks, self._network, self._server_G, self._took_s = network.gpus, network, np.array(server_G), None

    def gather(self, row):
        took_s, self._took_s = self._took_s, None
        return torch.stack([row if took_s is None else torch.full_like(row, took_s)] * self.ranks)

    def exchange(self, order, sends, recvs, observe):
        assert [len(each) for each in sends] == [len(each) for each in recvs]
        same_GG = np.equal.outer(self._server_G, self._server_G)
        size_by_same = {bool(same_GG[0, peer]): len(each) for peer, each in enumerate(sends) if peer and len(each)}
        bytes_GG = np.where(same_GG, size_by_same.get(True, 0), size_by_same.get(False, 0)) * ~np.eye(self.ranks, dtype=bool)
        self._took_s = steps_seconds(order, bytes_GG[None], self._network)

    def wait(self):
        pass


def machines(server_G, port_Bps, nic_Bps, startup_s=0.0, shared_nic=False):
    gpus = tuple(
        Gpu(f"gpu{rank}", "cpu", node, port_Bps, port_Bps, 10**9, 1.0, startup_s) for rank, node in enumerate(server_G)
    )
    servers = None if nic_Bps is None else Servers.of(server_G, nic_Bps, shared_nic)
    return Cluster("machines", gpus, servers)


@pytest.mark.parametrize(
    ("server_G", "nic_Bps", "true_nic_Bps", "shared_nic"),
    [
        ([0, 0, 1, 1], 2e8, 1.5e8, False),
        ([0, 1, 0, 1, 2], 2e8, 1.5e8, False),
        ([0, 0, 1, 1], 2e8, 1.5e8, True),
        ([0, 1, 2], 2e8, 1.5e8, False),
        ([0, 0, 0], None, None, False),
    ],
)
def test_ports_and_nics_are_measured_apart(server_G, nic_Bps, true_nic_Bps, shared_nic):
    told = machines(server_G, 1e9, nic_Bps, shared_nic=shared_nic)
    true = machines(server_G, 0.6e9, true_nic_Bps, 1e-4, shared_nic)
    found = measured_network(Emulated(true.network, server_G), told, "cpu")
    if len(set(server_G)) < len(server_G):
        assert found.out_Bps_G == pytest.approx(true.out_Bps_G, rel=0.01)
        assert found.in_Bps_G == pytest.approx(true.in_Bps_G, rel=0.01)
    assert found.startup_s_G == pytest.approx(true.startup_s_G, rel=0.05)
    if nic_Bps is not None:
        assert found.servers.nic_Bps == pytest.approx(true_nic_Bps, rel=0.01)
        assert (found.servers.shared, found.servers.server_G) == (shared_nic, told.servers.server_G)


def test_one_rank_measures_nothing():
    alone = replace(machines([0], 1e9, None), name="alone")
    assert measured_network(Emulated(alone.network, [0]), alone, "cpu") == alone
