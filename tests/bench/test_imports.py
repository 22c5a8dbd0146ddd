"""Every script in bench/ finds the names that it imports, and its options can be declared: few of them are run often."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"
SCRIPTS = sorted(path for path in BENCH.rglob("*.py") if "__main__" in path.read_text() and path.parent.name != "gpu")
PARSED = [path for path in SCRIPTS if "ArgumentParser(" in path.read_text()]


def python(*arguments):
    done = subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.relative_to(BENCH).as_posix())
def test_a_script_shows_its_help_or_imports(path):
    if path in PARSED:
        python(path, "--help")
    else:
        python(
            "-c", f"import runpy, sys; sys.path.insert(0, {str(path.parent)!r}); runpy.run_path({str(path)!r}, run_name='it')"
        )
