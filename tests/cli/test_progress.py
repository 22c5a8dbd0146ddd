"""The live table of workers, and that functions are compiled."""

import numba

from aurora.cli import progress
from aurora.cli.progress import COMPILING, shown, workers_shown
from aurora.types import WorkerReport


def test_a_terminal_sees_every_change_and_the_output_the_last(monkeypatch, capsys):
    for wanted, variables in ((True, {"FORCE_COLOR": "1", "TERM": "xterm"}), (False, {})):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        with workers_shown() as watch:
            watch([WorkerReport(0, (0, 1)), WorkerReport(1, (2, 3))])
            watch([WorkerReport(0, (0, 1), "used", 1.5), WorkerReport(1, (2, 3), "killed by signal 9", 0.2)])
        out, err = capsys.readouterr()
        assert "waited for 1 of 2 workers, 1.5 s" in out
        assert "killed by signal 9" in out
        assert ("working" in err) == wanted
        for name in variables:
            monkeypatch.delenv(name)


def test_without_workers_nothing_is_printed(capsys):
    with workers_shown():
        pass
    assert capsys.readouterr() == ("", "")


def test_that_functions_are_compiled_is_told_once(monkeypatch, capsys):
    monkeypatch.setattr(progress, "COMPILING_S", 1e-9)
    with shown():
        assert numba.njit(lambda number: number + 1)(1) == 2
        assert numba.njit(lambda number: number * 2)(1) == 2
    assert capsys.readouterr() == ("", COMPILING + "\n")
    with shown():
        pass
    assert capsys.readouterr() == ("", "")
