"""`aurora doctor`: its table, its JSON and its exit code."""

import json

import pytest

from aurora.profiler import doctor
from aurora.profiler.doctor import BROKEN, MISSING, WORKS, Finding

PARTS = [Finding("numpy", WORKS, "2.4", basic=True), Finding("vllm", MISSING, "not installed", "pip install vllm")]


@pytest.mark.parametrize(("basic", "code", "says"), [(WORKS, 0, "planning works"), (BROKEN, 1, "planning does not work")])
def test_exit_code_and_table(aurora, monkeypatch, basic, code, says):
    monkeypatch.setattr(doctor, "examine", lambda _: [*PARTS, Finding("scipy", basic, "1.17", "", basic=True)])
    found, out, _ = aurora("doctor")
    assert found == code
    assert says in out
    assert "pip install vllm" in out


def test_long_paths_are_whole_in_80_columns(aurora, monkeypatch):
    path = "/a" * 60
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(doctor, "examine", lambda _: [Finding("C compiler", WORKS, path)])
    _, out, _ = aurora("doctor")
    assert "".join(line.split("│")[3].strip() for line in out.splitlines() if line.count("│") > 3) == path


def test_json(aurora, monkeypatch):
    monkeypatch.setattr(doctor, "examine", lambda _: PARTS)
    code, out, _ = aurora("doctor", "--json")
    assert code == 0
    told = json.loads(out)
    assert told["schema"] == 1
    assert told["works"]
    assert told["findings"][1] == {
        "name": "vllm", "state": "missing", "found": "not installed", "mend": "pip install vllm", "basic": False
    }  # fmt: skip
