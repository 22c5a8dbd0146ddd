"""EPLB, the baseline: greedy replicas, then packs of equal size. Source: DeepSeek-V3 (arXiv:2412.19437) §3.4, and EPLB's notes.

Global: slot after slot to the expert with the largest load a replica; then the heaviest replica first, to the lightest GPU with
room. Hierarchical: groups of experts are packed onto nodes in equal numbers, experts are replicated within each node, and
their replicas packed onto the node's GPUs. An expert may be twice on one GPU: its two shares are one slot here.
"""

import numpy as np

from aurora.errors import BadInput
from aurora.types import GpuSlots
from aurora.types.arrays import FloatArray, IntArray


def packed(weight_X: FloatArray, packs: int) -> IntArray:
    """(X,) int64: the pack of each item, equally many in each: heaviest first, into the lightest pack that has room."""
    room_J = np.full(packs, len(weight_X) // packs)
    weight_J = np.zeros(packs)
    pack_X = np.empty(len(weight_X), dtype=np.int64)
    for item in np.argsort(-weight_X, kind="stable").tolist():
        pack = int(np.argmin(np.where(room_J > 0, weight_J, np.inf)))
        pack_X[item] = pack
        weight_J[pack] += weight_X[item]
        room_J[pack] -= 1
    return pack_X


def replicated(load_E: FloatArray, slots: int) -> IntArray:
    """(E,) int64: how many replicas each expert has when slot after slot goes to the largest load a replica."""
    count_E = np.ones(len(load_E), dtype=np.int64)
    for _ in range(slots - len(load_E)):
        count_E[np.argmax(load_E / count_E)] += 1
    return count_E


def eplb(load_E: FloatArray, room: GpuSlots, count_E: IntArray | None) -> tuple[IntArray, FloatArray]:
    """The expert in each slot, (G, P) int64 with -1 where there is none, and how much of its load it takes there.

    Hierarchical where the room has several nodes and groups. GPUs alike and slots for every expert in each node, or BadInput.
    """
    slots = int(room.slots_G[0])
    if not room.alike:
        raise BadInput("eplb: expected GPUs alike, found different slots or costs")
    nodes = room.nodes if room.groups > 1 else 1
    if room.groups % nodes or len(load_E) % room.groups:
        raise BadInput(
            f"eplb: expected groups that divide {len(load_E)} experts and are divided by {nodes} nodes, found {room.groups}"
        )
    if count_E is not None and (nodes > 1 or count_E.sum() != room.gpus * slots):
        raise BadInput(
            f"eplb: expected `replicas` only without `groups` and to fill {room.gpus * slots} slots, found {count_E.sum()}"
        )
    group_E = np.arange(len(load_E)) * room.groups // len(load_E)
    node_E = packed(np.bincount(group_E, weights=load_E).astype(np.float64), nodes)[group_E]
    within = room.gpus // nodes
    held_GP = np.full((room.gpus, slots), -1, dtype=np.int64)
    share_GP = np.zeros((room.gpus, slots))
    for node in range(nodes):
        expert_E = np.flatnonzero(node_E == node)
        own_E = replicated(load_E[expert_E], within * slots) if count_E is None else count_E
        replica_X = np.repeat(np.arange(len(expert_E)), own_E)
        gpu_X = node * within + packed((load_E[expert_E] / own_E)[replica_X], within)
        for gpu in range(node * within, (node + 1) * within):
            found, times = np.unique(replica_X[gpu_X == gpu], return_counts=True)
            held_GP[gpu, : len(found)] = expert_E[found]
            share_GP[gpu, : len(found)] = times / own_E[found]
    return held_GP, share_GP
