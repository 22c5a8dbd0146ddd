"""Reads prompts and training corpora: text, JSON lines of prompts, chats or token ids (.jsonl), arrays of token ids (.npy)."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, TypedDict

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from aurora.errors import BadInput
from aurora.io.files import json_lines, json_value, load_npy, naming, numbered_lines, open_text
from aurora.io.schema import FileTable, StrictTable, converted
from aurora.types.options import LONGEST_S

ROW_FIELDS = '{"messages": [{"role": .., "content": ..}, ..]}, {"prompt": "text"}, {"text": "text"} or {"tokens": [id, ..]}'

BEGINNING = 1 << 20  # characters of a corpus that are checked before work begins


class Prompt(StrictTable):
    """A line of prompts.

    Attributes:
        prompt: the text.
        at_s: seconds at which it arrives.
    """

    prompt: Annotated[str, Meta(min_length=1)]
    at_s: Annotated[float, Meta(ge=0, le=LONGEST_S)] = 0.0


class ChatMessage(TypedDict):
    """A message of a chat."""

    role: str
    content: str


Messages = list[dict[str, str]]  # a chat: role and content of each message


class CorpusRow(FileTable):
    """A line of a corpus: one of ROW_FIELDS."""

    messages: list[ChatMessage] | None = None
    prompt: str | None = None
    text: str | None = None
    tokens: list[int] | None = None


def load_prompts(path: str | Path) -> list[str]:
    """Read prompts, one per line; blank lines are skipped.

    Args:
        path: a text file, or a .jsonl file whose lines are objects with a `prompt` field. A field `at_s`, the seconds at which
            the prompt arrives, is read by `load_arriving` only.

    Raises:
        BadInput: if there is no prompt, or a line is not such an object.
    """
    return [prompt for prompt, _ in load_arriving(path)]


def load_arriving(path: str | Path) -> list[tuple[str, float]]:
    """Read (prompt, arrival) pairs from a file in the formats of `load_prompts`.

    The arrival is the prompt's `at_s`, in seconds after serving begins; 0 if it has none.
    """
    path = Path(path)
    if not (numbered := numbered_lines(path)):
        raise BadInput(f"{path}: expected a prompt on each line, found none")
    if path.suffix != ".jsonl":
        return [(line, 0.0) for _, line in numbered]
    rows = (converted(row, Prompt, f"{path}: line {number}") for number, row in json_lines(path))
    return [(row.prompt, row.at_s) for row in rows]


def read_corpus_row(path: Path, number: int, line: str) -> Messages | str | NDArray[Any]:
    """Read one line of a .jsonl corpus: a chat's messages, a text, or token ids, as in ROW_FIELDS.

    Args:
        path: the file, for messages.
        number: the line's number, for messages.
        line: the line.

    Raises:
        BadInput: if the line is anything else.
    """
    with suppress(BadInput):
        value: Any = json_value(line)
        match converted(value, CorpusRow):
            case CorpusRow(messages=[*_]):
                chat: Messages = value["messages"]  # with what else a message has
                return chat
            case CorpusRow(prompt=str(text)) | CorpusRow(text=str(text)):
                return text
            case CorpusRow(tokens=[*ids]):
                return np.array(ids, dtype=object)  # of any size: the vocabulary is checked later
    raise BadInput(f"{path}: line {number}: expected {ROW_FIELDS}, found {line[:60].strip()!r}")


def check_corpus(paths: Sequence[str | Path]) -> None:
    """Check, from the first bytes of each file, that files can be a corpus.

    Args:
        paths: the files.

    Raises:
        BadInput: if a file is missing, is not a regular file, or does not begin like text, JSON lines or token ids.
    """
    for path in map(Path, paths):
        if path.suffix == ".npy":
            load_token_ids(path)
            continue
        with naming(path), open_text(path) as text:
            first = text.readline(BEGINNING)
        if "\0" in first:
            raise BadInput(f"{path}: expected text, found NUL characters")
        if path.suffix == ".jsonl" and first.strip() and len(first) < BEGINNING:
            read_corpus_row(path, 1, first)


def load_token_ids(path: Path) -> NDArray[Any]:
    """Open an .npy array of token ids as a memory map.

    Args:
        path: the file.

    Returns:
        Integers with one axis (a text) or two (one prompt per row).

    Raises:
        BadInput: if the file holds anything else.
    """
    ids = load_npy(path)
    if ids.dtype.kind not in "iu" or ids.ndim not in (1, 2):
        raise BadInput(f"{path}: expected token ids with one axis or two, found {ids.dtype} of shape {ids.shape}")
    return ids
