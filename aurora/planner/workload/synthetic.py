"""Synthetic profiles for planning before there is traffic: routing drawn from a named skew, compute times by arithmetic."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from aurora.errors import BadInput
from aurora.planner.workload.model_config import Shape
from aurora.types import GpuKind, Profile, SyntheticOptions, TokenRouting
from aurora.types.arrays import FloatArray, IntArray

BLOCK = 1 << 16  # tokens drawn at a time
MOST_CELLS = 1 << 28  # counts of a profile: 2 GB
MOST_DRAWS = 10**11  # tokens x layers x experts: an hour
MOST_CHOICES = 1 << 30  # experts chosen by tokens that token-level routing keeps in memory


def synthetic_profile(
    skew: str, config: Mapping[str, Any], options: SyntheticOptions = SyntheticOptions(), kinds: Sequence[GpuKind] = ()
) -> Profile:
    """Makes a profile of synthetic traffic; see `aurora.synthetic_profile`.

    `options.correlation` is the probability that a token draws one random number for both experts of a pair; pairs are shuffled
    for every layer.
    """
    exponent = _exponent(skew)
    shape = Shape.of(config)
    layers, experts, top_k = shape.layers, shape.experts, shape.top_k
    rng = np.random.default_rng(options.seed)
    tokens = options.windows * options.sources * options.window_tokens
    if (cells := options.windows * layers * options.sources * experts) > MOST_CELLS or tokens * layers * experts > MOST_DRAWS:
        raise BadInput(
            f"`window_tokens`: expected at most {MOST_CELLS} counts and {MOST_DRAWS:.0e} draws for this model, found {cells} "
            f"and {tokens * layers * experts:.2g}"
        )
    if options.token_level and tokens * layers * top_k > MOST_CHOICES:
        raise BadInput(f"`window_tokens`: expected at most {MOST_CHOICES} choices, found {tokens * layers * top_k}")
    counts_TLSE = np.zeros((options.windows, layers, options.sources, experts), dtype=np.int64)
    kept_ULK = np.zeros((tokens if options.token_level else 0, layers, top_k), dtype=np.uint8 if experts <= 256 else np.uint16)
    for layer in range(layers):
        share_E = rng.permutation((1.0 + np.arange(experts)) ** -exponent)
        pair_E = rng.permutation(experts) // 2 if options.correlation else np.arange(experts)
        done = 0
        for window in range(options.windows):
            for source in range(options.sources):
                for chosen_UK in _draw(share_E, pair_E, options.correlation, options.window_tokens, top_k, rng):
                    counts_TLSE[window, layer, source] += np.bincount(chosen_UK.ravel(), minlength=experts)
                    kept_ULK[done : done + len(chosen_UK), layer] = chosen_UK[: len(kept_ULK)]
                    done += len(chosen_UK)
    source_U = np.tile(np.repeat(np.arange(options.sources), options.window_tokens), options.windows)
    window_U = np.repeat(np.arange(options.windows), options.sources * options.window_tokens)
    return shape.profile(
        counts_TLSE,
        {
            "tool": "aurora synthetic",
            "traffic": f"{skew}, pairs of correlation {options.correlation:g}, seed {options.seed}, not measured",
        },
        TokenRouting(kept_ULK, source_U, window_U) if options.token_level else None,
        kinds=kinds,
    )


def _draw(
    share_E: FloatArray, pair_E: IntArray, correlation: float, tokens: int, top_k: int, rng: np.random.Generator
) -> Iterator[IntArray]:
    """Yields (U, K) distinct experts of each token in blocks of U, `tokens` in all (Gumbel top-k, without replacement).

    With probability `correlation` a token draws one random number for both experts of a pair, pair_E (E,), instead of two.
    """
    for done in range(0, tokens, BLOCK):
        size = min(BLOCK, tokens - done)
        luck_UE = rng.gumbel(size=(size, len(share_E)))
        if correlation:
            pairs = int(pair_E.max()) + 1
            shared_UE = (rng.random((size, pairs)) < correlation)[:, pair_E]
            luck_UE = np.where(shared_UE, rng.gumbel(size=(size, pairs))[:, pair_E], luck_UE)
        yield np.argpartition(-(np.log(share_E) + luck_UE), top_k - 1, axis=1)[:, :top_k]


def _exponent(skew: str) -> float:
    """The exponent that `skew` names."""
    name, _, value = skew.partition(":")
    try:
        exponent = {"uniform": 0.0}[name] if name != "zipf" else float(value)
    except (KeyError, ValueError):
        raise BadInput(f"`skew`: expected uniform or zipf:EXPONENT, found {skew!r}") from None
    if not 0 <= exponent < 100:
        raise BadInput(f"`skew`: expected an exponent of zero or more, found {value}")
    return exponent
