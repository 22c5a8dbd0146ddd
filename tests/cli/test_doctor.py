"""`aurora doctor`: its table, its JSON and its exit code."""

import json

import pytest

from aurora.profiler import doctor
from aurora.profiler.doctor import BROKEN, MISSING, PLANNING, WORKS, Finding


@pytest.mark.parametrize(("state", "code", "says"), [(WORKS, 0, "planning works"), (BROKEN, 1, "planning does not work")])
def test_exit_code_table_and_json(aurora, monkeypatch, state, code, says):
    parts = [Finding(PLANNING, state, "/a" * 60), Finding("vllm", MISSING, "not installed", "pip install vllm")]
    monkeypatch.setattr(doctor, "examine", lambda _: parts)
    found, out, _ = aurora("doctor")
    assert (found, says in out, "pip install vllm" in " ".join(out.replace("│", " ").split())) == (code, True, True)
    assert "".join(line.split("│")[3].strip() for line in out.splitlines() if "/a" in line) == "/a" * 60
    told = json.loads(aurora("doctor", "--json")[1])
    assert (told["schema"], told["works"]) == (1, state == WORKS)
    assert told["findings"][1] == {"name": "vllm", "state": "missing", "found": "not installed", "mend": "pip install vllm"}
