"""`aurora recommend` writes what it prints, or nothing."""

import json
import re

import numpy as np

from aurora.algorithms.workload.model_config import Shape
from aurora.io import load_gpus, load_plan, load_profile, save
from tests.cli.refusal import refused

CONFIG = {
    "model_type": "mixtral", "num_hidden_layers": 2, "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4,
    "vocab_size": 512, "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 4096,
}  # fmt: skip
GIVEN = ("--isl", 512, "--osl", 16, "--concurrency", 8)


def test_a_plan_its_profile_and_the_engines_file_are_written(aurora, tmp_path):
    """Two of eight experts are hot, and the default puts both on the first of four GPUs."""
    share_E = np.array([10, 10, 1, 1, 1, 1, 1, 1]) / 26
    tokens_TLSE = np.random.default_rng(0).multinomial(4096, share_E, size=(10, 2, 4))
    shape, config, seen, out = Shape.of(CONFIG), tmp_path / "config.json", tmp_path / "seen.npz", tmp_path / "out"
    save(shape.profile(tokens_TLSE, {"tool": "recorder"}, kinds=[load_gpus()["NVIDIA L40S"]]), seen)
    config.write_text(json.dumps(CONFIG))
    line = ("recommend", "--gpus", "l40s:4", "--model", config, "--engine", "sglang", *GIVEN, "--profile", seen, "-o", out)
    code, printed, err = aurora(*line, "--json")
    assert code == 0, err
    found = json.loads(printed)
    assert found["gpus"] == ["NVIDIA L40S"] * 4
    assert not found["drawn"]
    served, advised = found["served"], found["recommendation"]
    others = {other["name"]: other for other in served["others"]}
    assert others[advised["name"]]["way"] == advised["way"]
    assert others["planned placement"]["gain"] > 1.02
    assert (out / "profile.npz").exists()
    assert (out / "cluster.toml").exists()
    if advised["way"]["placement"] == "plan":
        plan = load_plan(out / "plan.json")
        assert plan.models[0].profile_digest == load_profile(out / "profile.npz").digest
        assert f"--init-expert-location {out / 'placement.json'}" in found["launch"]
        assert aurora("simulate", out / "plan.json")[0] == 0
    code, printed, err = aurora(*line)
    assert code == 0, err
    assert "Serve with " + advised["name"] in " ".join(printed.split())


def test_drawn_traffic_advises_no_placement(aurora, tmp_path):
    line = ("recommend", "--gpus", "l40s:4", "--model", "mixtral-topics", "--engine", "vllm", *GIVEN, "-o", tmp_path / "out")
    code, printed, err = aurora(*line)
    assert code == 0, err
    told = " ".join(printed.split())
    assert "No recommendation of a placement: this traffic is drawn" in told
    assert "aurora record" in told
    assert "OLMoE; Mixtral, web and code; " in told
    assert re.search(r"in perfect balance: with such imbalance perfect balance would bring [0-9.]+x to [0-9.]+x here", told)
    assert "SGLang" not in told
    assert not [word for word in ("Serve by", "Share these", "Cut each") if word in told]
    found = json.loads(aurora(*line, "--json")[1])
    assert (found["drawn"], found["sharing"]) == (True, None)
    assert found["recommendation"]["way"]["placement"] == "linear"
    assert f"Serve with {found['recommendation']['name']}: " in told
    assert "Layouts and exchanges need no recorded experts." in told
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["cluster.toml"]


