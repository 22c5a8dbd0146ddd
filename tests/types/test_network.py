"""A network checks what it is made of, and stands for itself."""

from dataclasses import replace

import pytest

from aurora.errors import BadInput
from aurora.io import load_cluster
from aurora.types import Cluster, Gpu, Network, Servers

PAIR = Servers((0, 1), 1.0)


def test_equal_networks_are_equal_keys_and_print_in_a_line():
    one, other = Network.equal(8, Bps=50e9, startup_s=1e-5), Network.equal(8, 50e9, 1e-5)
    assert (one, hash(one), one.gpus) == (other, hash(other), 8)
    assert one != replace(one, incast=0.1)
    assert repr(one) == "Network(out_Bps_G=float64[8], in_Bps_G=float64[8], startup_s_G=float64[8], servers=None, incast=0.0)"
    with pytest.raises(ValueError, match="read-only"):
        one.out_Bps_G[0] = 1.0


def test_startups_are_zero_by_default():
    made = Network([1, 2], [3, 4])
    assert made.startup_s_G.tolist() == [0.0, 0.0]
    assert made.without_startup is made
    paying = replace(made, startup_s_G=[0.5, 0.25])
    assert paying.without_startup == made
    assert paying.pair_startup_s_GG.tolist() == [[0.5, 0.5], [0.5, 0.25]]
    assert paying.pair_Bps_GG.tolist() == [[1, 1], [2, 2]]
    assert not made.equal_ports
    assert Network.equal(3).equal_ports


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"out_Bps_G": [1.0, 0.0]}, "network: out_Bps_G: expected rates above zero, found 0.0"),
        ({"in_Bps_G": [-1.0, 1.0]}, "network: in_Bps_G: expected rates above zero, found -1.0"),
        ({"in_Bps_G": [1.0, float("nan")]}, "network: in_Bps_G: expected finite numbers, found nan"),
        ({"in_Bps_G": [1.0]}, "network: in_Bps_G: expected 2 along G as in out_Bps_G, found 1"),
        ({"startup_s_G": [0.0, -1.0]}, "network: startup_s_G: expected seconds of zero or more, found -1.0"),
        ({"startup_s_G": [0.0] * 3}, "network: startup_s_G: expected 2 along G as in out_Bps_G, found 3"),
        ({"incast": 1.5}, "network: incast must lie between 0 and 1, found 1.5"),
        ({"incast": float("nan")}, "network: incast must lie between 0 and 1, found nan"),
    ],
)
def test_bad_columns_say_what_is_wrong(change, message):
    with pytest.raises(BadInput, match=message):
        replace(Network.equal(2), **change)


def test_servers_are_of_their_network():
    assert Network([1.0, 1.0], [1.0, 1.0], servers=PAIR).servers is PAIR
    with pytest.raises(BadInput, match="network: expected servers of 3 GPUs, found 2"):
        replace(Network.equal(3), servers=PAIR)


def test_a_cluster_gives_all_of_its_network():
    gpus = [Gpu(f"g{i}", "k", 0, 1.0 + i, 3.0 + i, 10, startup_s=0.5 * i) for i in range(2)]
    network = Cluster("c", tuple(gpus), PAIR, 0.25).network
    assert network == Network([1.0, 2.0], [3.0, 4.0], [0.0, 0.5], PAIR, 0.25)


def test_some_of_a_clusters_gpus_keep_their_servers():
    whole = load_cluster("h100-servers-32")
    half = whole.at_ranks(range(8, 24))
    assert half.gpus == whole.gpus[8:24]
    assert half.servers.server_G == (0,) * 8 + (1,) * 8
    assert half.servers.nic_Bps == whole.servers.nic_Bps
    assert half.network.pair_Bps_GG[0, 15] == whole.network.pair_Bps_GG[8, 23]
    assert whole.at_ranks([3, 1]).servers is None
    assert [gpu.name for gpu in whole.at_ranks([3, 1]).gpus] == [whole.gpus[3].name, whole.gpus[1].name]
    pairs = replace(whole, servers=Servers.of([gpu.node for gpu in whole.gpus], 50e9, nic_G=[rank // 2 for rank in range(32)]))
    assert pairs.at_ranks([0, 1, 2, 9]).servers == Servers((0, 0, 0, 1), 50e9, (0, 0, 1, 2))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"nic_Bps": 0}, "servers: nic_Bps must be a number above zero, found 0"),
        ({"nic_G": (0, 1, 2)}, "servers: expected a NIC for each of 4 GPUs, found 3"),
        ({"nic_G": (0, 1, 1, 2)}, "servers: expected each NIC in one server, found one in several"),
    ],
)
def test_servers_say_what_is_wrong(fields, message):
    with pytest.raises(BadInput, match=message):
        Servers(**{"server_G": (0, 0, 1, 1), "nic_Bps": 1.0, **fields})


def test_servers_may_span_hosts_and_share_nics():
    """GB200: 4 GPUs a host, 72 an NVLink domain. Numbers of any kind become numbers from zero."""
    rack = Servers.of([0] * 72 + [5] * 72, 50e9)
    assert (rack.gpus, set(rack.server_G), rack.shared, len(set(rack.nic_G))) == (144, {0, 1}, False, 144)
    assert Servers.of([9, 9, 3, 3], 1.0, shared_nic=True) == Servers((1, 1, 0, 0), 1.0, (0, 0, 1, 1))
