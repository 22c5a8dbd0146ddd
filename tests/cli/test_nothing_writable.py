"""A user who can write nowhere, and a process whose streams are closed."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SETPRIV = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]  # nobody
READS = ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]  # the interpreter, which may lie in root's home


@pytest.mark.skipif(
    os.getuid() != 0 or shutil.which("setpriv") is None, reason="needs root and setpriv, to become another user"
)
def test_a_user_who_can_write_nowhere_orders():
    variables = {"HOME": "/nonexistent", "TMPDIR": "/nonexistent", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        (Path(folder) / "m.csv").write_text("0,4\n5,0\n")
        done = subprocess.run(
            [*SETPRIV, *READS, sys.executable, "-m", "aurora", "order", "m.csv"],
            env={"PATH": os.environ["PATH"], **variables}, cwd=folder, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert "makespan" in done.stdout


@pytest.mark.parametrize(
    "closed", [*(pytest.param(closed, marks=pytest.mark.full) for closed in (">&-", ">&- 2>&-", "<&- >&-")), "<&- >&- 2>&-"]
)
def test_closed_streams_are_no_traceback_and_no_file_takes_their_place(tmp_path, closed):
    (tmp_path / "m.csv").write_text("0,4\n5,0\n")
    line = f"exec {sys.executable} -m aurora order m.csv -o out.json {closed}"
    done = subprocess.run(["sh", "-c", line], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    assert json.loads((tmp_path / "out.json").read_text())
