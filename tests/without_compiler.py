"""What code prints with compiled modules, and where they are plain Python."""

import os
import subprocess
import sys

from aurora.algorithms.uncompiled import VARIABLE


def printed(code: str) -> tuple[str, str]:
    """Returns what `code` prints in a process with compiled modules, and in one where they are plain Python."""
    compiled, plain = (
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | ({VARIABLE: flag} if flag == "1" else {}),
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for flag in ("0", "1")
    )
    return compiled, plain
