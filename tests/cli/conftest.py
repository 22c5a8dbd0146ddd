"""The command line in this process."""

import sys

import pytest

from aurora.cli.main import main


@pytest.fixture
def aurora(capsys, monkeypatch):
    """Run a command in this process; gives (exit code, output, error)."""

    def call(*args):
        monkeypatch.setattr(sys, "argv", ["aurora", *map(str, args)])
        monkeypatch.setattr("aurora.cli.inputs.TOLD", set())  # as in a process of its own
        with pytest.raises(SystemExit) as exit_:
            main()
        captured = capsys.readouterr()
        return exit_.value.code or 0, captured.out, captured.err

    return call
