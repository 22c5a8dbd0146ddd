"""What a run served of each model, as a table and lines."""

import pytest

pytest.importorskip("torch")

from aurora.cli.run import served_json, served_table
from aurora.reports.formatting import as_text
from aurora.runtime.result import Answers, RunResult, TokenTimes
from aurora.types import TraceRecorder

NAMES = ("mixtral-topics", "qwen3moe-stdlib")
TIMES = {2: TokenTimes({2: 0.2}, [0.01]), 0: TokenTimes({0: 0.1, 1: 0.3}, [0.05, 0.07])}
BUSY = Answers({0: [1] * 600, 1: [1] * 600, 2: [1] * 34}, finished={0, 1}, seconds=100.0, times_R=TIMES)
RESULT = RunResult((BUSY, Answers()), 100.0, TraceRecorder("measured", NAMES, 4).trace(), "gloo", start_s=25.0)


def test_a_table_of_models_fits_80_columns():
    text = as_text([served_table(NAMES, RESULT)], 80)
    assert max(map(len, text.splitlines())) <= 80
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line.startswith("│")]
    dashes = ["\N{EN DASH}"] * 4
    assert rows == [
        ["mixtral-topics", "2 of 3", "12.3", "200 ms", "298 ms", "50 ms", "69.6 ms"],
        ["qwen3moe-stdlib", "0", "0.0", *dashes],
    ]
    assert "9.9, 0.0 output tokens/s including 25.0 s start-up" in " ".join(text.split())


def test_json_has_the_models():
    found = served_json(NAMES[0], RESULT, 0)
    assert (found["requests"], found["finished"], found["tokens_per_s"]) == (3, 2, 12.34)
    assert found["ttft_s"]["p50"] == 0.2
    assert served_json(NAMES[1], RESULT, 1)["tpot_s"] == {"p50": None, "p90": None, "p99": None}
