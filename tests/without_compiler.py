"""What code prints with numba's JIT and without it, where compiled functions run in plain Python."""

import os
import subprocess
import sys


def printed(code: str) -> tuple[str, str]:
    """Returns what `code` prints in a process with numba's JIT, and in one without it."""
    compiled, plain = (
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "NUMBA_DISABLE_JIT": flag},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for flag in ("0", "1")
    )
    return compiled, plain
