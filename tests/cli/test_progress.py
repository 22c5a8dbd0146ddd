"""That functions are compiled is told."""

import numba

from aurora.cli import progress
from aurora.cli.progress import COMPILING, shown


def test_that_functions_are_compiled_is_told_once(monkeypatch, capsys):
    monkeypatch.setattr(progress, "COMPILING_S", 1e-9)
    with shown():
        assert numba.njit(lambda number: number + 1)(1) == 2
        assert numba.njit(lambda number: number * 2)(1) == 2
    assert capsys.readouterr() == ("", COMPILING + "\n")
    with shown():
        pass
    assert capsys.readouterr() == ("", "")
