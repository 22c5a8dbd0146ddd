"""Hosts as network namespaces, as bench/network builds them: ranks in them tell servers by their rates, and nothing is left behind."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from aurora.profiler import link_timing
from aurora.runtime.distributed.launcher import launch
from aurora.runtime.transports.gloo import GlooTransport

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


def namespaces():
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in listed.splitlines() if line.startswith(net.PREFIX)]


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
    return link_timing.time_links(GlooTransport(), ["even", "odd", "even", "odd"])


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
