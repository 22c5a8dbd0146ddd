"""One grammar of numbers: what Python reads beyond it is refused everywhere."""

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from aurora.errors import BadInput
from aurora.io import load_loads, load_matrix
from aurora.types.read_numbers import finite_number, whole_number

SIGNS = "0123456789_+-.eEnaifNI \t０１²٣௧५,x"
ASCII = set("0123456789+-.eE \t\r\n")


@given(st.integers(-(10**30), 10**30))
def test_whole_numbers_are_read(number):
    assert whole_number(str(number)) == whole_number(f" {number}\n") == whole_number(number) == number


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_numbers_are_read(number):
    assert finite_number(repr(number)) == finite_number(f" {number!r}") == finite_number(number) == number


@given(st.text(SIGNS, max_size=12))
@example("1_0")
@example("１０")
@example("٣")
@example("nan")
@example("-Infinity")
@example("1e999")
@example("")
def test_texts_are_read_as_python_reads_them_or_refused(text):
    for read, python in ((whole_number, int), (finite_number, float)):
        try:
            found = read(text)
        except BadInput:
            continue
        assert set(text) <= ASCII
        assert found == python(text)
        assert math.isfinite(found)


@pytest.mark.parametrize("value", [True, False, None, [], {}, [1], math.nan, math.inf, 10**400, b"1", 1j])
def test_what_is_no_number_is_refused(value):
    with pytest.raises(BadInput, match="expected a number, found"):
        finite_number(value)
    if value != 10**400:
        with pytest.raises(BadInput, match="expected a whole number, found"):
            whole_number(value)


@pytest.mark.parametrize("cell", ["1_0", "１", "٣", "0x1", "1e999", "true"])
@pytest.mark.parametrize("load", [load_matrix, load_loads])
def test_tables_hold_no_other_numbers(tmp_path, cell, load):
    (tmp_path / "t.csv").write_text(f"0,{cell}\n1,0\n")
    message = (
        r"t\.csv: (expected rows of (whole )?numbers: could not convert|row 1, column 2: expected a finite number, found inf)"
    )
    with pytest.raises(BadInput, match=message):
        load(tmp_path / "t.csv")
