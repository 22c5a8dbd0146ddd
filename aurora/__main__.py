"""The `aurora` command, from the first import on: interrupted at any time it ends with exit code 130 and no traceback."""

import signal
import sys
from typing import Any


def main() -> None:
    """Run the `aurora` command."""
    try:
        before = signal.signal(signal.SIGINT, _stop)  # imports turn the exception into others, or print it
        from aurora.cli.main import main as command

        signal.signal(signal.SIGINT, before)
        command()
    except KeyboardInterrupt:
        _stop()


def _stop(*_: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stderr.write("aurora: interrupted\n")
    sys.stderr.flush()
    raise SystemExit(130)


if __name__ == "__main__":
    main()
