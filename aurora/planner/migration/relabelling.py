"""Relabelling: which GPU takes which part of a new placement, so that the fewest bytes move from the present placement."""

from collections.abc import Sequence
from itertools import product

import numpy as np
from scipy.optimize import linear_sum_assignment

from aurora.types.arrays import IntArray

LayerSlots = Sequence[Sequence[int]]  # of one layer: the experts on each GPU or node


def holds(slots_G: LayerSlots, experts: int) -> IntArray:
    """Returns (G, E) int64: 1 where GPU g holds expert e."""
    holds_GE = np.zeros((len(slots_G), experts), dtype=np.int64)
    for gpu, held in enumerate(slots_G):
        holds_GE[gpu, list(held)] = 1
    return holds_GE


def fewest_moves(
    old_GE: IntArray, new_GE: IntArray, bytes_E: IntArray, alike_G: IntArray, node_G: IntArray | None = None
) -> IntArray:
    """Relabels GPUs so that the fewest bytes move in all. Exact; ties leave GPUs as they are.

    Solves a minimum-cost assignment of GPUs. With node_G, it assigns nodes; the cost of a pair of nodes is the minimum-cost
    assignment of their GPUs.

    Args:
        old_GE: (G, E) int64, 1 where GPU g holds expert e in the present placement.
        new_GE: (G, E) int64, 1 where GPU g holds expert e in the new placement. Two colocated models' experts are side by side.
        bytes_E: (E,) int64, bytes of each expert's weights.
        alike_G: (G,) int64, equal numbers for GPUs that may be exchanged.
        node_G: (G,) int64, the node of each GPU, if only nodes as a whole may be exchanged; None: each GPU by itself.

    Returns:
        (G,) int64: entry g is the GPU that takes what the new placement gives to GPU g.
    """
    arriving_GG = (new_GE * bytes_E) @ (1 - old_GE).T  # what GPU h lacks of the new GPU g's experts
    n = len(old_GE)
    stays_GG = arriving_GG * (n + 1) + (1 - np.eye(n, dtype=np.int64))
    cost_GG = np.where(alike_G[:, None] == alike_G[None, :], stays_GG, np.inf)
    if node_G is None:
        return np.asarray(linear_sum_assignment(cost_GG)[1], dtype=np.int64)
    gpus_N = [np.flatnonzero(node_G == node) for node in np.unique(node_G)]
    kinds_N = [sorted(alike_G[own].tolist()) for own in gpus_N]
    cost_NN = np.full((len(gpus_N),) * 2, np.inf)
    inner: dict[tuple[int, int], IntArray] = {}
    for a, b in product(range(len(gpus_N)), repeat=2):
        if kinds_N[a] == kinds_N[b]:
            part_GG = cost_GG[np.ix_(gpus_N[a], gpus_N[b])]
            rows, inner[a, b] = linear_sum_assignment(part_GG)
            cost_NN[a, b] = part_GG[rows, inner[a, b]].sum()
    taker_G = np.empty(n, dtype=np.int64)
    for a, b in enumerate(linear_sum_assignment(cost_NN)[1].tolist()):
        taker_G[gpus_N[a]] = gpus_N[b][inner[a, b]]
    return taker_G
