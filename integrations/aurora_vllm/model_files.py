"""Files of a served model: whether they are still those that the serving ranks have loaded, before another rank joins them."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path

from aurora.errors import BadInput

SUFFIXES = {".json", ".safetensors", ".bin", ".pt", ".pth", ".gguf", ".model", ".txt", ".jinja", ".py"}  # that vLLM may load
State = tuple[int, int, int, int, int]  # size, times of change in ns (of the content, of the inode), inode and device of a file
NICENESS = 19  # of the thread that reads all files once


class ModelFiles:
    """Compares a model's files with those that the serving ranks have loaded.

    Equal sizes, times, inodes and devices mean equal files: a write changes a time that programs cannot set. Where they differ,
    the contents decide, by digests that a thread takes once after each start.

    Args:
        find: returns the model's folder, as vLLM finds it now.
    """

    def __init__(self, find: Callable[[], Path]) -> None:
        self._find = find
        self._before: dict[str, State] = {}
        self._loaded: dict[str, State] = {}
        self._digests: dict[str, str] = {}
        self._reader: threading.Thread | None = None

    def begin(self) -> None:
        """Notes the files as they are before a rank, or all of them, loads them."""
        self._before = self._states()

    def end(self) -> str:
        """Notes that all ranks have loaded the files since `begin`. Returns why they may have loaded different ones, or ""."""
        now = self._states()  # with files that the ranks have downloaded
        if differing := [name for name, state in self._before.items() if now.get(name) != state]:
            return f"{differing[0]} changed while ranks loaded it"
        self._loaded, self._digests = now, {}
        self._reader = threading.Thread(target=self._read_all, args=(dict(now), self._digests), daemon=True)
        self._reader.start()
        return ""

    def compare(self) -> Future[str]:
        """Compares the files in a thread, for a rank that has loaded them since `begin`.

        Returns:
            Which file has changed since the serving ranks loaded it, as a part of a sentence; "" if none has.
        """
        found: Future[str] = Future()
        threading.Thread(target=lambda: found.set_result(self._changed()), daemon=True).start()
        return found

    def touched(self) -> str:
        """Returns which file has another state than when ranks loaded it, as a part of a sentence; "" if none has."""
        now = self._states()
        differing = [name for name in sorted({*now, *self._loaded}) if now.get(name) != self._loaded.get(name)]
        if not self._loaded:
            return "the model's files were not found, and so cannot be compared with those of the serving ranks"
        return f"{differing[0]} has changed since the serving ranks loaded it" if differing else ""

    def _changed(self) -> str:
        now = self._states()
        if now != self._before:
            return "the model's files changed while the rank loaded them"
        for name in sorted(now.keys() & self._digests.keys()):
            if now[name] != self._loaded[name] and _digest(Path(name)) == self._digests[name]:
                self._loaded[name] = now[name]
        return self.touched()

    def _states(self) -> dict[str, State]:
        """Returns the state of each file by its path; empty if there is no folder yet."""
        found = {}
        with suppress(BadInput, OSError):
            for path in self._find().iterdir():
                if path.suffix in SUFFIXES and path.is_file():
                    found[str(path)] = _state(path)
        return found

    @staticmethod
    def _read_all(states: dict[str, State], digests: dict[str, str]) -> None:
        """Takes the digest of each file that is still in its state, into `digests`."""
        with suppress(OSError):  # of this thread alone
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        for name, state in states.items():
            digest = _digest(Path(name))
            with suppress(OSError):
                if digest and _state(Path(name)) == state:
                    digests[name] = digest


def _state(path: Path) -> State:
    found = path.stat()
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev


def _digest(path: Path) -> str:
    """Returns the sha256 of a file; empty if it cannot be read."""
    with suppress(OSError), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
    return ""
