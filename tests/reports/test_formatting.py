"""Numbers as text."""

import numpy as np
import pytest

from aurora.reports.formatting import distinct, percent, seconds, size
from aurora.reports.tables import Table
from aurora.reports.tables import text as as_it_is
from tests.reports.as_text import as_text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *[(0.0, "0 ns"), (2e-9, "2 ns"), (1e-6, "1 us"), (2.5e-3, "2.5 ms"), (1.234, "1.23 s"), (2500, "2500 s")],
        *[(0.9994, "999 ms"), (0.9996, "1 s"), (999.6, "1000 s")],  # rounded before the unit is chosen
    ],
)
def test_seconds_have_units(value, text):
    assert seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (2048, "2.05 kB"), (7e6, "7 MB"), (5.11e9, "5.11 GB"), (2e12, "2000 GB")],
)
def test_bytes_have_units(value, text):
    assert size(value) == text


def test_percent():
    assert percent(np.float64(0.1234)) == "12.3%"


def test_names_that_are_the_same_are_numbered():
    assert distinct(["a", "b"]) == ("a", "b")
    assert distinct(["a", "b", "a"]) == ("a (0)", "b (1)", "a (2)")


@pytest.mark.parametrize("width", [60, 80, 200])
def test_names_of_models_stay_whole(width):
    names = ["mixtral-topics", "Qwen3-30B-A3B-Instruct-2507"]
    columns = {
        "model": as_it_is,
        **dict.fromkeys(("layer", "time", "dispatch", "combine", "waiting", "fluid bound", "gap"), str),
    }
    rows = [(name, *["647 ms"] * 7) for name in names]
    lines = as_text([Table(columns, rows, "predicted", "below")], width).splitlines()
    assert max(map(len, lines)) <= width
    assert [sum(name in line for line in lines) for name in names] == [1, 1]
    assert sum(line.count("647 ms") for line in lines) == 14
    assert [sum(word in line for line in lines) for word in ("predicted", "below")] == [1, 1]
