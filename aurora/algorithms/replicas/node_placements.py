"""Placements of replicas on nodes by a rule: Lazarus' maximum rank overlap (mro), spread over nodes, compact on few nodes.

They are methods of SURVIVE (`failure_resilient`), and starts of its search.
"""

from collections.abc import Callable
from itertools import cycle

import numpy as np

from aurora.types.arrays import IntArray

NodePlacement = Callable[[IntArray, IntArray], IntArray]


def mro(count_E: IntArray, slots_N: IntArray) -> IntArray:
    """Places by Lazarus's maximum rank overlap: groups experts sorted by replica count (`ranked`), and gives each group nodes.

    A group has as many experts as the smallest node has slots, and as many nodes as the fewest replicas of an expert in it.
    Empty slots then go round robin to experts with replicas left; a node may then hold an expert twice.

    Args:
        count_E: (E,) int64, the replicas of each expert.
        slots_N: (N,) int64, the slots of each node.

    Returns:
        (E, N) int64, the replicas of each expert on each node.

    Source:
        Lazarus (arXiv:2407.04656) §4.1. Its Theorem 1 claims that this is optimal, which it is not.
    """
    held_EN = np.zeros((len(count_E), len(slots_N)), dtype=np.int64)
    rank = ranked(count_E)
    slots, first = int(slots_N.min()), 0
    if len(rank) <= slots:  # each expert fits on its first count_E nodes
        for expert in rank:
            held_EN[expert, : count_E[expert]] = 1
    else:
        for start in range(0, len(rank), slots):
            group = rank[start : start + slots]
            served_by = slice(first, min(len(slots_N), first + int(count_E[group[0]])))
            held_EN[group, served_by] = 1
            first = served_by.stop
    left_E = count_E - held_EN.sum(axis=1)
    round_robin = cycle(rank)
    for node in range(len(slots_N)):
        for _ in range(min(int(slots_N[node] - held_EN[:, node].sum()), int(left_E.sum()))):
            expert = next(expert for expert in round_robin if left_E[expert])
            held_EN[expert, node] += 1
            left_E[expert] -= 1
    return held_EN


def spread(count_E: IntArray, slots_N: IntArray) -> IntArray:
    """Places round robin: each replica goes to the next node with an empty slot, if possible one that lacks the expert.

    Args and returns: as in `mro`.

    Source:
        The baseline of Lazarus (arXiv:2407.04656) §6.3.
    """
    held_EN = np.zeros((len(count_E), len(slots_N)), dtype=np.int64)
    empty_N, node = slots_N.copy(), 0
    for expert in ranked(count_E):
        for _ in range(int(count_E[expert])):
            turn_N = (np.arange(len(slots_N)) - node) % len(slots_N)
            node = int(np.lexsort((turn_N, held_EN[expert], empty_N == 0))[0])
            held_EN[expert, node] += 1
            empty_N[node] -= 1
            node = (node + 1) % len(slots_N)
    return held_EN


def compact(count_E: IntArray, slots_N: IntArray) -> IntArray:
    """Puts each expert's replicas on one node, the fullest on which they fit, or on as few nodes as possible.

    Args and returns: as in `mro`.

    Source:
        The baseline of Lazarus (arXiv:2407.04656) §6.3.
    """
    held_EN = np.zeros((len(count_E), len(slots_N)), dtype=np.int64)
    empty_N = slots_N.copy()
    for expert in ranked(count_E):
        replicas = int(count_E[expert])
        while replicas:
            fits = np.flatnonzero(empty_N >= replicas)
            node = int(fits[empty_N[fits].argmin()]) if len(fits) else int(empty_N.argmax())
            held_EN[expert, node] = min(replicas, empty_N[node])
            replicas -= int(held_EN[expert, node])
            empty_N[node] -= held_EN[expert, node]
    return held_EN


def ranked(count_E: IntArray) -> list[int]:
    """Returns the experts sorted by rising replica count, then by number."""
    return [int(expert) for expert in np.argsort(count_E, kind="stable")]


BASELINES: dict[str, NodePlacement] = {"mro": mro, "spread": spread, "compact": compact}
