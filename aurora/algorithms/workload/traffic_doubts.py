"""Finds traffic that no router sends: padding, a cycle over experts, experts that no token chose.

Each rule has a threshold that recorded traffic keeps clear of: that of DeepSeek-V2-Lite (ESFT), OLMoE and Mixtral.

- Padding: tokens that all make one choice in every layer. Of recorded tokens at most 0.9 % do, the first of each prompt;
  prompts of 7 tokens would have one in seven. From counts alone, the part is estimated from each layer's top-k busiest experts:
  at most 0.09 of recorded tokens, 0.27 of first choices alone.
- Forced balance: engines' benchmarks send tokens to experts in turn, or at random. Counts are then more even than by chance, or
  experts' shares vary by nothing beyond chance; the shares of recorded traffic vary by 11 % of their mean or more.
- Never chosen: recorded traffic of 9 choices for each expert leaves 4.6 % of experts without one, of 94 choices 0.1 %.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammainc

from aurora.algorithms.workload.synthetic import SYNTHETIC_TOOL
from aurora.types import Profile
from aurora.types.arrays import FloatArray, IntArray

MOST_ALIKE = 0.15  # part of tokens with one choice in all layers; one in seven is the first token of very short prompts
MOST_ALIKE_COUNTED = 0.3  # the same part where it is estimated from counts
CHANCE = 1e-4  # probability that uniform choices are as even as these
LEAST_SPREAD = 0.03  # standard deviation of experts' shares / their mean
MOST_UNCHOSEN = {0: 1 / 16, 100: 0.01}  # part of all layers' experts, by the mean choices of an expert from which it holds
FEW_CHOICES = 10  # mean choices of an expert, below which traffic is too short to tell which are never chosen


def traffic_doubts(profile: Profile) -> tuple[str, ...]:
    """Returns a sentence for each sign that a profile's tokens are not those of requests; none for synthetic traffic.

    Args:
        profile: the traffic.
    """
    if profile.provenance.get("tool") == SYNTHETIC_TOOL:
        return ()
    alike = _alike_by_counts(profile.load_LE, profile.top_k)
    if profile.routing is not None:
        alike = _alike(profile.routing.experts_ULK)
    if not alike or profile.layers < 2:  # in one layer, many tokens may choose alike
        return load_doubts(profile.load_LE, profile.top_k)
    first = ", ".join(map(str, sorted(alike[1])))
    said = f"{alike[0]} chose the same experts in all {profile.layers} layers ({first} in the first)"
    return (f"{said}: padding? It is planned for as traffic", *load_doubts(profile.load_LE, profile.top_k))


def load_doubts(load_LE: IntArray | FloatArray, top_k: int = 1) -> tuple[str, ...]:
    """Returns sentences on loads that are too even to be of requests, and on experts without load.

    Args:
        load_LE: (L, E), tokens of each expert.
        top_k: experts per token.

    Example:
        >>> import numpy as np
        >>> load_doubts(np.array([[40, 0, 20, 20]]))[0].partition(":")[0]
        '1 of 4 experts of all layers were never chosen, where the mean is 20 tokens'
    """
    load_LE = load_LE[load_LE.any(axis=1)]
    layers, experts = load_LE.shape
    if not layers or experts <= top_k:
        return ()
    mean_L1 = load_LE.mean(axis=1, keepdims=True)
    mean, freedom = float(load_LE.mean()), layers * (experts - 1)
    squares = float(((load_LE - mean_L1) ** 2 / (mean_L1 * (1 - top_k / experts))).sum())  # chi squared
    variance = (squares / freedom - 1 + 2 * math.sqrt(2 / freedom)) / mean  # of shares, at most, in two standard deviations
    doubts = []
    if gammainc(freedom / 2, squares / 2) < CHANCE or variance < LEAST_SPREAD**2:
        doubts.append(
            f"experts have {load_LE.min():.4g} to {load_LE.max():.4g} tokens each, as even as by chance: is balance forced?"
        )
    unchosen = int((load_LE == 0).sum())
    if unchosen > load_LE.size * next(part for least, part in reversed(MOST_UNCHOSEN.items()) if mean >= least):
        why = "too few tokens to plan by" if mean < FEW_CHOICES else "are experts pruned, or is the recording cut?"
        doubts.append(
            f"{unchosen} of {load_LE.size} experts of all layers were never chosen, where the mean is {mean:.3g} tokens: {why}"
        )
    return tuple(doubts)


def _alike(experts_ULK: NDArray[Any]) -> tuple[str, list[int]] | None:
    """The tokens that make one choice in all layers, in any sequence, and its experts in the first; None for few tokens."""
    tokens, layers, _ = experts_ULK.shape
    rng, key_U = np.random.default_rng(0), np.zeros(tokens, dtype=np.uint64)
    for layer in range(layers):  # the sum of random numbers of a token's experts tells choices apart
        number_E = rng.integers(1 << 63, size=int(experts_ULK[:, layer].max()) + 1, dtype=np.uint64)
        key_U += number_E[experts_ULK[:, layer]].sum(axis=1, dtype=np.uint64)
    _, first_X, many_X = np.unique(key_U, return_index=True, return_counts=True)
    most = int(many_X.max())
    chosen_K = experts_ULK[first_X[many_X.argmax()], 0].tolist()
    return (f"{most} of {tokens} tokens ({most / tokens:.0%})", chosen_K) if most > MOST_ALIKE * tokens else None


def _alike_by_counts(load_LE: IntArray, top_k: int) -> tuple[str, list[int]] | None:
    """The same by counts: if p of all tokens are padding, a layer's top_k busiest experts have p + (1 - p) top_k / E each."""
    if (even := top_k / load_LE.shape[1]) == 1:
        return None
    part_L = np.sort(load_LE, axis=1)[:, -top_k] * top_k / np.maximum(load_LE.sum(axis=1), 1)
    alike = float((part_L.min() - even) / (1 - even))
    chosen_K = np.argsort(-load_LE[0])[:top_k].tolist()
    return (f"by their counts, about {alike:.0%} of all tokens", chosen_K) if alike > MOST_ALIKE_COUNTED else None
