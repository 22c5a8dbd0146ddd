"""Text files into prompts of token ids."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aurora.errors import BadInput
from aurora.io import read_text


def read_prompts(tokenizer: Any, file: str | Path) -> list[list[int]]:
    """One prompt a line, blank lines skipped; in a .jsonl file the `prompt` field of each line's object.

    Raises BadInput when there is none, or for a line that is no such object.
    """
    file = Path(file)
    numbered = [(number, line) for number, line in enumerate(read_text(file).split("\n"), 1) if line.strip()]
    if not numbered:
        raise BadInput(f"{file}: expected a prompt on each line, found none")
    texts = [_prompt_field(file, *row) if file.suffix == ".jsonl" else row[1] for row in numbered]
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


def _prompt_field(file: Path, number: int, line: str) -> str:
    try:
        found = json.loads(line)["prompt"]
    except (ValueError, KeyError, TypeError, RecursionError):
        found = None
    if not isinstance(found, str) or not found:
        raise BadInput(f'{file}, line {number}: expected {{"prompt": "text"}}, found {line[:60]!r}')
    return found


def deal(prompts: Sequence[list[int]], ranks: int) -> list[list[int]]:
    """Which prompts each rank serves, by index: dealt out one after the other."""
    return [list(range(rank, len(prompts), ranks)) for rank in range(ranks)]
