"""The commands as a user types them: results, and one sentence with exit code 2 for everything that is wrong."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

import aurora
from aurora.io import load_plan, load_profile, load_trace, save, shipped
from aurora.planner.evaluate import evaluate, repriced
from aurora.runtime.run import run
from aurora.types import Curve
from tests.cli.refusal import refused
from tests.cli.test_subcommands import documented_keys
from tests.conftest import cluster

DEMO = str(shipped("clusters/demo-4.toml"))
pytestmark = pytest.mark.timeout(900)  # processes start slowly on a busy machine


@pytest.fixture(scope="session")
def made(tmp_path_factory, warm):
    """A folder with a profile of each shipped model on 4 sources, made by the command line."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "text.txt").write_text("".join(f"def line_{i}(x): return x + {i}\n" for i in range(400)))
    for name, out in (("mixtral-topics", "a.npz"), ("qwen3moe-stdlib", "b.npz")):
        command = [warm / "aurora", "profile", shipped(f"models/{name}"), "--text", "text.txt", "text.txt",
                   "--sources", "4", "--limit", "16", "--prompt-tokens", "64", "-o", out]  # fmt: skip
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=800)
        assert done.returncode == 0, done.stderr
        assert "max/mean" in done.stdout
        save(replace(load_profile(folder / out), provenance={}), folder / out)  # whatever else the machine did
    return folder


@pytest.fixture(scope="session")
def planned(made, tmp_path_factory):
    """A plan of a.npz that lies beside it."""
    plan = aurora.plan(aurora.load(DEMO), aurora.load(made / "a.npz"), profile_paths=["a.npz"])
    path = tmp_path_factory.mktemp("planned") / "plan.json"
    save(plan, path)
    return path


@pytest.fixture
def folder(made, tmp_path):
    """A private copy."""
    return shutil.copytree(made, tmp_path / "work")


def files(folder):
    return sorted(p.name for p in folder.iterdir())


def test_help_is_quick_because_nothing_heavy_is_imported():
    code = "import aurora.cli.main, sys; print([m for m in ('torch', 'transformers', 'scipy') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


@pytest.mark.full
def test_the_whole_way(aurora, folder):
    a, b, plan = folder / "a.npz", folder / "b.npz", folder / "plan.json"
    code, out, _ = aurora("plan", "--cluster", DEMO, "--profile", a, "--profile", b, "-o", plan)
    assert code == 0
    assert (
        "colocated, equal GPUs: place balanced, assign exact, colocate matching, time slice exchange, order openshop-best"
        in " ".join(out.split())
    )
    code, out, _ = aurora("simulate", plan)
    assert code == 0
    assert "utilisation" in out
    predicted = load_trace(folder / "plan.predicted.npz")
    assert (predicted.kind, predicted.ranks) == ("predicted", 4)
    (folder / "prompts.txt").write_text("import os\n\nclass Thing:\n    def method(self, other):\nThe statement\n")
    code, out, err = aurora(
        "run", plan, "--model", shipped("models/mixtral-topics"), "--model", shipped("models/qwen3moe-stdlib"),
        "--prompts", folder / "prompts.txt", "--max-new-tokens", 3, "--transport", "shaped", "--verify",
        "-o", folder / "answers.jsonl",
    )  # fmt: skip
    assert code == 0, err
    assert "verified: same greedy tokens" in out
    assert "served over shaped" in out
    assert re.search(r"mixtral-topics +│ +4 │ +\d+\.\d │( +[\d.]+ m?s │){4}", out)
    assert load_trace(folder / "plan.measured.npz").kind == "measured"
    answers = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    assert [(x["model"], x["prompt"], len(x["tokens"])) for x in answers] == [
        (m, p, 3) for m in ("mixtral-topics", "qwen3moe-stdlib") for p in range(4)
    ]


def test_answers_that_can_no_longer_be_written_are_printed(aurora, folder, monkeypatch):
    plan, out = folder / "one.json", folder / "out"
    assert aurora("plan", "--cluster", DEMO, "--profile", folder / "a.npz", "-o", plan)[0] == 0
    (folder / "prompts.txt").write_text("import os\nThe statement\n")
    out.mkdir()
    served = run

    def run_while_the_folder_goes(*args, **kwargs):
        result = served(*args, **kwargs)
        out.rmdir()
        return result

    monkeypatch.setattr("aurora.run", run_while_the_folder_goes)
    code, printed, err = aurora(
        "run", plan, "--model", shipped("models/mixtral-topics"), "--prompts", folder / "prompts.txt", "--max-new-tokens", 2,
        "--transport", "memory", "-o", out / "answers.jsonl",
    )  # fmt: skip
    assert code == 2
    assert err.endswith("the answers are printed instead\n")
    assert [len(json.loads(line)["tokens"]) for line in printed.splitlines()] == [2, 2]


