"""What is compiled is what is written."""

import os
import shutil
import subprocess
import sys

import pytest

import hatch_build


@pytest.mark.parametrize("core", hatch_build.cores(), ids=lambda core: core.stem)
def test_the_extension_is_that_of_the_source(core):
    assert hatch_build.is_built(core), "python hatch_build.py builds it"


def test_a_change_of_a_source_asks_for_another_extension(tmp_path, monkeypatch):
    monkeypatch.setattr(hatch_build, "ROOT", tmp_path)
    (core := tmp_path / "aurora" / "sum_core.py").parent.mkdir()
    core.write_text("import cython\n")
    assert hatch_build.cores() == [core]
    assert not hatch_build.is_built(core)
    hatch_build.extension_of(core).write_bytes(b"code " + hatch_build.stamp(core) + b" code")
    assert hatch_build.is_built(core)
    core.write_text("import cython  # changed\n")
    assert not hatch_build.is_built(core)


def run_without(tmp_path, *words, **variables):
    """What Python says in a copy of the sources that has no extensions, with other variables."""
    for path in ("aurora", "hatch_build.py"):
        source = hatch_build.ROOT / path
        if source.is_dir():
            shutil.copytree(source, tmp_path / path, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
        else:
            shutil.copy(source, tmp_path)
    environment = os.environ | {"PYTHONPATH": str(tmp_path)} | variables
    done = subprocess.run([sys.executable, *words], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_without_a_compiler_and_without_a_wheel_one_sentence_says_so(tmp_path):
    code, said = run_without(tmp_path, "hatch_build.py", CC="/nonexistent/gcc")
    assert code == 1
    assert said.startswith("aurora: its compiled modules need a C compiler, such as gcc: ")


def test_without_extensions_a_command_says_how_to_build_them(tmp_path):
    (tmp_path / "m.csv").write_text("0,4\n5,0\n")
    code, said = run_without(tmp_path, "-m", "aurora", "order", "m.csv")
    assert code == 2
    assert said.count("\n") == 1
    assert "is not compiled: `pip install .`, or `python hatch_build.py` in a checkout, needs gcc" in said
