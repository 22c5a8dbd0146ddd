"""Text files into prompts of token ids."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aurora.io.prompts import load_prompts


def read_prompts(tokenizer: Any, file: str | Path) -> list[list[int]]:
    """Read prompts from a file and tokenize them.

    Args:
        tokenizer: a transformers tokenizer; it adds no special tokens.
        file: one prompt a line, or a .jsonl file.

    Returns:
        Token ids, prompt by prompt.

    Raises:
        BadInput: if there is no prompt, or a line is not of the format.
    """
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in load_prompts(file)]


def deal(prompts: Sequence[list[int]], ranks: int) -> list[list[int]]:
    """Which prompts each rank serves, by index: dealt out one after the other."""
    return [list(range(rank, len(prompts), ranks)) for rank in range(ranks)]
