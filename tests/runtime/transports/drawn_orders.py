"""Orders of any kind, drawn."""

from itertools import pairwise

import numpy as np

from aurora.types import Order


def drawn_order(rng, ranks):
    """Any order: any sequence, windows, splits and tiers."""
    pairs = [(src, dst) for src in range(ranks) for dst in range(ranks) if src != dst]
    rows, shares = [], []
    for pair in pairs:
        edges = [0.0, *sorted(rng.random(rng.integers(0, 3) if rng.random() < 0.3 else 0).tolist()), 1.0]
        rows += [pair] * (len(edges) - 1)
        shares += pairwise(edges)
    sequence = rng.permutation(len(rows))
    share_X2 = np.array(shares)[sequence] if len(rows) > len(pairs) else None
    opened = rng.integers(1, 1 + rng.choice([1, 3, ranks]), 2).tolist()
    tier_X = None
    if rng.random() < 0.4:
        tier_X = rng.integers(0, rng.integers(1, 4), (ranks, ranks))[*np.array(rows)[sequence].T]
    return Order("drawn", np.array(rows)[sequence], *opened, share_X2, tier_X=tier_X)
