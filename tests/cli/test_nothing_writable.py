"""A user who can write neither beside the package nor at home: compiled code is kept in a temporary folder, or nowhere."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOBODY = 65534
SETPRIV = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
READS = ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]  # the interpreter, which may lie in root's home


@pytest.fixture
def nobody(tmp_path):
    """Runs Python as a user who can read everything and write in one folder alone, and returns what is printed."""
    if os.getuid() or shutil.which("setpriv") is None:
        pytest.skip("needs root and setpriv, to become another user")
    temporary = Path(shutil.copytree(tmp_path, f"/tmp/aurora-test-{os.getpid()}"))
    os.chown(temporary, NOBODY, NOBODY)
    (temporary / "m.csv").write_text("0,4\n5,0\n")
    environment = {
        "PATH": os.environ["PATH"], "HOME": "/nonexistent", "TMPDIR": str(temporary), "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": str(ROOT),
    }  # fmt: skip

    def run(*words):
        command = [*SETPRIV, *READS, sys.executable, *words]
        return subprocess.run(command, env=environment, cwd=temporary, capture_output=True, text=True, timeout=300, check=False)

    yield run, temporary
    shutil.rmtree(temporary)


def test_no_compiled_code_is_imported_before_a_command_needs_it():
    imported = "import sys, aurora.cli.main; print('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", imported], capture_output=True, text=True, check=True).stdout == "False\n"


@pytest.mark.full
@pytest.mark.parametrize("kept", [True, False])
def test_commands_work_and_the_code_is_kept_where_the_user_alone_can_write(nobody, kept):
    run, temporary = nobody
    folder = temporary / f"aurora-compiled-{NOBODY}"
    if not kept:
        folder.mkdir()  # root's: another user's folder is not trusted
    for words in (["order", "--help"], ["order", "m.csv"]):
        done = run("-m", "aurora", *words)
        assert (done.returncode, done.stderr) == (0, "")
    assert bool(list(folder.rglob("*.nbi"))) == kept
    assert not kept or folder.stat().st_mode & 0o777 == 0o700
    code = (
        "import json, dataclasses; from aurora.profiler.doctor import _numba; print(json.dumps(dataclasses.asdict(_numba())))"
    )
    found = json.loads(run("-c", code).stdout)
    assert found["state"] == "works"
    assert (f"is kept in {folder}" if kept else "is kept nowhere, so that every command compiles anew") in found["found"]
    assert ("NUMBA_CACHE_DIR" in found["mend"]) != kept


@pytest.mark.parametrize(
    "closed", [*(pytest.param(closed, marks=pytest.mark.full) for closed in (">&-", ">&- 2>&-", "<&- >&-")), "<&- >&- 2>&-"]
)
def test_closed_streams_are_no_traceback_and_no_file_takes_their_place(tmp_path, closed):
    (tmp_path / "m.csv").write_text("0,4\n5,0\n")
    line = f"exec {sys.executable} -m aurora order m.csv -o out.json {closed}"
    done = subprocess.run(["sh", "-c", line], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    assert json.loads((tmp_path / "out.json").read_text())