@pytest.mark.full
def test_a_run_is_compared_with_a_prediction_of_its_own_traffic(aurora, folder):
    """Both models and one after the other: every byte that was measured was predicted, whatever the prompts were."""
    plan, paths = folder / "plan.json", [shipped("models/mixtral-topics"), shipped("models/qwen3moe-stdlib")]
    assert aurora("plan", "--cluster", DEMO, "--profile", folder / "a.npz", "--profile", folder / "b.npz", "-o", plan)[0] == 0
    (folder / "prompts.txt").write_text("import os\n\nclass Thing:\nThe statement\nno\n")
    run = ["run", plan, "--model", paths[0], "--model", paths[1], "--prompts", folder / "prompts.txt", "--max-new-tokens", 2]
    for more in (["--transport", "shaped"], ["--transport", "memory", "--interleave", "off"]):
        code, out, err = aurora(*run, *more, "--compare")
        assert code == 0, err
        assert re.search(r"network: median error \d+.*% of 32 cases", " ".join(out.split()))
        assert "predicted on the network as measured before serving" in out
        predicted, measured = (load_trace(folder / f"plan.measured{kind}.npz") for kind in (".predicted", ""))
        for model in range(2):
            sent = [(t.model_X == model) & t.sent_X for t in (predicted, measured)]
            keys = [
                np.stack([t.step_X, t.layer_X, t.phase_X, t.rank_X, t.peer_X, t.bytes_X])[:, own]
                for t, own in zip((predicted, measured), sent, strict=True)
            ]
            assert sorted(keys[0].T.tolist()) == sorted(keys[1].T.tolist()) != []
    starts, ends = [measured.start_s_X[measured.model_X == 1].min(), measured.end_s_X[measured.model_X == 0].max()]
    assert starts >= ends  # one after the other
    given = ["--compare", "--transport", "memory"]
    code, out, _ = aurora(*run, *given, "--json")
    assert code == 0
    found = json.loads(out)
    assert set(found) == documented_keys()["run"]
    assert found["comparison"]["predicted_s"] > 0
    assert found["answers"] is None
    for served in found["models"]:
        assert set(served["ttft_s"]) == set(served["tpot_s"]) == {"p50", "p90", "p99"}
        assert served["requests"] > 0
    refused(aurora(*run, "--compare", "--orders", "auto"), "run --compare: simulates the plan alone and as planned")
    refused(aurora(*run, "--interleave", "maybe"), "--interleave: expected one of on, off, processes")
    refused(aurora(*run, "--gpu-group", "x"), "--gpu-group: expected with --interleave processes")


def test_a_plan_over_leaves_says_which_port_or_nic_binds(aurora, folder):
    config = shipped("models/qwen3moe-stdlib") / "config.json"
    out, plan = folder / "s.npz", folder / "p.json"
    assert aurora("synthetic", "zipf:0.8", config, "--sources", 16, "-o", out)[0] == 0
    code, text, _ = aurora(
        "plan", "--cluster", shipped("clusters/leaf-spine-16.toml"), "--profile", out, "--explain", "-o", plan
    )
    assert code == 0
    assert re.search(
        r"layer \d: bound by (sending|receiving) (port|NIC) of rank.*: \d+ bytes must cross", " ".join(text.split())
    )
    found = load_plan(plan)
    assert (found.models[0].dispatch_s_L >= found.models[0].bound_s_L * (1 - 1e-9)).all()
    assert aurora("simulate", plan)[0] == 0


def test_plans_find_their_profiles_from_any_folder(aurora, folder, monkeypatch):
    (folder / "plans").mkdir()
    monkeypatch.chdir(folder)
    assert aurora("plan", "--cluster", DEMO, "--profile", "a.npz", "-o", "plans/p.json")[0] == 0
    monkeypatch.chdir("/")
    assert aurora("simulate", folder / "plans/p.json")[0] == 0
    shutil.copy(folder / "b.npz", folder / "a.npz")
    refused(aurora("simulate", folder / "plans/p.json"), r"p\.json: was planned from a different version of .*a\.npz")


