"""Synthetic profiles for planning before traffic is recorded: routing is drawn by a named skew, compute times are computed."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aurora.algorithms.layers_in_threads import map_layers
from aurora.algorithms.workload.attention import known_kv_bytes
from aurora.algorithms.workload.model_config import Shape
from aurora.errors import BadInput
from aurora.types import GpuKind, Profile, SyntheticOptions, TokenRouting
from aurora.types.arrays import FloatArray, IntArray
from aurora.types.compiled import njit
from aurora.types.read_numbers import finite_number

BUCKETS = 1 << 12  # parts of 0 to 1, a power of two
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
    counted_TSE, chosen_UK = np.zeros_like(counts_TSE, order="C"), np.zeros_like(kept_UK, order="C")
    share_E = 1.0 / rarity_E
    share_E /= share_E.sum()
    limited, token_groups = groups if groups[1] < groups[0] else (1, 1)
    left_J = np.sort(share_E.reshape(limited, -1))[:, :-top_k].sum(axis=1)
    remaining = np.sort(left_J)[:token_groups].sum()  # at least, when a token draws its last expert
    if correlation or remaining * len(share_E) < 2 * top_k:
        paired_E = rng.permutation(len(share_E))
        _race(rarity_E, paired_E, correlation, tokens, counted_TSE, chosen_UK, top_k, rng, *groups)
    else:
        upto_E = share_E.cumsum()
        upto_E[-1] = 1.0
        first_B = np.searchsorted(upto_E, np.arange(BUCKETS) / BUCKETS, side="right")
        _reject(upto_E, first_B, tokens, counted_TSE, chosen_UK, top_k, rng, limited, token_groups)
    counts_TSE += counted_TSE
    kept_UK[:] = chosen_UK


@njit(cache=True, nogil=True)
def _race(rarity_E, paired_E, correlation, tokens, counts_TSE, kept_UK, top_k, rng, groups, token_groups):
    """The race of `draw`. Experts are paired as they stand in paired_E (E,): the first two, the next two, and so on."""
    time_K, chosen_K = np.empty(top_k), np.empty(top_k, np.int64)
    time_E, first_J = np.empty(len(rarity_E)), np.empty(groups)
    token = 0
    luck = 0.0
    for t in range(counts_TSE.shape[0]):
        for s in range(counts_TSE.shape[1]):
            for _ in range(tokens):
                for number, expert in enumerate(paired_E):
                    if number % 2 == 0 or correlation == 0.0 or rng.random() >= correlation:
                        luck = rng.standard_exponential()
                    time_E[expert] = luck * rarity_E[expert]
                if token_groups < groups:
                    first_J[:] = np.inf
                    for expert in range(len(time_E)):
                        group = expert * groups // len(time_E)
                        first_J[group] = min(first_J[group], time_E[expert])
                    latest = np.sort(first_J)[token_groups - 1]
                    for expert in range(len(time_E)):
                        if first_J[expert * groups // len(time_E)] > latest:
                            time_E[expert] = np.inf
                for number, expert in enumerate(paired_E):
                    time = time_E[expert]
                    at = min(number, top_k)
                    while at > 0 and time < time_K[at - 1]:
                        if at < top_k:
                            time_K[at], chosen_K[at] = time_K[at - 1], chosen_K[at - 1]
                        at -= 1
                    if at < top_k:
                        time_K[at], chosen_K[at] = time, expert
                for k in range(top_k):
                    counts_TSE[t, s, chosen_K[k]] += 1
                    if len(kept_UK):
                        kept_UK[token, k] = chosen_K[k]
                token += 1


@njit(cache=True, nogil=True)
def _reject(upto_E, first_B, tokens, counts_TSE, kept_UK, top_k, rng, groups, token_groups):
    """Draws with replacement, and again whatever the token has chosen already; faster than `_race` while that is rare.

    Experts are drawn in the sequence of the race. So a token's groups are the first that it draws from, and it draws again when
    another comes.

    Args:
        upto_E: (E,) running sum of the experts' shares.
        first_B: (B,) the first expert that a random number in each of B equal parts of 0 to 1 can mean.
        tokens, counts_TSE, kept_UK, top_k, rng, groups, token_groups: as in `draw`.
    """
    token = 0
    last_E, last_J = np.full(len(upto_E), -1), np.full(groups, -1)  # the last token that chose each expert, and each group
    group_E = np.arange(len(upto_E)) * groups // len(upto_E)
    for t in range(counts_TSE.shape[0]):
        for s in range(counts_TSE.shape[1]):
            for _ in range(tokens):
                k = opened = 0
                while k < top_k:
                    at = rng.random()
                    expert = first_B[int(at * len(first_B))]
                    while upto_E[expert] <= at:
                        expert += 1
                    group = group_E[expert]
                    if last_J[group] != token and opened < token_groups:
                        last_J[group] = token
                        opened += 1
                    if last_E[expert] != token and last_J[group] == token:
                        last_E[expert] = token
                        counts_TSE[t, s, expert] += 1
                        if len(kept_UK):
                            kept_UK[token, k] = expert
                        k += 1
                token += 1


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
