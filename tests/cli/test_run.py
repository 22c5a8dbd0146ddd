"""What a run served of each model, as a table and lines; and the command's end when a rank is killed."""

import signal
import subprocess
import sys
import time

import psutil
import pytest

pytest.importorskip("torch")

import aurora
from aurora.cli.run import served_json, served_table
from aurora.runtime.result import Answers, RunResult, TokenTimes
from aurora.types import TraceRecorder
from tests.reports.as_text import as_text

NAMES = ("mixtral-topics", "qwen3moe-stdlib")
TIMES = {2: TokenTimes({2: 0.2}, [0.01]), 0: TokenTimes({0: 0.1, 1: 0.3}, [0.05, 0.07])}
BUSY = Answers({0: [1] * 600, 1: [1] * 600, 2: [1] * 34}, seconds=100.0, times_R=TIMES)
RESULT = RunResult((BUSY, Answers()), 100.0, TraceRecorder("measured", NAMES, 4).trace(), "gloo", start_s=25.0)


def test_a_table_of_models_fits_80_columns():
    text = as_text([served_table(NAMES, RESULT)], 80)
    assert max(map(len, text.splitlines())) <= 80
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line.startswith("│")]
    dashes = ["\N{EN DASH}"] * 4
    assert rows == [
        ["mixtral-topics", "3", "12.3", "200 ms", "298 ms", "50 ms", "69.6 ms"],
        ["qwen3moe-stdlib", "0", "0.0", *dashes],
    ]
    assert "9.9, 0.0 output tokens/s including 25.0 s start-up" in " ".join(text.split())


def test_json_has_the_models():
    found = served_json(NAMES[0], RESULT, 0)
    assert (found["requests"], found["tokens_per_s"]) == (3, 12.34)
    assert found["ttft_s"]["p50"] == 0.2
    assert served_json(NAMES[1], RESULT, 1)["tpot_s"] == {"p50": None, "p90": None, "p99": None}


@pytest.mark.full
@pytest.mark.parametrize("wait_s", [0.0, 6.0])
def test_a_killed_rank_ends_the_command_in_seconds_with_a_sentence(mixtral, tmp_path, wait_s):
    """While it loads, and while it serves."""
    plan = aurora.plan(aurora.load("demo-4"), aurora.synthetic_profile("zipf:1", mixtral))
    aurora.save(plan, tmp_path / "plan.json")
    (tmp_path / "prompts.txt").write_text("import os\n" * 8)
    words = ["run", "plan.json", "--model", mixtral, "--prompts", "prompts.txt", "--max-new-tokens", "400", "-o", "answers"]
    command = subprocess.Popen(
        [sys.executable, "-m", "aurora", *map(str, words)], cwd=tmp_path, stderr=subprocess.PIPE, text=True
    )
    until_s, ranks = time.monotonic() + 300, []
    while len(ranks) < 4 and command.poll() is None and time.monotonic() < until_s:
        ranks = [rank for child in psutil.Process(command.pid).children() for rank in child.children()]
        time.sleep(0.01)
    time.sleep(wait_s)
    ranks.sort(key=lambda rank: rank.pid)
    ranks[1].send_signal(signal.SIGKILL)
    killed_s = time.monotonic()
    _, err = command.communicate(timeout=300)
    assert command.returncode == 2, err
    assert err == "aurora: rank 1 of 4 died (killed by signal 9); the others were stopped\n"
    assert time.monotonic() - killed_s < 20
    assert not psutil.wait_procs(ranks, timeout=10)[1]
    assert not (tmp_path / "answers").exists()
