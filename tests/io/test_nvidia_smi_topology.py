"""Clusters from the output of `nvidia-smi topo -m`: domains by NVLink, NICs by what lies between."""

import numpy as np
import pytest

from aurora.errors import BadInput
from aurora.io import load_cluster
from aurora.planner.plan import make_plan
from aurora.reports.plan_tables import bound_lines
from aurora.types import Servers
from tests.simulator.test_interpreter import profile

LEGEND = """
Legend:

  X    = Self
  NV#  = Connection traversing a bonded set of # NVLinks

NIC Legend:
"""
OWN = """\t\x1b[4mGPU0\tGPU1\tNIC0\tNIC1\tNIC2\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tPIX\tNODE\tSYS\t0-47\t0\t\tN/A
GPU1\tNV18\t X \tNODE\tPIX\tSYS\t48-95\t1\t\tN/A
NIC0\tPIX\tNODE\t X \tNODE\tSYS
NIC1\tNODE\tPIX\tNODE\t X \tSYS
NIC2\tSYS\tSYS\tSYS\tSYS\t X
"""
PAIRS = """\tGPU0\tGPU1\tGPU2\tGPU3\tmlx5_0\tmlx5_1\tCPU Affinity\tNUMA Affinity
GPU0\t X \tNV4\tNV4\tNV4\tPXB\tSYS\t0-31\t0
GPU1\tNV4\t X \tNV4\tNV4\tPXB\tSYS\t0-31\t0
GPU2\tNV4\tNV4\t X \tNV4\tSYS\tPXB\t32-63\t1
GPU3\tNV4\tNV4\tNV4\t X \tSYS\tPXB\t32-63\t1
mlx5_0\tPXB\tPXB\tSYS\tSYS\t X \tSYS
mlx5_1\tSYS\tSYS\tPXB\tPXB\tSYS\t X
"""
PCIE = OWN.replace("NV18", "PHB")
BRIDGES = """\tGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity
GPU0\t X \tNV4\tSYS\tSYS\tSYS\t0-31
GPU1\tNV4\t X \tSYS\tSYS\tSYS\t0-31
GPU2\tSYS\tSYS\t X \tNV4\tPIX\t0-31
GPU3\tSYS\tSYS\tNV4\t X \tPIX\t0-31
NIC0\tSYS\tSYS\tPIX\tPIX\t X
"""


def hosts_of(folder, fabric, hosts, gpus, port_Bps):
    """A cluster of hosts from node 3 on, between which is `fabric`."""
    rows = [f'[[gpu]]\nname="h{host}"\nkind="k"\nnode={host + 3}\nout_Bps={port_Bps}\nin_Bps={port_Bps}\nmemory_bytes=1000\ncount={gpus}'
            for host in range(hosts)]  # fmt: skip
    (folder / "c.toml").write_text("\n".join(["schema = 1", "[fabric]", *fabric, *rows]))
    return load_cluster(folder / "c.toml")


def cluster_of(folder, text, hosts, gpus):
    """Hosts with the topology `text`."""
    (folder / "topo.txt").write_text(text + LEGEND)
    return hosts_of(folder, ('kind = "nvidia-smi"', 'topology = "topo.txt"', "nic_Bps = 5e6"), hosts, gpus, 4e7)


@pytest.mark.parametrize(
    ("text", "gpus", "server_G", "nic_G"),
    [
        (OWN, 2, (0, 0, 1, 1), (0, 1, 2, 3)),
        (PCIE, 2, (0, 0, 1, 1), (0, 1, 2, 3)),
        (PAIRS, 4, (0,) * 4 + (1,) * 4, (0, 0, 1, 1, 2, 2, 3, 3)),
    ],
    ids=["a-nic-each", "no-nvlink", "two-share-a-nic"],
)
def test_two_hosts(tmp_path, text, gpus, server_G, nic_G):
    found = cluster_of(tmp_path, text, 2, gpus).servers
    assert (found.server_G, found.nic_Bps, found.nic_G) == (server_G, 5e6, nic_G)


def test_one_host_is_limited_by_its_ports_alone(tmp_path):
    assert cluster_of(tmp_path, OWN, 1, 2).servers is None


def test_the_report_names_the_narrowest_cut(tmp_path):
    machines = cluster_of(tmp_path, PAIRS, 2, 4)
    p = profile(np.full((1, 1, 8, 8), 10).tolist(), gate=1, expert=1, aggregate=1)
    (line,) = [line for line in bound_lines(make_plan(machines, [p])) if "narrowest cut" in line]
    assert "mlx5_0 of node 3 -> network, mlx5_1 of node 3 -> network, for 4 of 8 GPUs" in line


def test_an_nvlink_domain_spans_hosts(tmp_path):
    """Like GB200: 8 hosts of 4 GPUs in one domain have no NICs between them; 16 hosts are two servers of 32 GPUs."""

    def racks(domains):
        server_of_gpu = [domain for domain in range(domains) for _ in range(32)]
        fabric = 'kind = "servers"', "nic_Bps = 5e7", f"server_of_gpu = {server_of_gpu}"
        return hosts_of(tmp_path, fabric, 8 * domains, 4, 9e7)

    one = racks(1)
    assert one.servers == Servers((0,) * 32, 5e7)
    p = profile(np.full((1, 1, 32, 32), 10).tolist(), gate=1, expert=1, aggregate=1)
    plan = make_plan(one, [p])
    assert plan.models[0].hierarchy is None
    assert plan.models[0].cut_L[0].links[0].split(" of ")[0] in ("sending port", "receiving port")
    two = racks(2)
    assert (two.servers.server_G, len(set(two.servers.nic_G))) == ((0,) * 32 + (1,) * 32, 64)
    assert len({gpu.node for gpu in two.gpus}) == 16  # what fails together stays the host


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing", "topo.txt: expected the output of `nvidia-smi topo -m`, whose first line names GPU0"),
        (OWN.replace("NV18", "QPI"), "topo.txt: GPU0 to GPU1: expected NV and a number, or one of PIX, .*, found 'QPI'"),
        (OWN.replace("GPU1\tNV18\t X \tNODE\tPIX\tSYS\t48-95\t1\t\tN/A", "GPU1\tNV18"), "topo.txt: GPU1: expected a row of 5"),
        (PAIRS, "topo.txt: expected 2 GPUs, as in node 3, found 4"),
        (BRIDGES, "expected NVLink between all 4 GPUs or none, found it between GPU0, GPU1 and GPU2, GPU3 alone"),
        ("\tGPU0\tGPU1\nGPU0\t X\tNV4\nGPU1\tNV4\t X\n", "expected a way from each GPU to every other, found none from 0 to 2"),
    ],
)
def test_wrong_topologies_are_refused_by_name(tmp_path, text, message):
    with pytest.raises(BadInput, match=message) as error:
        cluster_of(tmp_path, text, 2, 2)
    assert "c.toml" in str(error.value) or "topo.txt" in str(error.value)
    (tmp_path / "topo.txt").unlink()
    with pytest.raises(BadInput, match=r"topo\.txt: no such file"):
        load_cluster(tmp_path / "c.toml")
