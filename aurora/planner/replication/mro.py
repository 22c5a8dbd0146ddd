"""The named placements of replicas on nodes that may fail, without a search.

Each takes (count_E, slots_N): the replicas of each expert, (E,) int64, at most as many as slots, (N,) int64; and gives how many
replicas of each expert each node holds, (E, N) int64. Experts rank by count, then by number.
"""

from collections.abc import Callable
from itertools import cycle

import numpy as np

from aurora.types.arrays import IntArray

Named = Callable[[IntArray, IntArray], IntArray]


def mro(count_E: IntArray, slots_N: IntArray) -> IntArray:
    """Maximum rank overlap: experts, c at a time by rank, share nodes of their own, as many as the rarest of them has replicas;
    what is vacant goes to the experts with replicas left, in turn.

    c: the fewest slots of a node. Nothing keeps a filled expert's replicas apart. Source: Lazarus §4.1 and Theorem 1, which
    says that it is optimal; it is not.
    """
    held_EN = np.zeros((len(count_E), len(slots_N)), dtype=np.int64)
    rank = ranked(count_E)
    slots, first = int(slots_N.min()), 0
    if len(rank) <= slots:  # the easier case: each expert on the first nodes, as far as it goes
        for expert in rank:
            held_EN[expert, : count_E[expert]] = 1
    else:
        for start in range(0, len(rank), slots):
            group = rank[start : start + slots]
            own = slice(first, min(len(slots_N), first + int(count_E[group[0]])))
            held_EN[group, own] = 1
            first = own.stop
    left_E = count_E - held_EN.sum(axis=1)
    time_slice = cycle(rank)
    for node in range(len(slots_N)):
        for _ in range(min(int(slots_N[node] - held_EN[:, node].sum()), int(left_E.sum()))):
            expert = next(expert for expert in time_slice if left_E[expert])
            held_EN[expert, node] += 1
            left_E[expert] -= 1
    return held_EN


def spread(count_E: IntArray, slots_N: IntArray) -> IntArray:
    """Replica after replica to the next node in turn that has room and, if there is one, does not hold the expert yet.

    Source: the baseline of Lazarus §6.3.
    """
    held_EN = np.zeros((len(count_E), len(slots_N)), dtype=np.int64)
    room_N, node = slots_N.copy(), 0
    for expert in ranked(count_E):
        for _ in range(int(count_E[expert])):
            turn_N = (np.arange(len(slots_N)) - node) % len(slots_N)
            node = int(np.lexsort((turn_N, held_EN[expert], room_N == 0))[0])
            held_EN[expert, node] += 1
            room_N[node] -= 1
            node = (node + 1) % len(slots_N)
    return held_EN


def compact(count_E: IntArray, slots_N: IntArray) -> IntArray:
    """Expert after expert onto as few nodes as hold all its replicas, the emptiest first. Source: the baseline of Lazarus
    §6.3."""
    held_EN = np.zeros((len(count_E), len(slots_N)), dtype=np.int64)
    room_N = slots_N.copy()
    for expert in ranked(count_E):
        left = int(count_E[expert])
        while left:
            fits = np.flatnonzero(room_N >= left)
            node = int(fits[room_N[fits].argmin()]) if len(fits) else int(room_N.argmax())
            held_EN[expert, node] = min(left, room_N[node])
            left -= int(held_EN[expert, node])
            room_N[node] -= held_EN[expert, node]
    return held_EN


def ranked(count_E: IntArray) -> list[int]:
    """Experts by rising count, then by number."""
    return [int(expert) for expert in np.argsort(count_E, kind="stable")]


NAMED: dict[str, Named] = {"mro": mro, "spread": spread, "compact": compact}
