"""aurora profile, import and drift from the command line."""

import json

import numpy as np
import pytest

from aurora.io import load_profile
from aurora.profiler import profile_model as profiling
from aurora.profiler.profile_model import route_round
from tests.cli.refusal import refused
from tests.profiler.test_import_routing import CONFIG, LOADS
from tests.profiler.test_routing_counts import interrupted_after, quick  # noqa: F401


@pytest.fixture
def shape(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path / "config.json"


def test_interrupted_from_the_command_line(aurora, mixtral, text, tmp_path, monkeypatch):
    sizes = ["--sources", "2", "--prompt-tokens", "20", "--batch", "2", "--limit", "12"]
    command = ["profile", mixtral, "--text", text, *sizes, "-o", tmp_path / "p.npz"]
    monkeypatch.setattr(profiling, "route_round", interrupted_after(0))
    with pytest.raises(KeyboardInterrupt):
        aurora(*command)
    assert not (tmp_path / "p.npz").exists()
    monkeypatch.setattr(profiling, "route_round", interrupted_after(2))
    code, out, _ = aurora(*command)
    assert code == 0
    assert "interrupted: after 8 prompts" in out
    assert load_profile(tmp_path / "p.npz").windows == 2
    monkeypatch.setattr(profiling, "route_round", route_round)
    code, out, _ = aurora(*command, "--precision", 0.2)
    assert code == 0
    assert "by drawing tokens again)" in " ".join(out.split())
    assert "after 240 tokens" in out
    assert load_profile(tmp_path / "p.npz").windows == 3
    assert "interrupted" not in load_profile(tmp_path / "p.npz").provenance


def test_recorded_routing_is_planned_for_and_drifts(aurora, shape, tmp_path):
    for name, loads in (("a", LOADS), ("b", LOADS[:, ::-1])):
        np.save(tmp_path / f"{name}.npy", 100 * loads)
        given = ("--format", "eplb-load", "--shape", shape, "--sources", 2)
        code, out, _ = aurora("import", tmp_path / f"{name}.npy", *given, "-o", tmp_path / f"{name}.npz")
        assert code == 0
        assert "wrote" in out
    (tmp_path / "c.toml").write_text(
        'schema = 1\n[[gpu]]\nname = "g"\nkind = "x"\nnode = 0\nout_Bps = 1e9\nin_Bps = 1e9\nmemory_bytes = 1000000\ncount = 2\n'
    )
    plan = tmp_path / "plan.json"
    assert aurora("plan", "--cluster", tmp_path / "c.toml", "--profile", tmp_path / "a.npz", "-o", plan)[0] == 0
    code, out, _ = aurora("evaluate", plan, "--before", tmp_path / "a.npz", "--profile", tmp_path / "b.npz", "--json")
    assert code == 0
    found = json.loads(out)
    assert found["moved"]
    assert found["replan"] == (found["slowdown"] > found["threshold"])
    assert len(found["layers"]) == 2
    code, out, _ = aurora("evaluate", "--before", tmp_path / "a.npz", "--profile", tmp_path / "a.npz")
    assert "of a plan balanced for the earlier traffic: keep the plan" in " ".join(out.split())
    assert (code, "keep the plan: shares differ by 0.00%" in out) == (0, True)


def test_what_is_refused(aurora, shape, tmp_path):
    np.save(tmp_path / "a.npy", LOADS)
    load = ["import", tmp_path / "a.npy", "--format", "eplb-load"]
    refused(aurora(*load), "expected --shape CONFIG.json, the model's sizes, which the file does not hold")
    refused(aurora(*load, "--shape", shape, "--gpus", 2), "--gpus: expected for a placement only")
    refused(
        aurora("import", tmp_path / "a.npy", "--format", "sglang", "--sources", 2),
        "--sources: expected for recorded routing only",
    )
    refused(aurora("import", shape, shape, "--format", "sglang", "--gpus", 2), "expected one file, found 2")
    refused(aurora("synthetic", "uniform", shape, "--window-tokens", 0), "--window-tokens: expected more than zero, found 0")
    refused(
        aurora("evaluate", "--before", tmp_path / "a.npy", "--profile", tmp_path / "a.npy"),
        "expected an aurora profile, found another file",
    )
