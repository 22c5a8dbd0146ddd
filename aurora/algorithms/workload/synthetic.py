"""Synthetic profiles for planning before traffic is recorded: routing is drawn by a named skew, compute times are computed."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aurora.algorithms.layers_in_threads import map_layers
from aurora.algorithms.workload import synthetic_core as core
from aurora.algorithms.workload.attention import known_kv_bytes
from aurora.algorithms.workload.model_config import Shape
from aurora.errors import BadInput
from aurora.types import GpuKind, Profile, SyntheticOptions, TokenRouting
from aurora.types.arrays import FloatArray, IntArray
from aurora.types.read_numbers import finite_number

BUCKETS = 1 << 12  # parts of 0 to 1, a power of two
CELLS = 1 << 14  # random numbers that are drawn at once: they stay in a core's cache
SYNTHETIC_TOOL = "aurora synthetic"  # in the provenance of drawn traffic
MOST_CELLS = 1 << 28  # counts of a profile: 2 GB
MOST_DRAWS = 10**11  # tokens x layers x experts: a quarter of an hour
MOST_CHOICES = 1 << 30  # experts chosen by tokens that token-level routing keeps in memory


def draw_profile(
    skew: str, config: Mapping[str, Any], options: SyntheticOptions = SyntheticOptions(), kinds: Sequence[GpuKind] = ()
) -> Profile:
    """Draws a profile of a model with the given config; see `aurora.synthetic_profile`.

    Experts form pairs, which are drawn anew for every layer. `options.correlation` is the probability that a token uses one
    random number for both experts of a pair. If the config has group-limited routing, a token's groups are those with the
    highest-ranked experts.
    """
    exponent = _exponent(skew)
    shape = Shape.of(config)
    layers, experts, top_k = shape.layers, shape.experts, shape.top_k
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

    def draw_layer(layer: int) -> None:
        rng = np.random.default_rng((options.seed, layer))
        rarity_E = rng.permutation((1.0 + np.arange(experts)) ** exponent)
        counts_TSE, kept_UK, groups = counts_TLSE[:, layer], kept_ULK[:, layer], (shape.groups, shape.token_groups)
        draw(rarity_E, options.correlation, options.window_tokens, counts_TSE, kept_UK, top_k, rng, groups)

    map_layers(draw_layer, layers, "drawing layers")
    source_U = np.tile(np.repeat(np.arange(options.sources), options.window_tokens), options.windows)
    window_U = np.repeat(np.arange(options.windows), options.sources * options.window_tokens)
    return shape.profile(
        counts_TLSE,
        {
            "tool": SYNTHETIC_TOOL,
            "traffic": f"{skew}, pairs of correlation {options.correlation:g}, seed {options.seed}, not measured",
        },
        TokenRouting(kept_ULK, source_U, window_U) if options.token_level else None,
        kinds=kinds,
        kv_bytes=known_kv_bytes(config),
    )


def draw(
    rarity_E: FloatArray,
    correlation: float,
    tokens: int,
    counts_TSE: IntArray,
    kept_UK: NDArray[np.unsignedinteger],
    top_k: int,
    rng: np.random.Generator,
    groups: tuple[int, int] = (1, 1),
) -> None:
    """Draws the experts of every token of a layer, one expert after the other without replacement.

    Each next expert is drawn with a probability in proportion to 1 / rarity. The code runs an equivalent race: each expert
    draws an exponential time with its rarity as the mean, and the top_k fastest are chosen (in logarithms, Gumbel top-k). The
    two experts of a pair share one random number with probability `correlation`; pairs are drawn too.

    Args:
        rarity_E: (E,) float64 above zero; an expert of rarity 2 is chosen half as often as one of rarity 1.
        correlation: probability from 0 to 1, see above.
        tokens: tokens of each source rank in a window.
        counts_TSE: (T, S, E) int64, to which the choices are added.
        kept_UK: (T * S * tokens, K), which receives every token's experts; (0, K) to keep none.
        top_k: experts of a token, K.
        rng: random generator.
        groups: (n, m) for group-limited routing: of n groups of equally many consecutive experts, a token chooses from the m
            groups whose fastest experts are the fastest.

    Source:
        Yellott 1977; Efraimidis & Spirakis 2006; group-limited routing: DeepSeek-V2 (arXiv:2405.04434) §2.2.2.
    """
    experts, all_tokens = len(rarity_E), tokens * counts_TSE[..., 0].size
    share_E = 1.0 / rarity_E
    share_E /= share_E.sum()
    limited, token_groups = groups if groups[1] < groups[0] else (1, 1)
    left_J = np.sort(share_E.reshape(limited, -1))[:, :-top_k].sum(axis=1)
    remaining = np.sort(left_J)[:token_groups].sum()  # at least, when a token draws its last expert
    if correlation or remaining * experts < 2 * top_k:
        blocks = _race(rarity_E, correlation, all_tokens, top_k, rng, limited, token_groups)
    else:
        blocks = _reject(share_E, all_tokens, top_k, rng, limited, token_groups)
    counted_XE, first = np.zeros((counts_TSE[..., 0].size, experts), dtype=np.int64), 0
    for chosen_UK in blocks:
        last = first + len(chosen_UK)
        core.count(chosen_UK, first, tokens, counted_XE)
        if len(kept_UK):
            kept_UK[first:last] = chosen_UK
        first = last
    counts_TSE += counted_XE.reshape(counts_TSE.shape)


def _race(
    rarity_E: FloatArray, correlation: float, tokens: int, top_k: int, rng: np.random.Generator, groups: int, token_groups: int
) -> Iterator[IntArray]:
    """The race of `draw`: yields (U, K) the experts of the next tokens, the fastest first."""
    experts = len(rarity_E)
    paired_E = rng.permutation(experts)  # the first two, the next two, and so on
    place_E = np.argsort(paired_E)
    for first in range(0, tokens, block := max(1, CELLS // experts)):
        luck_UE = rng.standard_exponential((min(block, tokens - first), experts))
        if correlation:
            even_UP, odd_UP = luck_UE[:, : experts // 2 * 2 : 2], luck_UE[:, 1::2]
            np.copyto(odd_UP, even_UP, where=rng.random(odd_UP.shape) < correlation)
        time_UE = luck_UE[:, place_E] * rarity_E
        if groups > 1:
            time_UJE = time_UE.reshape(len(time_UE), groups, -1)
            first_UJ = time_UJE.min(axis=2)
            time_UJE[first_UJ > np.sort(first_UJ)[:, token_groups - 1, None]] = np.inf
        chosen_UK = np.argpartition(time_UE, top_k - 1)[:, :top_k]
        fastest_UK = np.argsort(np.take_along_axis(time_UE, chosen_UK, axis=1))
        yield np.take_along_axis(chosen_UK, fastest_UK, axis=1)


def _reject(
    share_E: FloatArray, tokens: int, top_k: int, rng: np.random.Generator, groups: int, token_groups: int
) -> Iterator[IntArray]:
    """Draws with replacement, and again whatever a token has chosen already; faster than `_race` while that is rare.

    Experts are drawn in the sequence of the race. So a token's groups are the first that it draws from, and it draws again when
    another comes. Yields as `_race` does.
    """
    upto_E = share_E.cumsum()
    upto_E[-1] = 1.0
    first_B = np.searchsorted(upto_E, np.arange(BUCKETS) / BUCKETS, side="right")
    group_E = np.arange(len(share_E)) * groups // len(share_E)
    chosen_UK, draws_D = np.empty((-(-CELLS // top_k), top_k), dtype=np.int64), np.empty(0)
    while tokens > 0:
        draws_D = np.concatenate([draws_D, rng.random(min(CELLS, 2 * top_k * tokens))])
        made, used = core.choose(draws_D, upto_E, first_B, group_E, token_groups, chosen_UK[:tokens])
        yield chosen_UK[:made]
        draws_D, tokens = draws_D[used:], tokens - made


def _exponent(skew: str) -> float:
    """The exponent that `skew` names."""
    name, _, value = skew.partition(":")
    try:
        exponent = {"uniform": 0.0}[name] if name != "zipf" else finite_number(value)
    except (KeyError, BadInput):
        raise BadInput(f"`skew`: expected uniform or zipf:EXPONENT, found {skew!r}") from None
    if not 0 <= exponent < 100:
        raise BadInput(f"`skew`: expected an exponent of zero or more and below 100, found {value}")
    return exponent
