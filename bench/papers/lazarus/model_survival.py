"""How likely a model survives failed nodes: every expert of every layer is still held."""

from collections.abc import Sequence
from itertools import combinations

import numpy as np

from aurora.algorithms.replicas.survival_probability import all_held


def model_survival(slots_LN: Sequence[Sequence[Sequence[int]]], failures: int) -> float:
    """Returns the probability that every expert of every layer is still held after `failures` nodes, all as likely to fail.

    Exact, by trying every set of nodes.

    Args:
        slots_LN: the experts, from 0, that each node holds in each layer; each expert is held somewhere in each layer.
        failures: number of nodes that fail at once.
    """
    nodes, experts = len(slots_LN[0]), 1 + max(expert for slots_N in slots_LN for held in slots_N for expert in held)
    held_NLE = np.zeros((nodes, len(slots_LN), experts), dtype=np.bool_)
    for layer, slots_N in enumerate(slots_LN):
        for node, held in enumerate(slots_N):
            held_NLE[node, layer, list(held)] = True
    failed = np.array(list(combinations(range(nodes), failures)), dtype=np.int64)
    alive_MN = np.ones((len(failed), nodes), dtype=np.bool_)
    np.put_along_axis(alive_MN, failed, False, axis=1)
    return float(all_held(held_NLE.reshape(nodes, -1), alive_MN).mean())
