"""Datasheet figures: whole, plausible, and what is refused."""

import csv
import os
from pathlib import Path

import pytest

from aurora.errors import BadInput
from aurora.io import load_cluster, load_gpus, shipped
from aurora.types.cluster import PCIE_LANE_Bps

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


def test_shipped_clusters_name_kinds_that_are_known():
    kinds = load_gpus()
    for path in shipped("clusters").glob("*.toml"):
        for gpu in load_cluster(path).gpus:
            if gpu.kind.startswith("NVIDIA"):
                assert gpu.memory_bytes == kinds[gpu.kind].memory_bytes


def test_a_kind_without_links_has_its_pcie():
    assert load_gpus()["NVIDIA L40S"].port_Bps == pytest.approx(31.5e9, rel=0.01)
    assert load_gpus()["NVIDIA H100 80GB HBM3"].port_Bps == 450e9


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("schema = 1", "expected one \\[\\[gpu\\]\\] table or more"),
        ("schema = 2" + ROW, "expected schema = 1"),
        ("schema = 1" + ROW + ROW, "expected each kind once, found 'k' twice"),
        ("schema = 1" + ROW + "speed = 1", "unknown speed"),
        ("schema = 1" + ROW.replace("pcie = 4", ""), "lacks pcie"),
        ("schema = 1" + ROW.replace("pcie = 4", "pcie = 9"), "PCIe of generation 1 to 6, found 9"),
        ("schema = 1" + ROW.replace("1e9", "-1e9"), "memory_Bps must be a number above zero"),
        ("schema = 1" + ROW.replace("1e9", "nan"), "memory_Bps must be a number above zero"),
        ("schema = 1" + ROW.replace("1000", "1e3"), "memory_bytes must be a whole number"),
        ("schema = 1" + ROW.replace('"its vendor\'s datasheet"', '""'), "expected the source"),
        ("schema = 1\ngpu = [3]", "expected a table for kind 0"),
        ("gpu = ", "not TOML"),
    ],
)
def test_bad_files(tmp_path, toml, message):
    (tmp_path / "gpus.toml").write_text(toml)
    with pytest.raises(BadInput, match=message):
        load_gpus(tmp_path / "gpus.toml")


@pytest.mark.skipif(not RECORDED.exists(), reason="recorded figures are not here: set AURORA_DATA")
def test_another_collection_of_datasheets_says_the_same():
    same = {
        "a100_pcie": "NVIDIA A100 80GB PCIe",
        "a100_sxm": "NVIDIA A100-SXM4-80GB",
        "a30": "NVIDIA A30",
        "b200_sxm": "NVIDIA B200",
        "b300_sxm": "NVIDIA B300 SXM6 AC",
        "gb200": "NVIDIA GB200",
        "gb300": "NVIDIA GB300",
        "h100_pcie": "NVIDIA H100 PCIe",
        "h100_sxm": "NVIDIA H100 80GB HBM3",
        "h200_sxm": "NVIDIA H200",
        "l4": "NVIDIA L4",
        "l40s": "NVIDIA L40S",
    }
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
