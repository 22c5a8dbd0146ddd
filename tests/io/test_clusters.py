"""Cluster files, and datasheets of kinds of GPU."""

import csv
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aurora.advisor.datasheet_gpus import cluster_of
from aurora.errors import BadInput
from aurora.io import load_cluster, load_gpus, save, save_cluster, shipped
from aurora.types import Cluster, Gpu
from aurora.types.cluster import PCIE_LANE_Bps
from tests.strategies import clusters, servers

words = st.text(st.characters(exclude_categories=("Cs",)).filter(str.isprintable), max_size=12)
remarks = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)


@given(clusters(), words, words, st.sampled_from([0.0, 0.25]), st.lists(remarks, max_size=3))
def test_any_cluster_comes_back(tmp_path_factory, machines, name, rack, incast, remarks):
    file = tmp_path_factory.mktemp("clusters") / "written.toml"
    gpus = tuple(replace(gpu, name=name + str(i), rack=rack, failure_rate=0.1) for i, gpu in enumerate(machines.gpus))
    written = Cluster(name, gpus, None, incast)
    save_cluster(written, file, remarks)
    assert load_cluster(file) == written


@given(servers(4), st.sampled_from([(0, 0, 0, 0), (0, 0, 1, 1), (3, 3, 8, 8), (0, 1, 0, 1)]))
def test_any_servers_of_any_nodes_come_back(tmp_path_factory, drawn, nodes):
    """Numbers of numpy, too."""
    file = tmp_path_factory.mktemp("clusters") / "written.toml"
    gpus = tuple(
        Gpu(f"g{rank}", "k", node, np.float64(1e9), np.float64(2e9), np.int64(10**9)) for rank, node in enumerate(nodes)
    )
    written = Cluster("drawn", gpus, servers=replace(drawn, narrowest_cut="a -> b, for 2 of 4 GPUs"))
    save(written, file)
    assert load_cluster(file) == written


@pytest.mark.parametrize(
    ("gpus", "per_server", "nodes", "servers"),
    [
        ("gb200:16", None, [4, 4, 4, 4], None),  # trays of 4 in one NVLink domain of 72
        ("gb300:74", None, [4] * 18 + [2], [72, 2]),  # two domains
        ("h100:16", None, [8, 8], [8, 8]),
        ("h100:8", 4, [4, 4], [4, 4]),
        ("gb200:8,h100:8", None, [4, 4, 8], [8, 8]),
    ],
)
def test_servers_of_kinds(gpus, per_server, nodes, servers):
    made = cluster_of(gpus, load_gpus(), per_server=per_server)
    assert [*Counter(gpu.node for gpu in made.gpus).values()] == nodes
    assert (made.servers and [*Counter(made.servers.server_G).values()]) == servers


def test_a_topology_is_no_cluster(tmp_path):
    file = tmp_path / "topo.txt"
    file.write_text("\t\x1b[4mGPU0\tGPU1\tCPU Affinity\x1b[0m\nGPU0\t X \tNV18\t0-31\nGPU1\tNV18\t X \t0-31\n")
    with pytest.raises(BadInput, match=r"topology, for .* fabric = {kind = \"nvidia-smi\", topology = \"topo\.txt\""):
        load_cluster(file)


RECORDED = Path(os.environ.get("AURORA_DATA", Path(__file__).parents[3] / "shared" / "data")) / "gpu_moe_aiconfigurator"
ROW = """
[[gpu]]
kind = "k"
memory_bytes = 1000
memory_Bps = 1e9
half_flops = 1e12
pcie = 4
source = "its vendor's datasheet"
"""


def test_what_is_shipped_is_plausible():
    kinds = load_gpus()
    assert len(kinds) >= 25
    for kind, found in kinds.items():
        assert kind == found.kind
        assert kind.split()[0] in {"NVIDIA", "AMD", "Tesla"}
        assert found.kind.split()[0] == "Tesla" or found.source.startswith(found.kind.split()[0])
        assert 8e9 < found.memory_bytes < 1e12
        assert 100e9 < found.memory_Bps < 1e13
        assert 30 < found.half_flops / found.memory_Bps < 700  # FLOPS a byte of memory traffic
        if found.fp8_flops is not None:  # twice the half-precision peak on every kind that has it
            assert found.fp8_flops == pytest.approx(2 * found.half_flops, rel=0.02)
        assert found.port_Bps >= 16 * PCIE_LANE_Bps[found.pcie]
    assert kinds["NVIDIA L40S"].port_Bps == pytest.approx(31.5e9, rel=0.01)


def test_shipped_clusters_name_kinds_that_are_known():
    kinds = load_gpus()
    for path in shipped("clusters").glob("*.toml"):
        for gpu in load_cluster(path).gpus:
            if gpu.kind.startswith("NVIDIA"):
                assert gpu.memory_bytes == kinds[gpu.kind].memory_bytes


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("schema = 1" + ROW + ROW, "expected each kind once, found 'k' twice"),
        ("schema = 1" + ROW + "speed = 1", r"gpu\[0\]: unknown speed; expected attention_share, "),
        ("schema = 1" + ROW.replace("pcie = 4", "pcie = 9"), "PCIe of generation 1 to 6, found 9"),
        ("schema = 1" + ROW.replace('"its vendor\'s datasheet"', '""'), "expected the source"),
    ],
)
def test_bad_files(tmp_path, toml, message):
    (tmp_path / "gpus.toml").write_text(toml)
    with pytest.raises(BadInput, match=message):
        load_gpus(tmp_path / "gpus.toml")


@pytest.mark.skipif(not RECORDED.exists(), reason="recorded figures are not here: set AURORA_DATA")
def test_another_collection_of_datasheets_says_the_same():
    same = {
        "a100_pcie": "NVIDIA A100 80GB PCIe", "a100_sxm": "NVIDIA A100-SXM4-80GB", "a30": "NVIDIA A30", "l40s": "NVIDIA L40S",
        "b200_sxm": "NVIDIA B200", "b300_sxm": "NVIDIA B300 SXM6 AC", "gb200": "NVIDIA GB200", "gb300": "NVIDIA GB300",
        "h100_pcie": "NVIDIA H100 PCIe", "h100_sxm": "NVIDIA H100 80GB HBM3", "h200_sxm": "NVIDIA H200", "l4": "NVIDIA L4",
    }  # fmt: skip
    kinds = load_gpus()
    with (RECORDED / "gpu_specs.csv").open() as file:
        rows = {row["gpu"]: row for row in csv.DictReader(file)}
    for name, kind in same.items():
        found = kinds[kind]
        assert found.memory_Bps == pytest.approx(float(rows[name]["mem_bw"]), rel=0.04)
        assert found.memory_bytes == pytest.approx(float(rows[name]["mem_capacity"]), rel=0.08)
        assert found.half_flops == pytest.approx(float(rows[name]["bfloat16_tc_flops"]), rel=0.01)
        if rows[name]["fp8_tc_flops"]:
            assert found.fp8_flops == pytest.approx(float(rows[name]["fp8_tc_flops"]), rel=0.01)
