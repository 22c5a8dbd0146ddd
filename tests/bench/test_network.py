"""Hosts as network namespaces, as bench/network builds them: what ranks in them send arrives, no faster than the ports' rates."""

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from aurora.algorithms.alltoall.registry import ORDER
from aurora.profiler import link_timing
from aurora.runtime.distributed.launcher import launch
from aurora.runtime.transports.gloo import GlooTransport
from aurora.types import Network

NETWORK = str(Path(__file__).parents[2] / "bench" / "network")
sys.path.append(NETWORK)
import net  # noqa: E402

WHY_NOT = net.refusal()
pytestmark = [
    pytest.mark.full,
    pytest.mark.root,
    pytest.mark.skipif(WHY_NOT is not None, reason=f"no network of namespaces here: {WHY_NOT}"),
]
BITS_S = 100e6
BYTES_GG = np.array([[0, 300_000, 700_000], [500_000, 0, 200_000], [400_000, 600_000, 0]])


def namespaces():
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in listed.splitlines() if line.startswith(net.PREFIX)]


def bytes_sent(host, device):
    command = ["ip", "netns", "exec", host, "cat", f"/sys/class/net/{device}/statistics/tx_bytes"]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def message(source, destination):
    return torch.full((int(BYTES_GG[source, destination]),), 10 * source + destination, dtype=torch.uint8)


def exchange(rank_info, hosts, store, name):
    """When this rank's all-to-all began and ended, and whether what came is what was sent to it."""
    sys.path.append(NETWORK)
    net.enter(hosts[rank_info.rank])
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, rank_info.ranks), rank=rank_info.rank, world_size=rank_info.ranks
    )
    transport = GlooTransport()
    order = ORDER[name](BYTES_GG, Network.equal(rank_info.ranks), rng=np.random.default_rng(0))
    sends = [message(rank_info.rank, other) for other in range(rank_info.ranks)]
    expected = [message(other, rank_info.rank) for other in range(rank_info.ranks)]
    recvs = [torch.empty_like(each) for each in expected]
    dist.barrier()
    began_s = time.monotonic()
    transport.exchange(order, sends, recvs, lambda *_: None)
    ended_s = time.monotonic()
    dist.barrier()
    dist.destroy_process_group()
    return began_s, ended_s, all(torch.equal(found, sent) for found, sent in zip(recvs, expected, strict=True))


@pytest.mark.parametrize("order", ["openshop", "all-at-once"])
def test_what_hosts_send_arrives_no_faster_than_their_ports(order, tmp_path):
    with net.network([BITS_S] * 3, 16 << 20) as hosts:
        assert len(namespaces()) == 4  # and the router
        spans = launch(exchange, 3, hosts, str(tmp_path / "store"), order)
    began_s, ended_s, same = zip(*spans, strict=True)
    assert all(same)
    at_once = 2 * net.SEGMENT * 5 / 4  # the buckets of both ends of a port
    busiest = max(BYTES_GG.sum(axis=0).max(), BYTES_GG.sum(axis=1).max())
    assert max(ended_s) - min(began_s) >= (busiest - at_once) / (BITS_S / 8)
    assert namespaces() == []


def busiest_nic_bytes(server_G, shared_nic):
    """Bytes that the busiest NIC carries one way."""
    apart_GG = np.not_equal.outer(server_G, server_G) * BYTES_GG
    sent_and_received = [apart_GG.sum(axis=1), apart_GG.sum(axis=0)]
    return max(max(np.bincount(server_G, each) if shared_nic else each) for each in sent_and_received)


@pytest.mark.parametrize("shared_nic", [False, True])
def test_nothing_passes_nics_faster_than_their_rate_and_ports_inside_are_apart_from_them(shared_nic, tmp_path):
    server_G = [0, 1, 1]
    with net.servers(server_G, 10 * BITS_S, BITS_S, shared_nic, 16 << 20) as hosts:
        assert len(namespaces()) == 6  # and the routers of the servers and between them
        spans = launch(exchange, 3, hosts, str(tmp_path / "store"), "all-at-once")
        began_s, ended_s, same = zip(*spans, strict=True)
        assert all(same)
        at_once = 2 * net.SEGMENT * 5 / 4
        assert max(ended_s) - min(began_s) >= (busiest_nic_bytes(server_G, shared_nic) - at_once) / (BITS_S / 8)
        sent = [bytes_sent(hosts[rank], "eth0") for rank in range(3)]
        inside = np.equal.outer(server_G, server_G) * BYTES_GG
        expected = inside.sum(axis=1) if not shared_nic else BYTES_GG.sum(axis=1)
        assert np.array(sent) == pytest.approx(expected, rel=0.1, abs=60_000)
    assert namespaces() == []


def find_links(rank_info, hosts, store):
    """What a rank finds of its links, in a few seconds: enough to tell servers, not for exact rates."""
    sys.path.append(NETWORK)
    net.enter(hosts[rank_info.rank])
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    link_timing.SIZES, link_timing.PATIENCE_S, link_timing.SPAN_S, link_timing.REPEATS = (
        (1 << 12, 1 << 17, 1 << 19),
        0.05,
        0.1,
        2,
    )
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, rank_info.ranks), rank=rank_info.rank, world_size=rank_info.ranks
    )
    return link_timing.time_links(GlooTransport())


@pytest.mark.parametrize("shared_nic", [False, True])
def test_measured_links_tell_servers_and_whether_they_share_a_nic(shared_nic, tmp_path):
    expected = [0, 1, 0, 1], shared_nic, pytest.approx(BITS_S / 8, rel=0.3)
    for attempt in range(6):  # so few exchanges tell little while other processes have the cores
        with net.servers([0, 1, 0, 1], 10 * BITS_S, BITS_S, shared_nic, 16 << 20) as hosts:
            links = launch(find_links, 4, hosts, str(tmp_path / f"store{attempt}"))[0]
        nic_Bps = links.nic_Bps if len(set(links.server_G.tolist())) > 1 else None
        if (links.server_G.tolist(), links.shared_nic, nic_Bps) == expected:
            break
    assert (links.server_G.tolist(), links.shared_nic, nic_Bps) == expected


@pytest.mark.parametrize(
    "build", [lambda: net.network([BITS_S] * 2, 1 << 20), lambda: net.servers([0, 1], BITS_S, BITS_S, True, 1 << 20)]
)
def test_a_network_is_gone_after_an_error(build):
    with pytest.raises(ZeroDivisionError), build():
        raise ZeroDivisionError
    assert namespaces() == []
