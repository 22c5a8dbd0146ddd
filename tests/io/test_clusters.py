"""Clusters as files: what is written comes back."""

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aurora.errors import BadInput
from aurora.io import load_cluster, save, save_cluster
from aurora.types import Cluster, Gpu, TransferCurve, servers
from tests.conftest import cluster
from tests.strategies import clusters, fabrics

words = st.text(st.characters(exclude_categories=("Cs",)).filter(str.isprintable), max_size=12)
remarks = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)


@given(clusters(), words, words, st.sampled_from([0.0, 0.25]), st.lists(remarks, max_size=3))
def test_any_cluster_comes_back(tmp_path_factory, machines, name, rack, incast, remarks):
    file = tmp_path_factory.mktemp("clusters") / "written.toml"
    gpus = tuple(replace(gpu, name=name + str(i), rack=rack, failure_rate=0.1) for i, gpu in enumerate(machines.gpus))
    written = Cluster(name, gpus, None, incast)
    save_cluster(written, file, remarks)
    assert load_cluster(file) == written


@pytest.mark.parametrize("kind", ["leaf-spine", "graph"])
def test_fabrics_come_back(tmp_path, kind):
    @given(fabrics(4, kind))
    def comes_back(fabric):
        written = replace(cluster(1.0, 2.0, 3.0, 4.0), fabric=fabric)
        save(written, tmp_path / "written.toml")
        assert load_cluster(tmp_path / "written.toml") == written

    comes_back()


def test_link_curves_come_back(tmp_path):
    curves = TransferCurve(3, [1e3, 5e6], [1.5e-5, 1e-3]), TransferCurve(1, [7.0], [1e-6])
    written = replace(cluster(1.0, 2.0), link_curves=curves)
    save(written, tmp_path / "written.toml")
    assert load_cluster(tmp_path / "written.toml") == written
    assert [curve.partners for curve in written.link_curves] == [1, 3]


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("link_curve = 3", "expected [[link_curve]] tables, found 3"),
        ("[[link_curve]]\npartners = 1\nbytes = [1]", "[[link_curve]] 0: lacks seconds"),
        ("[[link_curve]]\npartners = 1\nbytes = 1\nseconds = [1]", "[[link_curve]] 0: bytes must be a list of numbers"),
        ("[[link_curve]]\npartners = 1.5\nbytes = [1]\nseconds = [1]", "partners must be a whole number from 1 to 4096"),
        ("[[link_curve]]\npartners = 1\nbytes = [1]\nseconds = [nan]", "expected finite numbers, found nan"),
        ("[[link_curve]]\npartners = 1\nbytes = [1]\nseconds = [1]\nrate = 3", "rate"),
    ],
)
def test_wrong_link_curves_are_refused_by_name(tmp_path, table, said):
    file = tmp_path / "written.toml"
    save(cluster(1.0, 2.0), file)
    text = file.read_text()
    file.write_text(text.replace("[[gpu]]", f"{table}\n[[gpu]]", 1) if table.startswith("link") else f"{text}\n{table}\n")
    with pytest.raises(BadInput, match=re.escape(said)) as error:
        load_cluster(file)
    assert str(file) in str(error.value)


def test_servers_and_numpy_numbers_come_back(tmp_path):
    gpus = tuple(Gpu(f"g{i}", "k", i // 2, np.float64(1e9), np.float64(2e9), np.int64(10**9)) for i in range(4))
    written = Cluster("two", gpus, servers([0, 0, 1, 1], [1e9] * 4, [2e9] * 4, 5e8))
    save(written, tmp_path / "written.toml")
    assert load_cluster(tmp_path / "written.toml") == written
    assert 'kind = "servers"' in (tmp_path / "written.toml").read_text()


def test_servers_that_are_no_nodes_come_back(tmp_path):
    file, racks = tmp_path / "written.toml", cluster(1.0, 2.0, 3.0, 4.0)
    ports_Bps = [gpu.out_Bps for gpu in racks.gpus], [gpu.in_Bps for gpu in racks.gpus]
    for node_G in ([0, 1, 0, 1], [5, 7, 5, 7], [1, 1, 0, 0], [7, 7, 9, 9]):
        for nodes in ((0, 0, 1, 1), (3, 3, 8, 8)):
            gpus = tuple(replace(gpu, node=node) for gpu, node in zip(racks.gpus, nodes, strict=True))
            written = replace(racks, gpus=gpus, fabric=servers(node_G, *ports_Bps, 0.5, shared_nic=True))
            save(written, file)
            assert load_cluster(file) == written
    save(replace(racks, fabric=servers([0, 1, 0, 1], *ports_Bps, 0.5)), file)
    text = file.read_text()
    for wrong in ("3", "[\n    0.5,\n    1,\n    0,\n    1,\n]", "[0, 1]"):
        file.write_text(re.sub(r"server_of_gpu = \[[^]]*\]", f"server_of_gpu = {wrong}", text))
        with pytest.raises(BadInput, match="server_of_gpu must be a whole number for each of 4 GPUs"):
            load_cluster(file)


def test_no_folder_to_write_to(tmp_path):
    with pytest.raises(BadInput, match="cannot be written"):
        save(cluster(1.0), tmp_path / "nowhere" / "written.toml")
