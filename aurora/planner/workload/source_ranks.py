"""Divides token counts of unknown origin over source ranks, in whole numbers, every token once."""

import numpy as np

from aurora.types.arrays import IntArray


def deal_counts(counts_TLE: IntArray, sources: int) -> IntArray:
    """Divides token counts (T, L, E) evenly over source ranks; returns (T, L, S, E) int64.

    A layer's tokens, step by step and expert by expert, go to the sources in turn. So two sources differ by at most one token
    in each count, in each step's sum and in the total.
    """
    steps, layers, experts = counts_TLE.shape
    line_LX = counts_TLE.transpose(1, 0, 2).reshape(layers, -1)
    ends_L1X = line_LX.cumsum(axis=1)[:, None, :]
    starts_L1X = ends_L1X - line_LX[:, None, :]
    source_S1 = np.arange(sources)[:, None]
    # Of the numbers below x, (x - s + S - 1) // S are s modulo S.
    dealt_LSX = (ends_L1X - source_S1 + sources - 1) // sources - (starts_L1X - source_S1 + sources - 1) // sources
    dealt_TLSE: IntArray = dealt_LSX.reshape(layers, sources, steps, experts).transpose(2, 0, 1, 3)
    return dealt_TLSE


def sources_of(domain: int, domains: int, sources: int) -> IntArray:
    """Returns the source ranks that serve a domain of traffic.

    These are every `domains`-th rank from `domain`, which serve no other domain; or one rank that serves several domains, if
    there are more domains than ranks.
    """
    return np.arange(domain, sources, domains) if domains <= sources else np.array([domain % sources])


def windows_of(tokens_T: IntArray, window: int | None) -> IntArray:
    """Returns (T,) the window of each step: at least `window` tokens each, but for the last; None makes each step a window."""
    if window is None:
        return np.arange(len(tokens_T))
    window_T, number, held = np.empty(len(tokens_T), dtype=np.int64), 0, 0
    for step, tokens in enumerate(tokens_T.tolist()):
        if held >= window:
            number, held = number + 1, 0
        window_T[step] = number
        held += tokens
    return window_T
