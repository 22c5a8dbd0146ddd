"""Prompts as token ids: a corpus for profiling, read block by block, and files of prompts to serve."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from aurora.errors import BadInput
from aurora.io.files import naming, open_text
from aurora.io.prompts import load_prompts, load_token_ids, read_corpus_row

BLOCK_CHARS = 1 << 20  # text that is tokenized at a time
MAX_LINE_CHARS = 1 << 26


class Corpus:
    """Iterable over the prompts of several files, in sequence; holds only one block of text in memory at a time.

    Iterating yields the token ids of each prompt, at most `length` of them:

    - .jsonl: one prompt per line, in any form of `aurora.io.prompts.ROW_FIELDS`; longer prompts are truncated
    - .npy: one prompt of token ids per row, longer prompts are truncated; a one-dimensional array is read like text
    - other files: UTF-8 text, cut into prompts of exactly `length` tokens; a shorter rest at the end is dropped

    Args:
        tokenizer: the model's tokenizer.
        vocabulary: vocabulary size; token ids in files must be below it.
        files: the files, in sequence.
        length: largest number of tokens of a prompt.

    Attributes:
        read_bytes: number of bytes that iterating has read so far.
        size_bytes: total size of all files.

    Raises:
        BadInput: if a file does not exist; while iterating, if a file cannot be read.
    """

    def __init__(self, tokenizer: Any, vocabulary: int, files: Sequence[str | Path], length: int) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._files = [Path(file) for file in files]
        self._length = length
        self.read_bytes = 0
        for file in self._files:
            if not file.is_file():
                raise BadInput(f"{file}: " + ("not a regular file" if file.exists() else "no such file"))
        self.size_bytes = sum(file.stat().st_size for file in self._files)

    def __iter__(self) -> Iterator[list[int]]:
        before = 0
        for file in self._files:
            self.read_bytes = before
            with naming(file):
                if file.suffix == ".npy":
                    yield from self._ids(file)
                else:
                    with open_text(file) as text:
                        yield from self._lines(file, text, before) if file.suffix == ".jsonl" else self._text(text, before)
            before += file.stat().st_size
        self.read_bytes = self.size_bytes

    def _text(self, text: IO[str], before: int) -> Iterator[list[int]]:
        """Prompts of exactly `length` tokens from a text file; `before` is the bytes of the files before it."""
        rest, ids = "", list[int]()
        while block := text.read(BLOCK_CHARS):
            rest += block
            self.read_bytes = before + text.buffer.tell()  # type: ignore[attr-defined]
            whole = len(rest) if len(block) < BLOCK_CHARS else rest.rfind("\n") + 1 or len(rest)
            ids += self._encoded(rest[:whole])
            rest = rest[whole:]
            yield from _runs(ids, self._length)
            ids = ids[len(ids) // self._length * self._length :]
        yield from _runs(ids + self._encoded(rest), self._length)

    def _lines(self, file: Path, text: IO[str], before: int) -> Iterator[list[int]]:
        """A prompt for each line of a .jsonl file."""
        number = 0
        while line := text.readline(MAX_LINE_CHARS):
            number += 1
            self.read_bytes = before + text.buffer.tell()  # type: ignore[attr-defined]
            if len(line) == MAX_LINE_CHARS:
                raise BadInput(f"{file}, line {number}: expected at most {MAX_LINE_CHARS} characters in a line")
            if line.strip() and (ids := self._row(file, number, line)):
                yield ids[: self._length]

    def _row(self, file: Path, number: int, line: str) -> list[int]:
        """The token ids of one line of a .jsonl file."""
        match read_corpus_row(file, number, line):
            case str(text):
                return self._encoded(text)
            case list(messages):
                return self._encoded(self._chat(file, number, messages))
            case ids:
                return self._checked(f"{file}, line {number}", ids)

    def _chat(self, file: Path, number: int, messages: list[dict[str, str]]) -> str:
        """A chat as text, by the tokenizer's chat template; without one, a line for each message."""
        if not getattr(self._tokenizer, "chat_template", None):
            return "".join(f"{message['role']}: {message['content']}\n" for message in messages)
        try:
            return str(self._tokenizer.apply_chat_template(messages, tokenize=False))
        except Exception as error:  # templates are programs and raise anything
            raise BadInput(f"{file}, line {number}: the tokenizer's chat template does not take it: {error}") from None

    def _ids(self, file: Path) -> Iterator[list[int]]:
        """Prompts from an array of token ids."""
        ids = load_token_ids(file)
        runs = range(0, len(ids) - self._length + 1, self._length) if ids.ndim == 1 else range(len(ids))
        for at in runs:
            row = ids[at : at + self._length] if ids.ndim == 1 else ids[at, : self._length]
            if len(row):
                yield self._checked(str(file), row)

    def _checked(self, where: str, ids: Any) -> list[int]:
        """Token ids as integers, or BadInput if one is not in the vocabulary."""
        if len(ids) and not 0 <= min(ids) <= max(ids) < self._vocabulary:
            raise BadInput(f"{where}: expected token ids from 0 to {self._vocabulary - 1}, found {min(ids)} to {max(ids)}")
        return [int(token) for token in ids]

    def _encoded(self, text: str) -> list[int]:
        """The token ids of a text, without special tokens."""
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []


def _runs(ids: list[int], length: int) -> Iterator[list[int]]:
    """Consecutive pieces of exactly `length` ids; a shorter rest is left out."""
    return (ids[start : start + length] for start in range(0, len(ids) - length + 1, length))


def read_prompts(tokenizer: Any, file: str | Path) -> list[list[int]]:
    """Returns a file's prompts (lines of text, or .jsonl) as token ids without special tokens; BadInput if it has none."""
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in load_prompts(file)]


def deal(prompts: Sequence[list[int]], ranks: int) -> list[list[int]]:
    """Returns, for each rank, the indices of the prompts that it serves, assigned round robin."""
    return [list(range(rank, len(prompts), ranks)) for rank in range(ranks)]