def test_compute_times_measured_anew_are_told_and_priced_anew(aurora, folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert aurora("plan", "--cluster", DEMO, "--profile", "a.npz", "-o", "p.json")[0] == 0
    assert "measured after" not in aurora("simulate", "p.json", "--json")[2]
    before, profile = load_plan("p.json"), load_profile("a.npz")
    curves = {
        kind: {phase: Curve(curve.tokens_X, 3 * curve.seconds_X) for phase, curve in phases.items()}
        for kind, phases in profile.curves.items()
    }
    slower = replace(profile, curves=curves)
    assert repriced(before, [profile]) == before
    assert repriced(before, [slower]).objective_s == pytest.approx(evaluate(before, slower).served_s_L.sum())
    assert before.bound_s < repriced(before, [slower]).bound_s <= repriced(before, [slower]).objective_s
    save(slower, "a.npz")
    code, _, told = aurora("simulate", "p.json", "--json")
    assert code == 0
    assert "a.npz has compute times measured after" in told
    assert aurora("report", "p.json", "p.predicted.npz", "-o", "r.html")[0] == 0
    page = Path("r.html").read_text()
    assert "priced anew by compute times" in page
    assert 'class="missing"' not in page.split("<noscript>")[0] + page.split("</noscript>")[1]


LINES = {
    "RUN": "run plan.json --model MIXTRAL --prompts text.txt",
    "PLAN": "plan --cluster DEMO --profile a.npz",
    "TRAIN": "train MIXTRAL --text text.txt",
}


@pytest.mark.parametrize(
    ("line", "pattern"),
    [
        ("profile nowhere --text text.txt", "nowhere: no such folder, and no model of this name in the local hub cache"),
        ("profile MIXTRAL --text text.txt -o no/where.npz", "cannot be written: no such folder"),
        ("synthetic fat MIXTRAL/config.json", "SKEW: expected uniform or zipf:EXPONENT, found 'fat'"),
        ("synthetic zipf:100 MIXTRAL/config.json", "SKEW: expected an exponent of zero or more and below 100, found 100"),
        ("PLAN -o a.npz", r"a\.npz: .* it would replace a\.npz, which this"),
        ("PLAN -o /dev/null", "/dev/null: cannot be written: not a regular file"),
        ("PLAN -o round", "round: cannot be written: not a regular file"),
        ("RUN -o round", "round: cannot be written: not a regular file"),
        ("simulate plan.json -o plan.json", r"it would replace plan\.json"),
        ("RUN -o .", r"\.: cannot be written: it is a folder"),
        ("RUN --trace .", r"\.: cannot be written: it is a folder"),
        ("simulate cut.json", r"cut\.json: not JSON"),
        ("run plan.json --model MIXTRAL --prompts blank.txt", r"blank\.txt: expected a prompt on each line"),
        ("run plan.json --model MIXTRAL --prompts bad.jsonl", r"bad\.jsonl: line 3: unknown text; expected at_s, prompt"),
        (
            "TRAIN --elastic --lighthouse 10.0.0.1 -o out",
            "--lighthouse: expected ADDRESS:PORT such as 10.0.0.1:29600, found '10.0.0.1'",
        ),
        ("TRAIN --scheme bcc -o out", "--scheme: is for a run with --redundancy above 1, found bcc"),
        ("RUN --transport pigeon", "--transport: expected"),
        ("RUN --max-new-tokens 0", "--max-new-tokens: exp"),
        ("RUN --batch 2000000", "--batch: expected at most 1048576"),
    ],
)
def test_bad_input(aurora, folder, planned, monkeypatch, line, pattern):
    monkeypatch.chdir(folder)
    shutil.copy(planned, folder)
    (folder / "round").unlink(missing_ok=True)
    (folder / "round").symlink_to("round")
    (folder / "cut.json").write_text((folder / "plan.json").read_text()[:-40])
    (folder / "blank.txt").write_text("\n \n")
    (folder / "bad.jsonl").write_text('{"prompt": "fine"}\n\n{"text": "not"}\n')
    before = files(folder)
    words = re.sub("RUN|PLAN|TRAIN", lambda found: LINES[found[0]], line).split()
    paths = {"MIXTRAL": str(shipped("models/mixtral-topics")), "DEMO": DEMO}
    refused(aurora(*(re.sub("MIXTRAL|DEMO", lambda found: paths[found[0]], word) for word in words)), pattern)
    assert files(folder) == before


def test_a_model_without_experts(aurora, folder):
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    LlamaForCausalLM(LlamaConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8,
                                 vocab_size=259)).save_pretrained(folder / "dense")  # fmt: skip
    refused(aurora("profile", folder / "dense", "--text", folder / "text.txt"), "LlamaForCausalLM has no MoE layers")


