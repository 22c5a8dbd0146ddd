"""Every script in bench/ finds the names that it imports, and its options can be declared: few of them are run often."""

import subprocess
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"
SCRIPTS = sorted(path for path in BENCH.rglob("*.py") if "__main__" in path.read_text() and path.parent.name != "gpu")
PARSED = [path for path in SCRIPTS if "ArgumentParser(" in path.read_text()]


@pytest.mark.full
@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.relative_to(BENCH).as_posix())
def test_a_script_shows_its_help_or_imports(path, warm):
    imports = f"import runpy, sys; sys.path.insert(0, {str(path.parent)!r}); runpy.run_path({str(path)!r}, run_name='it')"
    arguments = [path, "--help"] if path in PARSED else ["-c", imports]
    done = subprocess.run([warm / "python", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
