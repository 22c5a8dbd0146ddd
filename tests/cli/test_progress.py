"""That functions are compiled is told."""

import numba

from aurora.cli import output
from aurora.cli.output import COMPILING, progress_bars


def test_that_functions_are_compiled_is_told_once(monkeypatch, capsys):
    monkeypatch.setattr(output, "COMPILING_S", 1e-9)
    with progress_bars():
        assert numba.njit(lambda number: number + 1)(1) == 2
        assert numba.njit(lambda number: number * 2)(1) == 2
    assert capsys.readouterr() == ("", COMPILING + "\n")
    with progress_bars():
        pass
    assert capsys.readouterr() == ("", "")
