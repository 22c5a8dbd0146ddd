"""Compiled functions: numba's `njit` that caches machine code on disk, or works without a cache if no folder is writable."""

import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numba
from numba.core.options import DefaultOptions

from aurora.errors import BadInput
from aurora.types.private_folders import make_private

VARIABLE = "NUMBA_CACHE_DIR"  # where numba keeps what it compiles; else beside the package, or in the user's cache folder


def _keep_in_temporary_folder() -> None:
    """Has numba keep what it compiles in a folder of this user's for temporary files where it could not keep it elsewhere."""
    user_cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "numba"
    if VARIABLE in os.environ or _can_be_written(Path(__file__).parents[1]) or _can_be_written(user_cache):
        return
    folder = Path(tempfile.gettempdir()) / f"aurora-compiled-{os.getuid()}"
    make_private(folder)  # numba unpickles what it finds there
    os.environ[VARIABLE] = numba.config.CACHE_DIR = str(folder)


def _can_be_written(folder: Path) -> bool:
    """Returns whether files can be made in a folder, or the folder itself can."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return os.access(folder, os.W_OK | os.X_OK)


with suppress(BadInput, OSError, RuntimeError):  # no such folder, or no home: every process compiles anew
    _keep_in_temporary_folder()


def njit(*signature: Any, allocates: bool = True, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Returns numba's `njit` with these arguments; without its cache if numba finds no writable folder.

    Args:
        signature, options: arguments of numba's `njit`.
        allocates: whether the function creates arrays. False: numba does not count references to the arguments, which would
            take most of the time of short functions with tuples of many arrays as arguments.
    """
    if not allocates and hasattr(DefaultOptions, "_nrt"):
        options["_nrt"] = False

    def compiled(function: Callable[..., Any]) -> Any:
        try:
            return numba.njit(*signature, **options)(function)
        except RuntimeError as error:
            if "cannot cache" not in str(error):
                raise
            return numba.njit(*signature, **options | {"cache": False})(function)

    return compiled


def cache_folder(function: Any) -> str | None:
    """Returns the folder in which numba caches the machine code of a compiled function; None if it is not cached."""
    path: str | None = function._cache.cache_path
    return path
