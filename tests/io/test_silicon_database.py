"""Silicon measurements: read from an installed package's tables, and refused by name where there are none."""

import sys

import pytest

from aurora.errors import BadInput
from aurora.io import silicon_database as database

SPECS = "gpu:\n  mem_capacity: 1000\nnode:\n  num_gpus_per_node: 4\n  intra_node_bw: 500\n"
ROWS = [  # operation, type, GPUs, elements, milliseconds
    ("alltoall", "half", 2, 100, 5.0),
    ("alltoall", "int8", 4, 400, 7.0),
    ("all_gather", "half", 2, 100, 3.0),
    ("alltoall", "other", 2, 100, 1.0),
]
COLUMNS = ("op_name", "nccl_dtype", "num_gpus", "message_size", "latency")


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A package with one system, whose table of version 2.9 is replaced in 2.10."""
    folder = tmp_path / "aiconfigurator_core"
    (folder / "systems" / "data" / "one").mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "systems" / "one.yaml").write_text(SPECS)
    (folder / "systems" / "unmeasured.yaml").write_text(SPECS)
    monkeypatch.syspath_prepend(tmp_path)
    return folder / "systems" / "data" / "one" / "comm" / "nccl"


def write(folder, rows):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    folder.mkdir(parents=True)
    columns = {name: list(column) for name, column in zip(COLUMNS, zip(*rows, strict=True), strict=True)}
    parquet.write_table(arrow.table(columns), folder / "nccl_perf.parquet")


def test_the_newest_table_counts_and_buffers_become_what_ports_send(installed):
    write(installed / "2.9", [("alltoall", "half", 2, 1, 1.0)])
    write(installed / "2.10", ROWS)
    points = database.all_to_all_points("one")
    assert {partners: (sent.tolist(), took.tolist()) for partners, (sent, took) in points.items()} == {
        1: ([100.0], [0.005]),
        3: ([300.0], [0.007]),
    }


def test_what_is_missing_is_named(installed, monkeypatch):
    assert database.systems() == ["one"]
    with pytest.raises(BadInput, match="`system`: expected one of one, found 'unmeasured'"):
        database.all_to_all_points("unmeasured")
    with pytest.raises(BadInput, match=r"of one: expected comm/nccl/\*/nccl_perf.parquet, found none"):
        database.all_to_all_points("one")
    (installed / "2.9").mkdir(parents=True)
    (installed / "2.9" / "nccl_perf.parquet").touch()
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(BadInput, match="expected the package pyarrow"):
        database.all_to_all_points("one")


def test_without_the_package_the_way_to_install_it_is_named(monkeypatch):
    monkeypatch.setattr(database, "find_spec", lambda name: None)
    with pytest.raises(BadInput, match=r"expected the package aiconfigurator-core \(pip install 'aurora-moe\[silicon\]'\)"):
        database.systems()