def test_requests_are_advised_before_experts_if_they_are_recorded(aurora, tmp_path):
    """Prompts of 8000 and 500 tokens in turn: SGLang's turns put the long ones on every second rank."""
    trace = tmp_path / "r.csv"
    trace.write_text(
        "arrival_s,input_tokens,output_tokens\n" + "".join(f"{i / 10},{500 if i % 2 else 8000},9\n" for i in range(200))
    )
    line = ("recommend", "--gpus", "l40s:4", "--model", "mixtral-topics", "--engine", "sglang", "-o", tmp_path / "out")
    code, printed, err = aurora(*line, "--requests", trace)
    assert code == 0, err
    told = " ".join(printed.split())
    assert re.search(r"Requests over 4 ranks: 200 requests, which are [0-9.]+% of what even ranks .* can take", told)
    assert re.search(r"Of them, --load-balance-method total_tokens brings 1\.[0-9]+x the tokens per second, TTFT p95", told)
    assert told.index("Requests over 4 ranks") < told.index("No recommendation of a placement: this traffic is drawn")
    found = json.loads(aurora(*line, "--requests", trace, "--json")[1])["requests"]
    assert (found["requests"], found["drawn"], found["worth"]) == (200, False, True)
    assert found["flags"][found["best"]]["tokens_per_s"] > found["default"]["tokens_per_s"]
    assert json.loads(aurora(*line, "--json")[1])["requests"]["drawn"]
    refused(aurora(*line, "--requests", tmp_path / "none.csv"), "none.csv: no such file")


def test_two_models_split_four_gpus(aurora, tmp_path):
    """Slow links and small experts: a half for each model halves what crosses them. Without links to wait for, nothing wins."""
    shape, seen = Shape.of(CONFIG), []
    for number in range(2):
        tokens_TLSE = np.random.default_rng(number).multinomial(256, np.full(8, 1 / 8), size=(4, 2, 4))
        seen.append(tmp_path / f"seen{number}.npz")
        save(shape.profile(tokens_TLSE, {"tool": "recorder"}, kinds=[load_gpus()["NVIDIA L40S"]]), seen[-1])
    given = [word for path in seen for word in ("--profile", path)]
    line = ("recommend", "--gpus", "l40s:4", "--engine", "vllm", *given, "-o", tmp_path / "out")
    code, printed, err = aurora(*line, "--json")
    assert code == 0, err
    found = json.loads(printed)
    assert set(found["gains"]) == {"one after the other", "halves of the GPUs"}
    best = max(found["gains"].values())
    assert (found["recommendation"] is not None) == (best >= 1.05)
    assert found["recommendation"] == "halves of the GPUs"
    first, second = found["launch"].splitlines()
    assert first.startswith("CUDA_VISIBLE_DEVICES=0,1 vllm serve MODEL_A --data-parallel-size 2")
    assert second.startswith("CUDA_VISIBLE_DEVICES=2,3 vllm serve MODEL_B --data-parallel-size 2")
    assert second.endswith("--port 8001")
    assert "Split the GPUs, a half for each model: " in found["advice"]
    assert load_profile(tmp_path / "out" / "1.npz").digest == load_profile(seen[1]).digest
    drawn = tmp_path / "drawn.npz"
    assert aurora("synthetic", "zipf:1", "mixtral-topics", "-o", drawn)[0] == 0
    code, printed, err = aurora("recommend", "--gpus", "l40s:4", "--engine", "vllm", "--profile", drawn, "--profile", drawn)
    assert (code, "No recommendation: traffic is drawn" in " ".join(printed.split())) == (0, True), err
    refused(aurora(*line, "--model", "mixtral-topics"), "a --profile for each --model, found 2 and 1")


def test_what_is_missing_or_in_the_way_is_said_before_any_work(aurora, tmp_path):
    base = ("recommend", "--engine", "sglang", "-o", tmp_path / "out")
    refused(aurora(*base, "--model", "mixtral-topics"), "expected either --gpus or --cluster")
    refused(aurora(*base, "--gpus", "h20:4"), "--model: expected a config.json or folder, or --profile, found neither")
    refused(aurora(*base, "--gpus", "h20:x", "--model", "mixtral-topics"), "--gpus: expected KIND:NUMBER")
    for option, value in (("--nic-bps", 5), ("--per-server", 4)):
        refused(
            aurora(*base, "--cluster", "demo-4", "--model", "mixtral-topics", option, value), f"{option}: expected with --gpus"
        )
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
