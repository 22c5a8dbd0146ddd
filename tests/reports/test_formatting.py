"""Numbers as text."""

import numpy as np
import pytest

from aurora.reports.formatting import distinct, percent, seconds, size


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0 ns"), (2e-9, "2 ns"), (1e-6, "1 us"), (2.5e-3, "2.5 ms"), (1.234, "1.23 s"), (2500, "2500 s")]
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
