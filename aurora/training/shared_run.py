"""Properties that all hosts of a training run share: aurora's version, the model, options, text, and the run's folder."""

import hashlib
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from io import FileIO
from pathlib import Path
from typing import Any

from aurora.elastic.host_agreement import this_version
from aurora.errors import BadInput
from aurora.io.files import open_locked
from aurora.models.hub import model_digest
from aurora.types import TrainOptions
from aurora.types.arrays import IntArray
from aurora.types.run_options import OF_EACH_HOST

MARK = ".run"  # in a run's folder while the run writes there


@contextmanager
def sole_run(output: Path) -> Iterator[str]:
    """Context manager in which no other run writes to a folder; yields a mark that a file there has meanwhile.

    Raises:
        BadInput: if another run does, or the folder cannot be written.
    """
    mark, path = secrets.token_hex(16), output / MARK
    with open_locked(path) as file:
        try:
            _write(file, mark, path)
            yield mark
        finally:
            path.unlink(missing_ok=True)


def _write(file: FileIO, mark: str, path: Path) -> None:
    try:
        file.truncate(0)
        file.write(mark.encode())
    except OSError as error:
        raise BadInput(f"{path}: cannot be written: {error.strerror}") from None


def has_mark(output: Path, mark: str) -> bool:
    """Returns whether a folder is the one in which `sole_run` has left a mark."""
    try:
        return (output / MARK).read_text() == mark
    except (OSError, ValueError):
        return False


def shared_by_hosts(path: str) -> dict[str, str]:
    """Returns what a host has to have as the leader has it, by what it is in words: aurora's version and the model's digest.

    Args:
        path: the model's folder, or its name in the local hub cache.
    """
    return this_version() | {"`model`": model_digest(path)[:16]}


def leaders_options(options: TrainOptions) -> dict[str, Any]:
    """Returns the options by name that are those of the leader on all hosts."""
    return {name: value for name, value in asdict(options).items() if name not in OF_EACH_HOST}


def samples_digest(samples_NT: IntArray) -> str:
    """Returns the digest of all samples, samples_NT (N, T) int64 token ids, which has to be the same on all hosts."""
    return hashlib.sha256(samples_NT.tobytes()).hexdigest()[:16]
