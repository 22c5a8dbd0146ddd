"""Journals of answers (JSON lines, schema 2): files with the tokens that a run has generated so far, to resume it from.

The first line has `format`, `schema`, and values that identify the run (`about` of JournalFile). Each other line has new tokens
of one answer: the numbers of its `model` and `prompt`, `at` (number of tokens of the answer before these), `tokens`, and
`finished`, true if these are the answer's last. Every line ends with its `checksum`, a CRC-32 of it and of all lines before.
Lines are only appended. A reader stops at the first line that is damaged or cut off, as by a full disk or a power cut. Schema 1
has no checksums.
"""

import errno
import json
import logging
import os
import threading
import zlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aurora.errors import BadInput
from aurora.io.files import check_schema, naming, open_locked, schema_of

FORMAT = "aurora journal"
UNCHECKED = 1  # schema without checksums and without what later heads have
SYNC_S = 0.5  # between two writes
LOG = logging.getLogger("aurora.run")


@dataclass
class JournalledAnswer:
    """A model's answer to one prompt, complete or not, as read from a journal.

    Args:
        tokens: the answer's token ids so far.
        finished: whether the answer is complete.
    """

    tokens: list[int] = field(default_factory=list)
    finished: bool = False


JournalledAnswers = dict[tuple[int, int], JournalledAnswer]  # by the numbers of model and prompt


def load_journal(path: Path) -> JournalledAnswers:
    """Reads the answers in a journal. Raises BadInput if the file cannot be read or is not a journal."""
    return _read(path, {})[1]


class JournalFile:
    """Appends answers to a journal, and reads the answers of an interrupted run.

    A background thread writes new tokens every SYNC_S seconds, so serving never waits for the disk. If writing fails, the run
    goes on: it warns once, keeps the tokens in memory, and tries again.

    Args:
        path: the file.
        about: JSON values by name that identify the run; a resumed file must have the same. Two of them limit the answers that
            the file may have: `answers`, for each model [number of prompts, number of token ids, id that ends an answer or
            None], and `max_new_tokens`, the maximum tokens of an answer.
        resume: True: go on from the file if it exists. False: the file must not exist.

    Attributes:
        resumed: the answers that the file had when it was opened.

    Raises:
        BadInput: if the file cannot be read or written, another process has it open, it exists without `resume`, its `about`
            differs, or it has answers that this run cannot have given.
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
            file_head, self.resumed, whole_bytes, self._checksum = _read(path, about)
            earlier = file_head["schema"] == UNCHECKED
            for name, value in about.items():
                if file_head.get(name, value if earlier else None) != value:
                    raise BadInput(f"{path}: expected the journal of this run, found one of a run with other {name}")
            if earlier:
                LOG.warning("%s: an earlier version wrote it, without checksums: what it has is taken as it is", path)
            if damaged := path.stat().st_size - whole_bytes:
                LOG.warning("%s: its last %d bytes are damaged or cut off: left out, and produced anew", path, damaged)
            self._file.truncate(whole_bytes)
            undone.pop_all()
        self._path, self._empty, self._failed = path, not self.resumed, False
        self._new: dict[tuple[int, int], tuple[int, JournalledAnswer]] = {}
        self._unwritten = b""
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="aurora-journal")
        self._thread.start()

    def add(self, model: int, prompt: int, at: int, tokens: Sequence[int], finished: bool) -> None:
        """Adds new tokens to an answer that has `at` tokens so far; `finished`: whether these are its last tokens."""
        with self._lock:
            _, answer = self._new.setdefault((model, prompt), (at, JournalledAnswer()))
            answer.tokens += tokens
            answer.finished |= finished

    def close(self) -> None:
        """Writes the tokens that are not yet on disk and closes the file; removes a file without answers."""
        self._closed.set()
        self._thread.join()
        self._write()
        if self._empty:
            self._path.unlink(missing_ok=True)  # while it is locked: afterwards it may be another run's
        self._file.close()

    def _begin(self, path: Path, head: Mapping[str, Any]) -> None:
        """Writes the first line."""
        try:
            line, _ = _sealed(head, 0)
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
            sealed, self._checksum = _sealed(line, self._checksum)
            self._unwritten += sealed
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


def _sealed(row: Mapping[str, Any], before: int) -> tuple[bytes, int]:
    """A row as a line, and its checksum, which that of the line before goes into."""
    text = json.dumps(row, separators=(",", ":")).encode()
    checksum = zlib.crc32(text, before)
    return b'%s,"checksum":%d}\n' % (text[:-1], checksum), checksum


def _opened(line: bytes, before: int) -> tuple[bool, int]:
    """Returns whether the line is as `_sealed` made it, and its checksum."""
    text, _, stated = line.rpartition(b',"checksum":')
    checksum = zlib.crc32(text + b"}", before)
    return stated == b"%d}" % checksum, checksum


def _read(path: Path, about: Mapping[str, Any]) -> tuple[dict[str, Any], JournalledAnswers, int, int]:
    """A journal's first line, its answers, the bytes of its whole lines, and the last one's checksum."""
    with naming(path):
        first, *lines = path.read_bytes().split(b"\n")[:-1] or [b""]
    answers: JournalledAnswers = {}
    try:
        head = json.loads(first)
        if head["format"] != FORMAT:
            raise ValueError(f"format {head['format']!r}")
        if head["schema"] != UNCHECKED:
            check_schema(path, head, FORMAT)
        intact, checksum = _opened(first, 0)
        if not intact and head["schema"] != UNCHECKED:
            raise ValueError("its first line is damaged")
        whole_bytes = len(first) + 1
        for line in lines:
            intact, after = _opened(line, checksum)
            if not intact and head["schema"] != UNCHECKED:
                break
            _take(answers, json.loads(line), head | about)
            whole_bytes, checksum = whole_bytes + len(line) + 1, after
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise BadInput(f"{path}: expected the journal of an interrupted run: {error}") from None
    return head, answers, whole_bytes, checksum


def _take(answers: JournalledAnswers, row: Mapping[str, Any], about: Mapping[str, Any]) -> None:
    """Adds a line to the answers. Raises ValueError if no run `about` this writes it."""
    model, prompt, at, tokens, finished = (row[name] for name in ("model", "prompt", "at", "tokens", "finished"))
    answer = answers.setdefault((model, prompt), JournalledAnswer())
    if any(type(number) is not int or number < 0 for number in (model, prompt, at, *tokens)) or type(finished) is not bool:
        raise ValueError("numbers that are none")
    if at != len(answer.tokens) or answer.finished:
        raise ValueError(f"tokens at {at} of an answer of {len(answer.tokens)}")
    answer.tokens, answer.finished = answer.tokens + tokens, finished
    if "answers" in about:
        prompts, vocabulary, end = about["answers"][model]
        complete = len(answer.tokens) == about["max_new_tokens"] or end in tokens
        fits = prompt < prompts and max(tokens, default=0) < vocabulary and len(answer.tokens) <= about["max_new_tokens"]
        if not fits or finished != complete or end in tokens[:-1]:
            raise ValueError(
                f"answer {prompt} of model {model} is none of {prompts} of at most {about['max_new_tokens']} tokens"
            )
