"""aurora simulate: its options and what it refuses."""

import json

import pytest

from aurora.algorithms.workload.synthetic import draw_profile
from aurora.io import load_cluster, load_plan, save, shipped
from aurora.planner.plan import make_plan
from tests.cli.refusal import refused

CONFIG = {"num_local_experts": 4, "num_hidden_layers": 2, "num_experts_per_tok": 1, "hidden_size": 64, "intermediate_size": 64}
CLUSTER = shipped("clusters/demo-4.toml")


@pytest.fixture
def shape(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path / "config.json"


@pytest.fixture
def plan(aurora, shape, tmp_path):
    profile = tmp_path / "a.npz"
    assert aurora("synthetic", "zipf:1", shape, "--windows", 3, "--window-tokens", 50, "-o", profile)[0] == 0
    assert aurora("plan", "--cluster", CLUSTER, "--profile", profile, "-o", tmp_path / "p.json")[0] == 0
    return tmp_path / "p.json"


def test_barriers_and_orders(aurora, plan):
    for barriers in ("none", "gpu", "global"):
        assert aurora("simulate", plan, "--barriers", barriers)[0] == 0
    code, out, _ = aurora("simulate", plan, "--orders", "batch")
    assert code == 0
    assert "wrote" in out
    assert aurora("simulate", plan, "--orders", "allgather")[0] == 0
    refused(aurora("simulate", plan, "--barriers", "all"), "expected one of gpu, global, none, found 'all'")
    refused(aurora("simulate", plan, "--orders", "new"), "--orders: expected one of plan, batch, allgather, found 'new'")
    assert aurora("simulate", plan, "--interleave", "off")[0] == 0
    refused(aurora("simulate", plan, "--interleave", "processes"), "--interleave: expected one of on, off, found .processes.")


def test_each_of_several_models_has_its_steps(aurora, plan):
    """Together they take the whole time, one after the other each has its own part of it, from when its first rank begins."""
    both = plan.parent / "both.json"
    profiles = "--profile", plan.parent / "a.npz"
    assert aurora("plan", "--cluster", CLUSTER, *profiles, *profiles, "-o", both)[0] == 0
    assert "TPOT" in aurora("simulate", both)[1]
    assert "TPOT" not in aurora("simulate", plan)[1]
    found = {how: json.loads(aurora("simulate", both, "--interleave", how, "--json")[1]) for how in ("on", "off")}
    for way in found.values():
        assert [each["steps"] for each in way["models"]] == [3, 3]
        assert len({each["model"] for each in way["models"]}) == 2
        assert all(0 < each["step_s"]["p50"] <= each["tpot_s"]["p99"] <= each["seconds"] for each in way["models"])
    assert max(each["seconds"] for each in found["on"]["models"]) <= found["on"]["seconds"]
    assert sum(each["seconds"] for each in found["off"]["models"]) == pytest.approx(found["off"]["seconds"], rel=0.05)


def test_micro_batches_are_named(aurora, plan):
    folder, model = plan.parent, load_plan(plan).models[0].model
    cut = folder / "cut.json"
    code, out, _ = aurora(
        "plan", "--cluster", CLUSTER, "--profile", folder / "a.npz", "--micro-batches", "3", "-o", cut, "--json"
    )
    assert code == 0
    assert json.loads(out)["strategies"]["micro_batches"] == "3"
    found = json.loads(aurora("simulate", cut, "--json")[1])
    assert found["micro_batches"] == 3
    assert {layer["model"] for layer in found["layers"]} == {f"{model}/{part}" for part in range(3)}
    assert aurora("report", cut, folder / "cut.predicted.npz", "--format", "perfetto", "-o", folder / "r.json")[0] == 0
    assert f'"name":"{model}/2"' in (folder / "r.json").read_text()
    one = "--profile", folder / "a.npz"
    refused(aurora("plan", "--cluster", CLUSTER, *one, "--micro-batches", "5"), "--micro-batches: expected at most 4, found 5")
    profiles = "--profile", folder / "a.npz", "--profile", folder / "a.npz"
    refused(aurora("plan", "--cluster", CLUSTER, *profiles, "--micro-batches", "2", "-o", cut),
            "--micro-batches: cut the batches of a single model, expected 1, found 2 models")  # fmt: skip


def test_a_cluster_says_what_incast_costs(aurora, tmp_path):
    text = CLUSTER.read_text().replace("schema = 1", "schema = 1\nincast = {}")
    for value, said in (
        ("1.5", "incast must lie between 0 and 1, found 1.5"),
        ('"much"', "incast: expected a number, found 'much'"),
    ):
        (tmp_path / "c.toml").write_text(text.format(value))
        refused(aurora("plan", "--cluster", tmp_path / "c.toml", "--profile", "x.npz", "-o", tmp_path / "p.json"), said)
    (tmp_path / "c.toml").write_text(text.format("0.25"))
    machines = load_cluster(tmp_path / "c.toml")
    assert machines.incast == 0.25
    profile = draw_profile("zipf:1", CONFIG)
    save(make_plan(machines, [profile]), tmp_path / "p.json")
    assert load_plan(tmp_path / "p.json").cluster == machines


@pytest.mark.full
def test_requests_are_served_beside_the_engines_default(aurora, plan, tmp_path):
    drawn = ("simulate", plan, "--rate", 2, "--isl", 20, "--osl", 4, "--duration", 10)
    code, out, err = aurora(*drawn)
    assert (code, err) == (0, "")
    for text in ("TTFT p99", "default", "interpolated between", "whatever a request's context"):
        assert text in " ".join(out.split())
    code, out, _ = aurora(*drawn, "--json")
    found = json.loads(out)
    assert set(found) == {
        "schema", "requests", "source", "input_tokens", "output_tokens", "arrivals_s", "plan", "default", "even", "assumptions"
    }  # fmt: skip
    assert found["output_tokens"] == 4 * found["requests"]
    for each in (found["plan"], found["default"]):
        assert 0 < each["ttft_s"]["p50"] <= each["ttft_s"]["p90"] <= each["ttft_s"]["p99"]
        assert each["tokens_per_s"] == pytest.approx(found["output_tokens"] / each["seconds"])
        assert not each["queue_grows"]
    assert aurora(*drawn, "--json")[1] == out
    assert not list(plan.parent.glob(f"{plan.stem}.*.npz"))
    refused(aurora(*drawn, "-o", tmp_path / "times.npz"), "--output: expected without --requests and --rate")


@pytest.mark.full
def test_a_trace_of_requests_is_served_and_overload_is_said(aurora, plan, tmp_path):
    trace = tmp_path / "r.csv"
    trace.write_text("arrival_s,input_tokens,output_tokens\n" + "".join(f"{i / 100},400,2\n" for i in range(400)))
    many = ("--max-num-batched-tokens", 400, "--max-num-seqs", 4)
    code, out, _ = aurora("simulate", plan, "--requests", trace, *many)
    assert code == 0
    assert "plan: overloaded. The queue grows, from" in " ".join(out.split())
    code, out, _ = aurora("simulate", plan, "--requests", trace, "--duration", 0.5, "--json")
    assert json.loads(out)["requests"] == 50
    refused(aurora("simulate", plan, "--requests", trace, "--rate", 2), "--rate: expected without --requests")
    refused(aurora("simulate", plan, "--requests", tmp_path / "none.csv"), "none.csv: no such file")
    refused(aurora("simulate", plan, "--isl", 2), "expected --rate and --osl too, to draw requests, or --requests")
    refused(aurora("simulate", plan, "--rate", 2), "expected --isl and --osl too, to draw requests, or --requests")
    refused(aurora("simulate", plan, "--rate", 2, "--interleave", "off"), "--interleave: expected without --requests")
    refused(aurora("simulate", plan, "--rate", 0, "--isl", 2, "--osl", 2), "--rate: expected more than zero, found 0")
    ways = ("simulate", plan, "--requests", trace, "--duration", 0.5, "--dispatch")
    named = [json.loads(aurora(*ways, way, "--json")[1]) for way in ("requests", "cadence")]
    assert named[0]["default"] == named[1]["default"] != named[1]["plan"]
    assert named[0]["even"]["busiest"] == 1 < named[0]["plan"]["busiest"]
    refused(aurora(*ways, "aligned:-1"), "--dispatch: expected aligned:N with a whole number N from 0 on, found 'aligned:-1'")
    refused(aurora(*ways, "requests", "--ttft", 1), "--ttft: expected with --dispatch cadence, found requests")
    few = ("--rate", 2, "--isl", 2, "--osl", 2, "--max-num-seqs", 9, "--max-num-batched-tokens", 8)
    refused(aurora("simulate", plan, *few), "--max-num-seqs: expected at most the 8 of --max-num-batched-tokens")
