"""A network checks what it is made of, and stands for itself."""

from dataclasses import replace

import pytest

from aurora.errors import BadInput
from aurora.io import load_cluster
from aurora.types import Cluster, Fabric, Gpu, Link, Network
from aurora.types.network import leaf_spine

PAIR = Fabric(2, (Link(0, 1, 1.0), Link(1, 0, 1.0)))


def test_equal_networks_are_equal_keys_and_print_in_a_line():
    one, other = Network.equal(8, Bps=50e9, startup_s=1e-5), Network.equal(8, 50e9, 1e-5)
    assert (one, hash(one), one.gpus) == (other, hash(other), 8)
    assert one != replace(one, incast=0.1)
    assert (
        repr(one)
        == "Network(out_Bps_G=float64[8], in_Bps_G=float64[8], startup_s_G=float64[8], fabric=None, incast=0.0, curves=())"
    )
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


def test_a_fabric_is_of_its_network():
    assert Network([1.0, 1.0], [1.0, 1.0], fabric=PAIR).fabric is PAIR
    with pytest.raises(BadInput, match="network: expected a fabric of 3 GPUs, found one of 2"):
        replace(Network.equal(3), fabric=PAIR)


def test_a_cluster_gives_all_of_its_network():
    gpus = [Gpu(f"g{i}", "k", 0, 1.0 + i, 3.0 + i, 10, startup_s=0.5 * i) for i in range(2)]
    network = Cluster("c", tuple(gpus), PAIR, 0.25).network
    assert network == Network([1.0, 2.0], [3.0, 4.0], [0.0, 0.5], PAIR, 0.25)


def test_some_of_a_clusters_gpus_keep_their_servers():
    whole = load_cluster("h100-servers-32")
    half = whole.at_ranks(range(8, 24))
    assert half.gpus == whole.gpus[8:24]
    assert half.fabric.server_G == (0,) * 8 + (1,) * 8
    assert half.fabric.nic_Bps == whole.fabric.nic_Bps
    assert half.network.pair_Bps_GG[0, 15] == whole.network.pair_Bps_GG[8, 23]
    assert whole.at_ranks([3, 1]).fabric is None
    assert [gpu.name for gpu in whole.at_ranks([3, 1]).gpus] == [whole.gpus[3].name, whole.gpus[1].name]
    leaves = replace(whole, fabric=leaf_spine(["a", "b"] * 16, [1e9] * 32, [1e9] * 32, 1, 1e9))
    with pytest.raises(BadInput, match="expected no fabric, or servers with a NIC for each GPU"):
        leaves.at_ranks([0])
