"""What a run served of each model, as a table and lines."""

from aurora.reports.formatting import as_text
from aurora.reports.trace_tables import ServedModel, rank_lines, served_table

BUSY = ServedModel("mixtral-topics", 3, 2, 12.34, 3.21, {0: [0.1, 0.3], 2: [0.2]}, {0: [0.05, 0.07], 2: [0.01]})
NONE = ServedModel("qwen3moe-stdlib", 0, 0, 0.0, 0.0, {}, {})


def test_a_table_of_models_fits_80_columns():
    text = as_text([served_table([BUSY, NONE], "gloo", 4.2)], 80)
    assert max(map(len, text.splitlines())) <= 80
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line.startswith("│")]
    dashes = ["\N{EN DASH}"] * 4
    assert rows == [
        ["mixtral-topics", "2 of 3", "12.3", "200 ms", "298 ms", "50 ms", "69.6 ms"],
        ["qwen3moe-stdlib", "0", "0.0", *dashes],
    ]
    assert "3.2, 0.0 output tokens/s including 4.2 s start-up" in " ".join(text.split())


def test_a_line_tells_the_ranks_that_are_fastest_and_slowest():
    (line,) = rank_lines([BUSY, NONE])
    assert (
        line
        == "mixtral-topics: TTFT p99 from 200 ms (rank 2) to 298 ms (rank 0), TPOT p99 from 10 ms (rank 2) to 69.8 ms (rank 0)"
    )
