"""EPLB, the baseline: greedy replica counts, then packs with equally many replicas.

Global: each further slot goes to the expert with the largest load per replica; then replicas are packed, heaviest first, onto
the lightest GPU with an empty slot. Hierarchical: groups of experts are packed onto nodes in equal numbers, experts are
replicated within each node, and their replicas packed onto the node's GPUs. EPLB may put an expert twice on one GPU; here the
two replicas become one slot with both parts of the load.
Source: DeepSeek-V3 (arXiv:2412.19437) §3.4, and EPLB's notes.
"""

import numpy as np

from aurora.errors import BadInput
from aurora.planner.replication.slot_packing import counts_by_load
from aurora.types import GpuSlots
from aurora.types.arrays import FloatArray, IntArray


def balanced_packing(weight_X: FloatArray, packs: int) -> IntArray:
    """Packs items, heaviest first, into the lightest pack that is not full. Returns (X,) int64, the pack of each item.

    weight_X is (X,); each of the `packs` packs takes X / packs items.
    """
    spare_J = np.full(packs, len(weight_X) // packs)
    weight_J = np.zeros(packs)
    pack_X = np.empty(len(weight_X), dtype=np.int64)
    for item in np.argsort(-weight_X, kind="stable").tolist():
        pack = int(np.argmin(np.where(spare_J > 0, weight_J, np.inf)))
        pack_X[item] = pack
        weight_J[pack] += weight_X[item]
        spare_J[pack] -= 1
    return pack_X


def eplb(
    load_E: FloatArray, slots: GpuSlots, count_E: IntArray | None, rng: np.random.Generator
) -> tuple[IntArray, FloatArray]:
    """Places one layer as DeepSeek's EPLB, the baseline, does; hierarchically where `slots` has several nodes and groups.

    Args and returns: as in `registry.equal_split`; `rng` is not used.

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
    node_E = balanced_packing(np.bincount(group_E, weights=load_E).astype(np.float64), nodes)[group_E]
    within = slots.gpus // nodes
    held_GP = np.full((slots.gpus, per_gpu), -1, dtype=np.int64)
    split_GP = np.zeros((slots.gpus, per_gpu))
    for node in range(nodes):
        expert_E = np.flatnonzero(node_E == node)
        own_E = counts_by_load(load_E[expert_E], within * per_gpu, within * per_gpu) if count_E is None else count_E
        replica_X = np.repeat(np.arange(len(expert_E)), own_E)
        gpu_X = node * within + balanced_packing((load_E[expert_E] / own_E)[replica_X], within)
        for gpu in range(node * within, (node + 1) * within):
            found, times = np.unique(replica_X[gpu_X == gpu], return_counts=True)
            held_GP[gpu, : len(found)] = expert_E[found]
            split_GP[gpu, : len(found)] = times / own_E[found]
    return held_GP, split_GP
