"""The best that any placement of replicas survives, by trying all of them; for small cases."""

from itertools import combinations_with_replacement

import numpy as np

NODES, SLOTS, EXPERTS = (3, 4, 5), (1, 2, 3), (2, 3, 4, 5)


def rising(experts, total, least=1):
    """Every tuple of `experts` rising counts, `least` or more, with this sum."""
    if experts == 1:
        return [(total,)] if total >= least else []
    return [
        (first, *rest) for first in range(least, total // experts + 1) for rest in rising(experts - 1, total - first, first)
    ]


def best_counts(nodes, slots, experts):
    """By rising counts of replicas that fill all slots: of how many sets of 1..nodes-1 alive nodes the best placement for each
    number holds every expert, (nodes - 1,)."""
    contents = list(combinations_with_replacement(range(experts), slots))
    count_CE = np.array([[content.count(expert) for expert in range(experts)] for content in contents])
    mask_C = np.array([sum(1 << expert for expert in set(content)) for content in contents])
    chosen_XN = np.array(list(combinations_with_replacement(range(len(contents)), nodes)))
    count_XE = sum(count_CE[chosen_XN[:, node]] for node in range(nodes))
    kept_X = (np.diff(count_XE, axis=1) >= 0).all(axis=1) & (count_XE[:, 0] >= 1)
    count_XE, mask_XN = count_XE[kept_X], mask_C[chosen_XN[kept_X]]
    whole_XK = np.zeros((len(count_XE), nodes - 1), dtype=np.int64)
    for alive in range(1, (1 << nodes) - 1):
        members = [node for node in range(nodes) if alive >> node & 1]
        whole_XK[:, len(members) - 1] += np.bitwise_or.reduce(mask_XN[:, members], axis=1) == (1 << experts) - 1
    key_X = count_XE @ (nodes * slots + 1) ** np.arange(experts)
    order_X = np.argsort(key_X, kind="stable")
    first = np.flatnonzero(np.diff(key_X[order_X], prepend=-1))
    top = np.maximum.reduceat(whole_XK[order_X], first)
    return {tuple(count_XE[order_X[at]].tolist()): row for at, row in zip(first, top, strict=True)}


def cases():
    """(nodes, slots, counts, what the best placement keeps by number alive) of all small cases."""
    for nodes in NODES:
        for slots in SLOTS:
            for experts in EXPERTS:
                if experts <= nodes * slots:
                    best = best_counts(nodes, slots, experts)
                    for counts in rising(experts, nodes * slots):
                        yield nodes, slots, counts, best[counts]
