"""PLACE: which experts of one layer share a GPU, as J groups, one for each GPU.

Each takes (load_E, slots_J, rng): tokens (E,) int64 of every expert, and how many experts each group may hold (G,) int64,
which together hold all of them; and gives group_E (E,) int64.
"""

from collections.abc import Callable

import numpy as np

from aurora.types.arrays import IntArray

GroupingStrategy = Callable[[IntArray, IntArray, np.random.Generator], IntArray]


def balanced(load_E: IntArray, slots_J: IntArray, rng: np.random.Generator) -> IntArray:
    """Heaviest expert first, into the lightest group that has room (longest processing time first)."""
    group_E = np.empty(len(load_E), dtype=np.int64)
    load_J, left_J = np.zeros(len(slots_J), dtype=np.int64), slots_J.copy()
    for expert in np.lexsort((np.arange(len(load_E)), -load_E)).tolist():
        open_J = np.flatnonzero(left_J > 0)
        group = int(open_J[np.lexsort((open_J, load_J[open_J]))[0]])
        group_E[expert] = group
        load_J[group] += load_E[expert]
        left_J[group] -= 1
    return group_E


def lina(load_E: IntArray, slots_J: IntArray, rng: np.random.Generator) -> IntArray:
    """The most popular expert with the least popular: experts by falling load, dealt to groups forth and back again.

    Source: Lina's packing as in Aurora §8.1, where every group holds two.
    """
    dealt = [np.flatnonzero(slots_J > deal)[:: -1 if deal % 2 else 1] for deal in range(int(slots_J.max()))]
    group_E = np.empty(len(load_E), dtype=np.int64)
    group_E[np.argsort(-load_E, kind="stable")] = np.concatenate(dealt)
    return group_E


def contiguous(load_E: IntArray, slots_J: IntArray, rng: np.random.Generator) -> IntArray:
    """Experts in index order, as engines place them without a plan."""
    return np.repeat(np.arange(len(slots_J)), slots_J)[: len(load_E)]


def shuffled(load_E: IntArray, slots_J: IntArray, rng: np.random.Generator) -> IntArray:
    """Experts in random order."""
    return rng.permutation(contiguous(load_E, slots_J, rng))


PLACE: dict[str, GroupingStrategy] = {"balanced": balanced, "lina": lina, "contiguous": contiguous, "random": shuffled}
