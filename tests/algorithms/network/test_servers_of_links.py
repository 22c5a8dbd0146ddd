"""Servers derived from links: domains, shared NICs and the narrowest cut, by hand."""

import pytest

from aurora.algorithms.network.servers_of_links import Link, servers_of_links
from aurora.errors import BadInput
from aurora.types import Servers


def cables(*ends):
    """Links both ways."""
    return [Link(*way, Bps) for a, b, Bps in ends for way in ((a, b), (b, a))]


def leaves(leaf_G, port, uplink, spines=2):
    leaves = sorted(set(leaf_G))
    ports = [(gpu, leaf, port) for gpu, leaf in enumerate(leaf_G)]
    return cables(*ports, *((leaf, f"spine-{spine}", uplink) for leaf in leaves for spine in range(spines)))


def nodes(gpus_G, nic_of, inside=100.0, nic=10.0):
    """NVLink switches of some GPUs each, NICs by name, and a core."""
    ends = [(gpu, f"inside-{node}", inside) for gpu, node in enumerate(gpus_G)]
    ends += [(gpu, nic_of(gpu), inside) for gpu in range(len(gpus_G))]
    return cables(*ends, *((name, "core", nic) for name in dict.fromkeys(map(nic_of, range(len(gpus_G))))))


def test_gpus_of_an_oversubscribed_leaf_share_its_uplinks():
    found = servers_of_links(leaves(["a", "a", "a", "b", "b", "b"], 8.0, 6.0), 6)
    assert (found.server_G, found.nic_Bps, found.nic_G) == ((0, 0, 0, 1, 1, 1), 12.0, (0, 0, 0, 1, 1, 1))
    assert found.narrowest_cut == "a -> spine-0, a -> spine-1, for 3 of 6 GPUs"


def test_uplinks_that_carry_all_ports_are_as_many_nics():
    found = servers_of_links(leaves(["a", "a", "b", "b"], 8.0, 8.0), 4)
    assert (found.server_G, found.nic_Bps, found.nic_G) == ((0, 0, 1, 1), 8.0, (0, 1, 2, 3))


def test_gpus_share_a_nic_where_less_can_leave_them_together():
    own = servers_of_links(nodes([0, 0, 0, 0, 1, 1, 1, 1], lambda gpu: f"nic-{gpu}"), 8)
    assert (own.server_G, own.nic_Bps, own.nic_G) == ((0,) * 4 + (1,) * 4, 10.0, tuple(range(8)))
    pairs = servers_of_links(nodes([0, 0, 0, 0, 1, 1, 1, 1], lambda gpu: f"nic-{gpu // 2}"), 8)
    assert (pairs.nic_Bps, pairs.nic_G) == (10.0, (0, 0, 1, 1, 2, 2, 3, 3))
    assert "for 4 of 8 GPUs" in pairs.narrowest_cut
    whole = servers_of_links(nodes([0, 0, 1, 1], lambda gpu: f"nic-{gpu // 2}"), 4)
    assert whole == Servers((0, 0, 1, 1), 10.0, (0, 0, 1, 1), whole.narrowest_cut)


def test_a_rack_behind_few_uplinks_is_the_narrowest_cut():
    """Two racks of two servers of two GPUs: NICs of 10 each, 40 a rack, on a link of 20 to the spine. Plans count the NICs."""
    ends = [(f"nic-{gpu}", f"rack-{gpu // 4}", 10.0) for gpu in range(8)]
    ends += [(gpu, f"nic-{gpu}", 10.0) for gpu in range(8)] + [(gpu, f"inside-{gpu // 2}", 100.0) for gpu in range(8)]
    found = servers_of_links(cables(*ends, ("rack-0", "spine", 20.0), ("rack-1", "spine", 20.0)), 8)
    assert (found.server_G, found.nic_Bps, found.shared) == ((0, 0, 1, 1, 2, 2, 3, 3), 10.0, False)
    assert found.narrowest_cut == "rack-0 -> spine, for 4 of 8 GPUs"


def test_gpus_behind_one_switch_are_one_server():
    assert servers_of_links(cables((0, "hub", 5.0), (1, "hub", 7.0), (2, "hub", 5.0)), 3) is None


def test_marked_links_make_the_domains():
    """NVLink pairs in a host of four: PCIe is no slower here, but not NVLink."""
    links = [link._replace(nvlink=True) for link in cables((0, 1, 5.0), (2, 3, 5.0))]
    found = servers_of_links(links + cables(*((gpu, "pcie", 5.0) for gpu in range(4))), 4)
    assert (found.server_G, found.nic_Bps, found.nic_G) == ((0, 0, 1, 1), 5.0, (0, 1, 2, 3))


@pytest.mark.parametrize(
    ("links", "message"),
    [
        ([Link(0, "s", 1.0), Link("s", 7, 1.0)], "link s -> rank 7: expected ranks 0 to 1, found 7"),
        ([Link("leaf", "leaf", 1.0)], "link leaf -> leaf: expected two ends, and Bps above zero, found 1.0"),
        ([Link(0, "s", float("nan"))], "link rank 0 -> s: expected two ends, and Bps above zero, found nan"),
        ([*cables((0, "s", 1.0)), Link(1, "s", 1.0)], "a way from each GPU to every other, found none from 0 to 1"),
        ([*cables((0, "s", 1.0), (1, "s", 1.0)), Link(0, "s", 1.0)], "expected link rank 0 -> s once"),
        ([], "found none from 0 to 1"),
    ],
)  # fmt: skip
def test_links_that_make_no_servers(links, message):
    with pytest.raises(BadInput, match=message):
        servers_of_links(links, 2)


def test_gpus_do_not_forward():
    with pytest.raises(BadInput, match="found none from 0 to 2"):
        servers_of_links(cables((0, 1, 1.0), (1, 2, 1.0)), 3)


def test_nics_of_several_rates_are_refused():
    with pytest.raises(BadInput, match="fabric: expected NICs of one rate, found 1 to 2 bytes per second"):
        servers_of_links(cables(*((gpu, f"nic-{gpu}", 9.0) for gpu in range(3)), ("nic-0", "core", 1.0), ("nic-1", "core", 2.0),
                                ("nic-2", "core", 2.0)), 3)  # fmt: skip
