"""Counts that do not say where tokens came from, dealt to source ranks: every token once, in whole numbers."""

import numpy as np

from aurora.types.arrays import IntArray


def deal_counts(counts_TLE: IntArray, sources: int) -> IntArray:
    """(T, L, S, E) int64: of each count, each step's sum and the whole, no source has more than one above another.

    A layer's tokens lie on one line, step by step and expert by expert, and are dealt out one after the other.
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
    """The source ranks that a domain is dealt to: every domains-th, each serving it alone, or one that serves several."""
    return np.arange(domain, sources, domains) if domains <= sources else np.array([domain % sources])


def windows_of(tokens_T: IntArray, window: int | None) -> IntArray:
    """(T,) int64: in which window each step falls when one closes after `window` tokens; None leaves every step its own."""
    if window is None:
        return np.arange(len(tokens_T))
    window_T, number, held = np.empty(len(tokens_T), dtype=np.int64), 0, 0
    for step, tokens in enumerate(tokens_T.tolist()):
        if held >= window:
            number, held = number + 1, 0
        window_T[step] = number
        held += tokens
    return window_T
