"""The `aurora` command, from the first import on: interrupted at any time it ends with exit code 130 and no traceback."""

import os
import signal
import sys
from typing import Any


def main() -> None:
    """Run the `aurora` command."""
    _open_closed_streams()
    try:
        before = signal.signal(signal.SIGINT, _stop)  # imports turn the exception into others, or print it
        from aurora.cli.main import main as command

        signal.signal(signal.SIGINT, before)
        command()
    except KeyboardInterrupt:
        _stop()


def _open_closed_streams() -> None:
    """Has standard streams that the caller has closed read and write nothing, so that no file of ours takes their place."""
    while (opened := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(opened)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r"))


def _stop(*_: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stderr.write("aurora: interrupted\n")
    sys.stderr.flush()
    raise SystemExit(130)


if __name__ == "__main__":
    main()
