"""`aurora plan`: objectives, exact placements, explanations, and what is refused."""

import json

import pytest

from aurora.algorithms.workload.synthetic import draw_profile
from aurora.io import load_plan, load_profile, save, shipped
from aurora.types import SyntheticOptions
from tests.cli.refusal import refused

CONFIG = {"num_local_experts": 8, "num_hidden_layers": 2, "num_experts_per_tok": 2, "hidden_size": 64, "intermediate_size": 64}
MIXED = shipped("clusters/paper-mixed-8.toml")


@pytest.fixture
def pair(tmp_path):
    """The arguments that name two profiles on 8 sources."""
    given = []
    for seed, name in enumerate(("a.npz", "b.npz")):
        save(draw_profile("zipf:1", CONFIG, SyntheticOptions(sources=8, window_tokens=256, seed=seed)), tmp_path / name)
        given += ["--profile", tmp_path / name]
    return given


@pytest.mark.full
def test_three_models_are_planned_simulated_and_reported_but_not_run(aurora, pair, tmp_path):
    out, third = tmp_path / "plan.json", tmp_path / "c.npz"
    save(draw_profile("zipf:1", {**CONFIG, "num_hidden_layers": 3}, SyntheticOptions(sources=8, seed=2)), third)
    three = [*pair, "--profile", third]
    code, printed, err = aurora("plan", "--cluster", MIXED, *three, "--explain", "-o", out)
    assert (code, err) == (0, "")
    for words in ("busiest-resource objective", "all sends", "gate + dispatch c", "colocate local-search"):
        assert words in " ".join(printed.split())
    plan = load_plan(out)
    assert [len(model.dispatch_L) for model in plan.models] == [2, 2, 3]
    assert plan.bound_s <= plan.objective_s
    seconds = {}
    for interleave in ("on", "off"):
        code, printed, _ = aurora("simulate", out, "--interleave", interleave, "--json")
        assert code == 0
        seconds[interleave] = json.loads(printed)["seconds"]
    assert plan.objective_s * (1 - 1e-9) <= seconds["on"] < seconds["off"]
    assert aurora("evaluate", out, *three)[0] == 0
    for form in ("html", "perfetto"):
        assert aurora("report", out, tmp_path / "plan.predicted.npz", "--format", form, "-o", tmp_path / form)[0] == 0
    refused(
        aurora("run", out, "--model", tmp_path, "--prompts", third), f"{out}: has 3 models, expected as many --model, found 1"
    )
    refused(aurora("plan", "--cluster", MIXED, *three, "--engine", "vllm", "-o", out), "vllm: serves one model by a plan")


def test_explanations_name_terms_gpus_and_experts(aurora, pair, tmp_path):
    out = tmp_path / "plan.json"
    code, printed, _ = aurora("plan", "--cluster", MIXED, *pair, "--explain", "-o", out)
    assert code == 0
    assert load_plan(out).options.colocate == "local-search"
    for layer in (0, 1):
        assert f"layer {layer}, causal" in printed
    for word in ("dispatch_ab", "on the longest path", "gpu-40-0", "synthetic"):
        assert word in " ".join(printed.split())
    code, printed, _ = aurora("plan", "--cluster", MIXED, *pair[:2], "--explain", "-o", out)
    for word in ("expert + combine", "most of that bound is"):
        assert word in " ".join(printed.split())
    assert load_plan(out).objective == "exclusive"


def test_traffic_of_other_ranks_is_dealt_to_the_cluster_and_commands_agree_on_it(aurora, tmp_path):
    """A profile of four source ranks serves eight GPUs; its plan recognises it, with and without --profile, and --from too."""
    few, out = tmp_path / "few.npz", tmp_path / "plan.json"
    save(draw_profile("zipf:1", CONFIG, SyntheticOptions(sources=4, window_tokens=256)), few)
    code, _, err = aurora("plan", "--cluster", MIXED, "--profile", few, "-o", out)
    assert (code, err.count("few.npz: traffic of 4 source ranks, dealt to 8 GPUs")) == (0, 1)
    plan = load_plan(out)
    assert plan.models[0].made_from(load_profile(few).at_sources(8))
    for command in (("simulate", out), ("evaluate", out, "--profile", few), ("report", out, "-o", tmp_path / "page")):
        code, printed, err = aurora(*command)
        assert code == 0, err
        assert "dealt to 8 GPUs" in err
    code, printed, _ = aurora("evaluate", out, "--before", few, "--profile", few)
    assert code == 0
    assert "keep the plan" in printed
