"""Compiled modules give the same as their files do as plain Python."""

import sys
from pathlib import Path

import aurora.algorithms
from tests.algorithms import every_core
from tests.without_compiler import printed


def test_compiled_and_plain_code_give_the_same():
    compiled, plain = printed(f"import runpy; runpy.run_module({every_core.__name__!r}, run_name='__main__')")
    assert compiled == plain
    assert compiled.count("\n") > 50
    assert {file.stem for file in Path(aurora.algorithms.__file__).parent.rglob("*_core.py")} <= {
        name.rpartition(".")[2] for name in sys.modules
    }
