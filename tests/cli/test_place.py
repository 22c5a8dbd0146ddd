"""aurora place: loads in, slots and shares out, and what it refuses."""

import json
from itertools import combinations

import numpy as np
import pytest

from tests.cli.refusal import refused

LOADS = "600,560,120,120,20,10,10,10\n0,0,0,0,0,0,0,0\n"


@pytest.fixture
def csv(tmp_path):
    (tmp_path / "loads.csv").write_text(LOADS)
    return tmp_path / "loads.csv"


@pytest.mark.parametrize("method", ["equal-split", "eplb"])
def test_the_json_holds_what_it_says(aurora, csv, method):
    """From the printed slots and shares alone."""
    code, out, err = aurora("place", csv, "--gpus", 8, "--slots", 2, "--method", method, "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert list(found) == ["schema", "method", "layers", "seconds"]
    assert (found["schema"], found["method"], len(found["layers"])) == (1, method, 2)
    for load, layer in zip(np.array([[600, 560, 120, 120, 20, 10, 10, 10], [0] * 8]), found["layers"], strict=True):
        carried = np.zeros(8)
        for expert, parts in layer["split"].items():
            assert sum(share for _, share in parts) == pytest.approx(1)
            for gpu, share in parts:
                assert int(expert) in layer["slots"][gpu]
                carried[gpu] += share * load[int(expert)]
        assert all(len(held) == len(set(held)) <= 2 for held in layer["slots"])
        assert layer["max_load"] == pytest.approx(carried.max())
        assert layer["mean_load"] == pytest.approx(load.sum() / 8)
        assert layer["mean_load"] <= layer["bound"] * (1 + 1e-9)
        assert layer["bound"] <= layer["max_load"]


def test_npy_of_one_layer_and_nodes_of_one_gpu(aurora, tmp_path):
    np.save(tmp_path / "l.npy", np.array([3.0, 1.0, 2.0]))
    code, out, _ = aurora("place", tmp_path / "l.npy", "--nodes", 2, "--slots", 2, "--json")
    assert code == 0
    layer = json.loads(out)["layers"][0]
    assert sorted(expert for held in layer["slots"] for expert in held) == [0, 1, 2]
    assert layer["max_load"] == 3.0


@pytest.mark.parametrize(
    ("content", "args", "message"),
    [
        (LOADS, ["--gpus", 3, "--slots", 2], "8 experts need 8 slots; 3 GPUs have 6"),
        (LOADS, ["--gpus", 3, "--slots", 0], "--slots: expected from one to 65536"),
        (LOADS, ["--gpus", 0, "--slots", 2], "--gpus: expected from one to 65536"),
        (LOADS, ["--slots", 2], "expected --gpus, or --nodes"),
        (LOADS, ["--gpus", 5, "--nodes", 2, "--slots", 2], "--nodes: expected a divisor of the 5 GPUs, found 2"),
        ("1,nan", ["--gpus", 2, "--slots", 2], "row 1, column 2: expected a finite number, found nan"),
        ("1,a", ["--gpus", 2, "--slots", 2], "expected rows of numbers: could not convert string 'a'"),
        ("1,2\n3", ["--gpus", 2, "--slots", 2], "expected rows of numbers: the number of columns changed from 2 to 1"),
    ],
)
def test_what_it_refuses(aurora, tmp_path, content, args, message):
    (tmp_path / "loads.csv").write_text(content)
    refused(aurora("place", tmp_path / "loads.csv", *args), message)


def test_surviving_prints_what_the_slots_give(aurora, csv):
    """From the printed slots alone."""
    code, out, err = aurora("place", csv, "--nodes", 4, "--slots", 5, "--min-replicas", 2, "--for-failures", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert list(found) == ["schema", "method", "layers"]
    assert (found["schema"], found["method"], len(found["layers"])) == (1, "aurora", 2)
    for layer in found["layers"]:
        assert list(layer) == ["slots", "survival"]
        assert [len(held) for held in layer["slots"]] == [5] * 4
        assert all(sum(expert in held for held in layer["slots"]) >= 2 for expert in range(8))
        for failures in (1, 2, 3):
            kept = [set().union(*left) == set(range(8)) for left in combinations(layer["slots"], 4 - failures)]
            assert layer["survival"][str(failures)] == pytest.approx(sum(kept) / len(kept))


def test_the_fewest_slots_that_survive(aurora, csv):
    code, out, err = aurora("place", csv, "--gpus", 4, "--nodes", 2, "--survive", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["fewest_slots"] == 4
    for layer in found["layers"]:
        assert set().union(*layer["slots"][:2]) == set().union(*layer["slots"][2:]) == set(range(8))
    _, out, _ = aurora("place", csv, "--gpus", 4, "--nodes", 2, "--survive")
    assert "any 1 of 2 nodes may fail with 4 slots per GPU. Fewer are not enough" in " ".join(out.split())
    refused(aurora("place", csv, "--gpus", 4, "--slots", 3, "--survive"), "need 4 slots per GPU, found 3")
    refused(aurora("place", csv, "--gpus", 4, "--survive", "--method", "eplb"), "--method: expected without --survive")
    refused(aurora("place", csv, "--survive"), "expected --gpus, or --nodes")
    refused(aurora("place", csv, "--gpus", 4, "--nodes", 3, "--survive"), "servers of equally many GPUs")
    refused(aurora("place", csv, "--gpus", 4, "--slots", 3, "--failures", 2), "--failures: expected with --survive")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--for-failures"], "place --for-failures: expected --nodes"),
        (["--for-failures", "--nodes", 4, "--gpus", 4], "--gpus: expected without --for-failures"),
        (["--for-failures", "--nodes", 4, "--min-replicas", 3], "8 experts x 3 replicas need 24 slots; 4 nodes have 20"),
        (["--for-failures", "--nodes", 4, "--method", "eplb"], "--method: expected one of aurora, mro"),
        (["--nodes", 4, "--min-replicas", 2], "--min-replicas: expected with --for-failures"),
    ],
)
def test_what_surviving_refuses(aurora, csv, args, message):
    refused(aurora("place", csv, "--slots", 5, *args), message)
