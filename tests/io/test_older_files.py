"""Files that version 0.1.0 wrote, in tests/older_files: each is read, or refused by one sentence.

They were made by that version's commands: `aurora synthetic`, `plan`, `simulate`, `run --survive` (killed while it served) and
`train --checkpoint-every 1`.
"""

import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

import aurora
from aurora.errors import BadInput
from aurora.io.journals import load_journal
from aurora.simulator.interpreter import simulate_plan

OLDER = Path(__file__).parents[1] / "older_files"


@pytest.mark.parametrize("name", ["plan", "replicas", "weighted", "served"])
def test_plans_are_read_and_simulated(name):
    plan = aurora.load(OLDER / f"{name}.json", aurora.Plan)
    profile = aurora.load(OLDER / ("tiny.npz" if name == "served" else "traffic.npz"), aurora.Profile)
    written = json.loads((OLDER / f"{name}.json").read_text())
    assert (plan.objective_s, plan.bound_s) == (written["objective_s"], written["bound_s"])
    assert [list(held) for held in plan.models[0].placement.slots_LG[0]] == written["models"][0]["layers"][0]["slots"]
    assert simulate_plan(plan, [profile] * len(plan.models)).seconds > 0


def test_priorities_are_kept_with_their_weights():
    plan = aurora.load(OLDER / "weighted.json", aurora.Plan)
    assert plan.options.priorities == ("interactive", "batch")


def test_plans_are_no_worse_today():
    profile = aurora.load(OLDER / "traffic.npz", aurora.Profile)
    for name, options in (("plan", aurora.PlanOptions()), ("replicas", aurora.PlanOptions(slots_per_gpu=3))):
        older = aurora.load(OLDER / f"{name}.json", aurora.Plan)
        today = aurora.plan(older.cluster, profile, options)
        assert older.bound_s <= today.objective_s * (1 + 1e-9)
        assert today.objective_s <= older.objective_s * 1.003


def test_a_plan_whose_order_is_gone_is_refused_by_one_sentence(tmp_path):
    written = json.loads((OLDER / "plan.json").read_text())
    written["models"][0]["layers"][0]["dispatch"]["sub-channels"] = {"rows": [1] * 12, "out": [1] * 4, "in": [1] * 4}
    (tmp_path / "plan.json").write_text(json.dumps(written))
    with pytest.raises(
        BadInput, match=r"plan.json: expected an order without sub-channels, .* plan again, with the order paced"
    ):
        aurora.load(tmp_path / "plan.json", aurora.Plan)


def test_profiles_and_traces_are_read():
    profile = aurora.load(OLDER / "traffic.npz", aurora.Profile)
    assert profile.tokens_TLSE.shape == (1, 1, 4, 8)
    assert int(profile.tokens_TLSE.sum()) == 8192
    trace = aurora.load(OLDER / "served.measured.npz", aurora.Trace)
    assert trace.seconds > 0


def test_a_profile_with_counts_of_pairs_of_experts_is_read_without_them(tmp_path):
    with np.load(OLDER / "traffic.npz") as file:
        arrays = dict(file)
    experts = arrays["tokens_TLSE"].shape[3]
    pairs_LEE = np.zeros((arrays["tokens_TLSE"].shape[1], experts, experts), dtype=np.int64)
    np.savez(tmp_path / "profile.npz", **arrays, together_LEE=pairs_LEE, next_LEE=pairs_LEE[1:])
    assert aurora.load(tmp_path / "profile.npz", aurora.Profile) == aurora.load(OLDER / "traffic.npz", aurora.Profile)


def test_journals_are_read():
    answers = load_journal(OLDER / "run.journal.jsonl")
    assert len(answers) == 32
    assert answers[0, 3].tokens == [241, 40, 46, 50, 72, 59, 149, 142, 179, 52]


@pytest.fixture
def folder(tmp_path):
    return Path(shutil.copytree(OLDER, tmp_path / "older"))


@pytest.fixture
def command(warm, folder):
    """Performs an `aurora` command there, and returns what it prints."""

    def performed(*words):
        done = subprocess.run([warm / "aurora", *words], cwd=folder, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return performed


@pytest.mark.full
def test_an_interrupted_run_goes_on_from_its_journal(command):
    model = ["--model", "tiny-model", "--prompts", "prompts.txt", "--max-new-tokens", "40"]
    printed = command("run", "served.json", *model, "--survive", "--resume", "--verify", "-o", "run.npz")
    assert "verified: same greedy tokens" in printed


@pytest.mark.full
def test_training_goes_on_from_a_checkpoint(command, folder):
    trained = folder / "trained"
    trained.mkdir()
    (folder / "checkpoints").rename(trained / "checkpoints")
    (folder / "log.jsonl").rename(trained / "log.jsonl")
    options = ["--text", "ids.npy", "--batch", "2", "--length", "16", "--ranks", "2", "--checkpoint-every", "1"]
    command("train", "tiny-model", *options, "--steps", "3", "--resume", "-o", "trained")
    steps = [json.loads(line) for line in (trained / "log.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [0, 1, 2]
    assert np.isfinite(steps[-1]["loss"])
    assert steps[-1]["loss"] < steps[0]["loss"] + 0.1
