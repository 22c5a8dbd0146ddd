"""Training data: samples of equal length, and the global batch of samples of each step."""

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np

from aurora.errors import BadInput
from aurora.models.loading import load_config, load_tokenizer
from aurora.models.prompts import Corpus
from aurora.types.arrays import IntArray


def read_samples(model: str | Path, files: Sequence[str | Path], length: int) -> IntArray:
    """Returns the text of files as samples of `length` tokens. Shorter rows are concatenated; an incomplete rest is dropped.

    Args:
        model: the model's folder; its tokenizer's end-of-text token is appended to each row that is shorter than a sample.
        files: as in `aurora.models.prompts.Corpus`.
        length: number of tokens of a sample.

    Returns:
        (N, T) int64, the token ids of each sample.

    Raises:
        BadInput: if the files cannot be read, or hold no sample.
    """
    config, tokenizer = load_config(model), load_tokenizer(model)
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and length > longest:
        raise BadInput(f"`length`: {Path(model).name} takes at most {longest} tokens, found {length}")
    end, ids = tokenizer.eos_token_id, list[int]()
    for row in Corpus(tokenizer, config.vocab_size, files, length):
        ids += row if len(row) == length or end is None else [*row, end]
    if len(ids) < length:
        raise BadInput(f"{', '.join(map(str, files))}: expected at least one sample of {length} tokens, found none")
    return np.array(ids[: len(ids) // length * length], dtype=np.int64).reshape(-1, length)


def samples_digest(samples_NT: IntArray) -> str:
    """Returns a digest of all samples, samples_NT (N, T) int64 token ids, which identifies the training text."""
    return hashlib.sha256(samples_NT.tobytes()).hexdigest()[:16]


class GlobalBatches:
    """Selects the samples of each step's global batch, independently of the number of ranks that share it.

    Steps take the samples in a random sequence; after each pass over all samples, a new sequence is drawn.

    Args:
        samples_NT: (N, T) int64, the token ids of each sample.
        batch: number of samples in a global batch.
        seed: seed of the random sequences.
    """

    def __init__(self, samples_NT: IntArray, batch: int, seed: int) -> None:
        self._samples_NT, self.batch, self._seed = samples_NT, batch, seed
        self._epoch = lru_cache(maxsize=2)(self._drawn)

    @property
    def tokens(self) -> int:
        """Number of tokens of a global batch."""
        return self.batch * len(self._samples_NT[0])

    @property
    def predicted(self) -> int:
        """Number of tokens of a global batch that the model predicts: all but the first token of each sample."""
        return self.batch * (len(self._samples_NT[0]) - 1)

    def of(self, step: int, rank: int = 0, ranks: int = 1) -> IntArray:
        """Returns (B, T) int64, the part of a step's global batch that rank `rank` of `ranks` computes."""
        first, samples = step * self.batch, len(self._samples_NT)
        at_B = np.array_split(np.arange(first, first + self.batch), ranks)[rank]
        return self._samples_NT[[self._epoch(at // samples)[at % samples] for at in at_B.tolist()]]

    def _drawn(self, epoch: int) -> IntArray:
        """(N,) int64: the sequence of the samples in one pass over all of them."""
        return np.random.default_rng((self._seed, epoch)).permutation(len(self._samples_NT))
