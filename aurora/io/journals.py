"""Journals of answers (JSON lines, schema 1): tokens that a run has produced, on disk while it serves.

The first line has `format`, `schema`, and what the run is of. Each other line has new tokens of one answer: numbers of `model`
and `prompt`, `at` (the number of tokens before them), `tokens`, and whether the answer is `finished` by them. Lines are only
appended; a last line that is cut off, as by a full disk or a power cut, is left out.
"""

import errno
import json
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aurora.errors import BadInput
from aurora.io.files import naming, open_locked, schema_of

FORMAT = "aurora journal"
SYNC_S = 0.5  # between two writes
LOG = logging.getLogger("aurora.run")


@dataclass
class JournalledAnswer:
    """An answer in a journal.

    Args:
        tokens: its token ids so far.
        finished: whether it is complete.
    """

    tokens: list[int] = field(default_factory=list)
    finished: bool = False


JournalledAnswers = dict[tuple[int, int], JournalledAnswer]  # by the numbers of model and prompt


def load_journal(path: Path) -> JournalledAnswers:
    """Reads the answers of a journal. Raises BadInput if the file cannot be read or is no journal."""
    return _read(path)[1]


class JournalFile:
    """Appends answers to a journal, and reads those of an earlier run that was interrupted.

    A thread writes every SYNC_S seconds what is new, so that nobody waits for the disk. If the file cannot be written, the run
    goes on: a warning says so once, and what is not written is written when it can be.

    Args:
        path: the file.
        about: what tells the run from others, as JSON values by name.
        resume: go on from the file if it is there; otherwise it must not be.

    Attributes:
        resumed: the answers that the file had.

    Raises:
        BadInput: if the file cannot be used, is in use, is there without `resume`, or is of a run with another `about`.
    """

    def __init__(self, path: Path, about: Mapping[str, Any], resume: bool) -> None:
        head = {"format": FORMAT, "schema": schema_of(FORMAT), **about}
        with ExitStack() as undone:
            self._file = undone.enter_context(open_locked(path))
            if path.stat().st_size == 0:
                undone.callback(path.unlink)
                self._begin(path, head)
            elif not resume:
                raise BadInput(f"{path}: an interrupted run left it: expected `resume`, which goes on from it, or no such file")
            found, self.resumed, whole_bytes = _read(path)
            for name, value in head.items():
                if found.get(name) != value:
                    raise BadInput(f"{path}: expected the journal of this run, found one of a run with other {name}")
            self._file.truncate(whole_bytes)
            undone.pop_all()
        self._path, self._empty, self._failed = path, not self.resumed, False
        self._new: dict[tuple[int, int], tuple[int, JournalledAnswer]] = {}
        self._unwritten = b""
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="aurora-journal")
        self._thread.start()

    def add(self, model: int, prompt: int, at: int, tokens: Sequence[int], finished: bool) -> None:
        """Adds new tokens of an answer, which come after its first `at`; finished: the answer is complete with them."""
        with self._lock:
            _, answer = self._new.setdefault((model, prompt), (at, JournalledAnswer()))
            answer.tokens += tokens
            answer.finished |= finished

    def close(self) -> None:
        """Writes what is new and closes the file; one without answers is removed."""
        self._closed.set()
        self._thread.join()
        self._write()
        if self._empty:
            self._path.unlink(missing_ok=True)  # while it is locked: afterwards it may be another run's
        self._file.close()

    def _begin(self, path: Path, head: Mapping[str, Any]) -> None:
        """Writes the first line."""
        try:
            line = json.dumps(head).encode() + b"\n"
            if self._file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise BadInput(f"{path}: cannot be written: {error.strerror}") from None

    def _run(self) -> None:
        while not self._closed.wait(SYNC_S):
            self._write()

    def _write(self) -> None:
        """Writes what is new, and waits until it is on the disk."""
        with self._lock:
            new, self._new = self._new, {}
        for (model, prompt), (at, answer) in new.items():
            line = {"model": model, "prompt": prompt, "at": at, "tokens": answer.tokens, "finished": answer.finished}
            self._unwritten += json.dumps(line, separators=(",", ":")).encode() + b"\n"
        if not self._unwritten:
            return
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
            self._empty = False
            os.fsync(self._file.fileno())
        except OSError as error:
            if not self._failed:
                LOG.warning("%s cannot be written: %s; serving goes on, and it is tried again", self._path, error.strerror)
            self._failed = True


def _read(path: Path) -> tuple[dict[str, Any], JournalledAnswers, int]:
    """A journal's first line, its answers, and the bytes of its whole lines."""
    with naming(path):
        content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    answers: JournalledAnswers = {}
    try:
        head, *lines = map(json.loads, whole.splitlines())
        if head["format"] != FORMAT:
            raise ValueError(f"format {head['format']!r}")
        for line in lines:
            answer = answers.setdefault((int(line["model"]), int(line["prompt"])), JournalledAnswer())
            if line["at"] != len(answer.tokens) or answer.finished:
                raise ValueError(f"tokens at {line['at']} of an answer of {len(answer.tokens)}")
            answer.tokens += map(int, line["tokens"])
            answer.finished = bool(line["finished"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise BadInput(f"{path}: expected the journal of an interrupted run: {error}") from None
    return head, answers, len(whole)
