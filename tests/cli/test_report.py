"""aurora report: what it writes and what it refuses."""

import json

import pytest

from aurora.algorithms.workload.synthetic import draw_profile
from aurora.io import load_cluster, save, shipped
from aurora.planner.plan import make_plan
from aurora.simulator.interpreter import simulate_plan
from aurora.types import SyntheticOptions
from tests.cli.refusal import refused

CONFIG = {"num_local_experts": 4, "num_hidden_layers": 2, "num_experts_per_tok": 1, "hidden_size": 64, "intermediate_size": 64}


@pytest.fixture
def folder(tmp_path):
    """A plan that names its profile, and its predicted trace."""
    profile = draw_profile("zipf:1", CONFIG, SyntheticOptions(window_tokens=50, seed=0))
    save(profile, tmp_path / "a.npz")
    plan = make_plan(load_cluster(shipped("clusters/demo-4.toml")), [profile], profile_paths=["a.npz"])
    save(plan, tmp_path / "p.json")
    save(simulate_plan(plan, [profile]), tmp_path / "t.npz")
    return tmp_path


def test_a_page_finds_the_plans_own_profile(aurora, folder):
    written = []
    for name in ("one.html", "two.html"):
        code, out, err = aurora("report", folder / "p.json", folder / "t.npz", "-o", folder / name)
        assert (code, err) == (0, "")
        assert "wrote" in out
        written.append((folder / name).read_bytes())
    assert written[0] == written[1]
    assert b'data-chart="traffic-map"' in written[0]
    (folder / "a.npz").unlink()
    code, _, err = aurora("report", folder / "p.json", "-o", folder / "none.html")
    told = f"p.json: expected its profile {folder}/a.npz, found no such file; plan again, or give simulate or report one --profile per model"
    assert (code, told in err) == (0, True)
    page = (folder / "none.html").read_text(encoding="utf-8")
    assert (f"{told}.<" in page, f"{told}..<" in page) == (True, False)
    refused(aurora("simulate", folder / "p.json"), told)


def test_other_forms(aurora, folder):
    assert aurora("report", folder / "p.json", folder / "t.npz", "--format", "perfetto", "-o", folder / "t.json")[0] == 0
    assert json.loads((folder / "t.json").read_text())["traceEvents"]
    assert aurora("report", folder / "p.json", folder / "t.npz", "--format", "perfetto", "-o", folder / "t.json.gz")[0] == 0
    assert (folder / "t.json.gz").read_bytes()[:2] == b"\x1f\x8b"


def test_refusals(aurora, folder):
    plan = folder / "p.json"
    refused(aurora("report", plan, "--format", "gif"), "--format: expected one of html, perfetto, found 'gif'")
    twice = ("--profile", folder / "a.npz") * 2
    refused(aurora("report", plan, *twice, "-o", folder / "r.html"), "--profile: expected 1, found 2")
    refused(aurora("report", plan, folder / "no.npz", "-o", folder / "r.html"), "no.npz: no such file")
    refused(aurora("report", plan, folder / "a.npz", "-o", folder / "r.html"), "expected an aurora trace")
    refused(aurora("report", plan, "--format", "perfetto", "-o", folder / "t.json"), "expected a trace, found none")
    refused(aurora("report", plan, "-o", plan), "it would replace")
    other = draw_profile("zipf:1", CONFIG | {"num_hidden_layers": 3}, SyntheticOptions(window_tokens=50))
    foreign = make_plan(load_cluster(shipped("clusters/demo-4.toml")), [other])
    save(simulate_plan(foreign, [other]), folder / "foreign.npz")
    refused(
        aurora("report", plan, folder / "foreign.npz", "-o", folder / "r.html"),
        r"foreign.npz: a trace of another plan: expected 2 MoE layers of 'synthetic', found layer 2",
    )
    assert not (folder / "r.html").exists()
