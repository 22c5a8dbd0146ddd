"""The algorithm of DeepSeek's EPLB, the baseline for replicas, in its flat and in its hierarchical form."""

import numpy as np

from aurora.algorithms.replicas.packing_core import eplb_counts, packed
from aurora.errors import BadInput
from aurora.types import GpuSlots
from aurora.types.arrays import FloatArray, IntArray


def balanced(load_E: IntArray | FloatArray, slots_J: IntArray, rng: np.random.Generator) -> IntArray:
    """Puts each expert, heaviest first, into the lightest group with a free slot (longest processing time first).

    Args:
        load_E: (E,), tokens of each expert.
        slots_J: (J,) int64, how many experts each group may hold; at least E in all.
        rng: not used.

    Returns:
        (E,) int64, the group of each expert.
    """
    held_JP = packed(np.asarray(load_E, dtype=np.float64), np.ones(len(load_E), dtype=np.int64), slots_J, np.ones(len(slots_J)))
    group_E = np.empty(len(load_E), dtype=np.int64)
    group_E[held_JP[held_JP >= 0]] = np.nonzero(held_JP >= 0)[0]
    return group_E


def eplb(
    load_E: FloatArray, slots: GpuSlots, count_E: IntArray | None, rng: np.random.Generator
) -> tuple[IntArray, FloatArray]:
    """Places one layer with the algorithm of DeepSeek's EPLB, the baseline; its hierarchical one if `slots` has several nodes.

    Args and returns: as in `aurora.algorithms.replicas.registry.equal_split`; `rng` is not used.

    Raises:
        BadInput: if GPUs differ, groups do not divide the experts, nodes do not divide the groups, or `count_E` is given for
            several nodes or does not fill the slots.
    """
    per_gpu = int(slots.slots_G[0])
    if not slots.alike:
        raise BadInput("eplb: expected GPUs with equal slots and costs, found different ones")
    nodes = slots.nodes if slots.groups > 1 else 1
    if slots.groups % nodes or len(load_E) % slots.groups:
        raise BadInput(
            f"eplb: expected groups that divide {len(load_E)} experts and are divided by {nodes} nodes, found {slots.groups}"
        )
    if count_E is not None and (nodes > 1 or count_E.sum() != slots.gpus * per_gpu):
        raise BadInput(
            f"eplb: expected `replicas` only without `groups` and to fill {slots.gpus * per_gpu} slots, found {count_E.sum()}"
        )
    group_E = np.arange(len(load_E)) * slots.groups // len(load_E)
    within = slots.gpus // nodes
    node_E = balanced(np.bincount(group_E, weights=load_E), np.full(nodes, slots.groups // nodes), rng)[group_E]
    held_GP = np.full((slots.gpus, per_gpu), -1, dtype=np.int64)
    split_GP = np.zeros((slots.gpus, per_gpu))
    for node in range(nodes):
        expert_E = np.flatnonzero(node_E == node)
        own_E = eplb_counts(load_E[expert_E], within * per_gpu, within * per_gpu) if count_E is None else count_E
        replica_X = np.repeat(np.arange(len(expert_E)), own_E)
        gpu_X = node * within + balanced((load_E[expert_E] / own_E)[replica_X], np.full(within, per_gpu), rng)
        for gpu in range(node * within, (node + 1) * within):
            distinct_X, times = np.unique(replica_X[gpu_X == gpu], return_counts=True)
            held_GP[gpu, : len(distinct_X)] = expert_E[distinct_X]
            split_GP[gpu, : len(distinct_X)] = times / own_E[distinct_X]
    return held_GP, split_GP
