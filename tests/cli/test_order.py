"""aurora order: matrices in, schedules out, and what it refuses."""

import json
import re

import numpy as np
import pytest

from aurora.algorithms.alltoall.registry import ORDER
from aurora.algorithms.workload.synthetic import draw_profile
from aurora.algorithms.workload.traffic import layer_traffic
from aurora.io import save, shipped
from aurora.types import SyntheticOptions
from tests.cli.refusal import refused
from tests.cli.test_plan import CONFIG

MATRIX = np.array([[7, 4, 6], [5, 0, 2], [3, 7, 0]])


@pytest.fixture
def csv(tmp_path):
    np.savetxt(tmp_path / "m.csv", MATRIX, fmt="%d", delimiter=",")
    return tmp_path / "m.csv"


def schedule(aurora, *args):
    code, out, err = aurora("order", *args, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


@pytest.mark.parametrize("method", ORDER)
def test_json_is_a_schedule_that_replays(aurora, csv, method):
    """From the printed rows alone: bytes, ports, starts in order, makespan and gap."""
    found = schedule(aurora, csv, "--method", method)
    assert list(found) == [
        "schema", "method", "n", "makespan_s", "fluid_bound_s", "one_to_one_bound_s", "gap", "transfers",
    ]  # fmt: skip
    assert (found["schema"], found["method"], found["n"]) == (1, method, 3)
    rows = found["transfers"]
    carried = np.zeros((3, 3), dtype=int)
    for row in rows:
        carried[row["src"], row["dst"]] += row["bytes"]
        assert row["bytes"] == pytest.approx(row["rate_Bps"] * (row["end_s"] - row["start_s"]), abs=1.01)
    assert np.array_equal(carried, MATRIX - np.diag(np.diag(MATRIX)))
    assert [row["start_s"] for row in rows] == sorted(row["start_s"] for row in rows)
    assert found["makespan_s"] == max(row["end_s"] for row in rows)
    assert found["fluid_bound_s"] == pytest.approx(11 / 12.5e9)
    assert found["gap"] == pytest.approx(found["makespan_s"] / found["fluid_bound_s"] - 1)
    for instant in {row["start_s"] for row in rows}:
        for end in ("src", "dst"):
            for rank in range(3):
                flowing = [r["rate_Bps"] for r in rows if r[end] == rank and r["start_s"] <= instant < r["end_s"] * (1 - 1e-12)]
                assert sum(flowing) <= 12.5e9 * (1 + 1e-9)


def test_csv_npy_and_profile_agree(aurora, tmp_path):
    profile = draw_profile("zipf:1", {**CONFIG, "num_local_experts": 6}, SyntheticOptions(sources=3, window_tokens=50))
    save(profile, tmp_path / "p.npz")
    matrix = layer_traffic(profile, 1, np.eye(3)[[0, 0, 1, 1, 2, 2]]) * profile.dispatch_bytes
    np.save(tmp_path / "m.npy", matrix)
    np.savetxt(tmp_path / "m.csv", matrix, fmt="%d", delimiter=",")
    by_profile = schedule(aurora, tmp_path / "p.npz", "--layer", 1)
    assert by_profile == schedule(aurora, tmp_path / "m.npy") == schedule(aurora, tmp_path / "m.csv")


def test_over_leaves_the_binding_nic_is_named(aurora, tmp_path):
    """A node of four sends 4 x 12 x 1 MB over its two uplinks of 12.5 GB/s: longer than its ports need."""
    np.save(tmp_path / "m.npy", np.ones((16, 16), dtype=int) * 10**6)
    where = ("--cluster", shipped("clusters/leaf-spine-16.toml"))
    found = schedule(aurora, tmp_path / "m.npy", "--method", "all-at-once", *where)
    assert found["fluid_bound_s"] == pytest.approx(15e6 / 12.5e9)
    assert found["cut_bound_s"] == pytest.approx(48e6 / 25e9)
    assert found["cut_links"] == ["sending NIC of ranks 0, 1, 2, 3"]
    assert found["gap"] == pytest.approx(found["makespan_s"] / found["cut_bound_s"] - 1)
    code, out, _ = aurora("order", tmp_path / "m.npy", "--method", "all-at-once", *where)
    assert code == 0
    assert "cut bound" in out
    assert "bound by " in out
    assert "48000000 bytes must cross, 1.92 ms at least" in out


def test_all_methods_in_one_table(aurora, csv):
    code, out, _ = aurora("order", csv, "--method", "all")
    assert code == 0
    for method in ORDER:
        assert re.search(rf"│ ?{method} *│", out)


def test_the_json_goes_to_a_file(aurora, csv, tmp_path):
    code, out, _ = aurora("order", csv, "-o", tmp_path / "s.json")
    assert code == 0
    assert json.loads((tmp_path / "s.json").read_text()) == schedule(aurora, csv)
    assert "makespan" in out


@pytest.mark.parametrize(
    ("content", "args", "message"),
    [
        ("", [], "expected rows of numbers, found none"),
        ("1,2", [], "expected a square matrix, found shape"),
        ("0,1.5\n2,0", [], "expected rows of whole numbers: could not convert string '1.5'"),
        ("0,99999999999999999999\n2,0", [], "could not convert string '99999999999999999999' to int64"),
        (f"0,{2**62}\n{2**62},0", [], "more than 64 bits hold"),
        ("0,1\n1,0", ["--method", "best"], "--method: expected one of openshop"),
        ("0,1\n1,0", ["--layer", "0"], "--layer is for a profile"),
        ("0,1\n1,0", ["--cluster", shipped("clusters/demo-4.toml")], "has 4 GPUs, the traffic matrix 2 rows"),
    ],
)
def test_bad_traffic(aurora, tmp_path, content, args, message):
    (tmp_path / "m.csv").write_text(content)
    refused(aurora("order", tmp_path / "m.csv", *args), message)


def test_other_files(aurora, tmp_path):
    (tmp_path / "m.txt").write_text("1")
    refused(aurora("order", tmp_path / "m.txt"), r"expected \.csv, \.npy, or a profile")
    np.save(tmp_path / "m.npy", np.array([[0.5]]))
    refused(aurora("order", tmp_path / "m.npy"), "expected integers, found float64")
