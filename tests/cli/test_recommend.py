"""`aurora recommend` writes what it prints, or nothing."""

import json

from aurora.io import load_plan, load_profile
from tests.cli.refusal import refused


def test_a_plan_its_profile_and_the_engines_file_are_written(aurora, tmp_path):
    out = tmp_path / "out"
    code, printed, _ = aurora(
        "recommend", "--gpus", "l40s:4", "--model", "mixtral-topics", "--engine", "sglang", "-o", out, "--json"
    )
    assert code == 0
    found = json.loads(printed)
    assert sorted(file.name for file in out.iterdir()) == ["cluster.toml", "placement.json", "plan.json", "profile.npz"]
    plan = load_plan(out / "plan.json")
    assert plan.models[0].profile_digest == load_profile(out / "profile.npz").digest
    assert f"--init-expert-location {out / 'placement.json'}" in found["launch"]
    assert found["gpus"] == ["NVIDIA L40S"] * 4
    assert not found["measured"]
    best = next(candidate for candidate in found["candidates"] if candidate["name"] == found["best"])
    assert best["gain"] == found["default_s"] / best["seconds"]
    assert aurora("simulate", out / "plan.json")[0] == 0


def test_what_is_missing_or_in_the_way_is_said_before_any_work(aurora, tmp_path):
    base = ("recommend", "--engine", "sglang", "-o", tmp_path / "out")
    refused(aurora(*base, "--model", "mixtral-topics"), "expected either --gpus or --cluster")
    refused(aurora(*base, "--gpus", "h20:4"), "--model: expected a config.json or folder, or --profile, found neither")
    refused(aurora(*base, "--gpus", "h20:x", "--model", "mixtral-topics"), "--gpus: expected KIND:NUMBER")
    refused(
        aurora(*base[:2], "tgi", *base[3:], "--gpus", "h20:4", "--model", "mixtral-topics"), "--engine: expected one of vllm"
    )
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "out").write_text("mine")
    refused(aurora(*base, "--gpus", "h20:4", "--model", "mixtral-topics"), "cannot be made a folder")
    (tmp_path / "profile.npz").write_text("mine")
    line = ("recommend", "--engine", "sglang", "--gpus", "h20:4", "--profile", tmp_path / "profile.npz", "-o", tmp_path)
    refused(aurora(*line), "profile.npz: cannot be written: it would replace")
    assert (tmp_path / "profile.npz").read_text() == "mine"