def test_a_model_is_not_replaced_by_what_is_trained_from_it(aurora, folder):
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_bytes((shipped("models/mixtral-topics") / "config.json").read_bytes())
    line = ["train", folder / "model", "--text", folder / "text.txt", "-o", folder]
    refused(aurora(*line), "model: cannot be written: it would replace")


@pytest.mark.full
def test_a_rank_that_dies_at_start(aurora, folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert aurora("plan", "--cluster", DEMO, "--profile", "a.npz")[0] == 0
    run = ["run", "plan.json", "--model", shipped("models/mixtral-topics"), "--prompts", "text.txt"]
    before = files(folder)
    monkeypatch.setattr("aurora.runtime.run.serve_rank", die_at_start)
    refused(aurora(*run), r"rank 2 of 4 died \(killed by signal 9\); the others were stopped")
    assert files(folder) == before


def die_at_start(seat, *_):
    if seat.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def started_in(folder, client):
    """The processes of a command that `client` has asked for, by age: itself, what its ranks are forked from, the ranks."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.pid != client.pid and process.cwd() == str(folder):
                found.append(process)
    return sorted(found, key=lambda process: (process.create_time(), process.pid))


@pytest.mark.full
@pytest.mark.parametrize("victim", ["command", "rank"])
def test_killing_the_command_or_a_rank_leaves_nothing_behind(folder, victim, warm):
    """SIGKILL gives nobody a chance to clean up: ranks notice a lost command, the command a lost rank, in one sentence."""
    slow = folder / "slow.toml"
    slow.write_text(shipped("clusters/demo-4.toml").read_text().replace("3e6", "100.0"))
    plan = [warm / "aurora", "plan", "--cluster", "slow.toml", "--profile", "a.npz"]
    subprocess.run(plan, cwd=folder, check=True, capture_output=True)
    before = files(folder)
    run = ["run", "plan.json", "--model", shipped("models/mixtral-topics"), "--prompts", "text.txt", "--transport", "shaped"]
    client = subprocess.Popen([warm / "aurora", *run], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    family = []
    try:
        deadline = time.monotonic() + 600
        while len(family := started_in(folder, client)) < 7:  # itself, server, tracker, ranks
            assert time.monotonic() < deadline, family
            assert client.poll() is None, client.communicate()
            time.sleep(0.1)
        time.sleep(2)  # let them serve
        family[0 if victim == "command" else -1].kill()
        out, err = client.communicate(timeout=600)
        err = re.sub(r"\[.*gloo/transport.*\n", "", err)  # what gloo logs where it was connecting to that rank just then
        if victim == "rank":
            refused((client.returncode, out, err), r"rank \d of 4 died \(killed by signal 9\); the others were stopped")
        else:
            assert client.returncode == 128 + signal.SIGKILL
    finally:
        client.kill()
        client.communicate()
        _, alive = psutil.wait_procs(family, timeout=300)
        for process in alive:
            process.kill()
    assert alive == []
    assert files(folder) == before


def test_names_are_text_and_never_markup(aurora, folder):
    out = folder / "a[bold]b.json"
    code, printed, _ = aurora("plan", "--cluster", DEMO, "--profile", folder / "a.npz", "-o", out)
    assert code == 0
    assert "a[bold]b.json" in printed


@pytest.mark.full
def test_under_torchruns_variables_each_process_is_a_rank(folder, warm):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    run = [*torchrun, warm / "aurora", "run"]
    from aurora.planner.plan import make_plan

    four = load_profile(folder / "a.npz")
    two = replace(four, tokens_TLSE=np.array(four.tokens_TLSE[:, :, :2]))
    save(make_plan(cluster(1e6, 1e6), [two]), folder / "two.json")
    (folder / "prompts.txt").write_text("import os\nclass A:\nthe end\n")
    given = ["two.json", "--model", str(shipped("models/mixtral-topics")), "--prompts", "prompts.txt", "--max-new-tokens", "2"]
    done = subprocess.run([*run, *given, "--verify"], cwd=folder, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("verified: same greedy tokens") == 1
    assert load_trace(folder / "two.measured.npz").ranks == 2


@pytest.mark.full
def test_a_reader_that_wants_no_more_is_no_failure(tmp_path):
    """As `| head` does; the output is longer than a pipe holds."""
    command = (
        f"set -o pipefail; {sys.executable} -m aurora synthetic zipf:1 mixtral-topics --json --output {tmp_path}/p.npz | true"
    )
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=400)
    assert (ended.returncode, ended.stderr) == (0, "")
