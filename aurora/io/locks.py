"""Files that only one process writes: locked as long as they are open."""

import fcntl
import io
import os
from pathlib import Path

from aurora.errors import BadInput


def open_locked(path: Path) -> io.FileIO:
    """Opens a file to append to, which is made if it is not there. No other process can do so until it is closed.

    Raises:
        BadInput: if another process has it open so, or it cannot be written.
    """
    try:
        while True:
            file = path.open("ab", buffering=0)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
                    return file
            except BaseException:
                file.close()
                raise
            file.close()  # who had it before has removed it
    except BlockingIOError:
        raise BadInput(f"{path}: another run writes it") from None
    except OSError as error:
        raise BadInput(f"{path}: cannot be written: {error.strerror}") from None
