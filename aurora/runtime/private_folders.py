"""Makes folders that no other user can access, for files that processes share or that are read back without checks."""

import os
import stat
from pathlib import Path

from aurora.errors import BadInput


def make_private(folder: Path) -> None:
    """Makes a folder that no other user can read or write; an existing folder is only checked.

    Raises:
        BadInput: if the folder cannot be made, or exists and other users can access it.
    """
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        pass
    except OSError as error:
        raise BadInput(f"{folder} cannot be made: {error.strerror}") from None
    if reason := _refusal_reason(folder):
        raise BadInput(f"{folder}: expected a folder of this user alone, found {reason}")


def _refusal_reason(folder: Path) -> str | None:
    """Returns, as part of a sentence, the reason for which a folder is not this user's alone; None if it is."""
    try:
        status = folder.lstat()
    except OSError as error:
        return f"none: {error.strerror}"
    if not stat.S_ISDIR(status.st_mode):
        return "a symbolic link" if stat.S_ISLNK(status.st_mode) else "no folder"
    if status.st_uid != os.getuid():
        return f"one of user {status.st_uid}"
    return f"mode {stat.S_IMODE(status.st_mode):o}, not 700" if status.st_mode & 0o077 else None
