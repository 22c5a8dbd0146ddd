"""Load split: how each expert's load is best split over its replicas when their GPUs are fixed. Exact and compiled."""

import numpy as np
from numba import njit

from aurora.planner.replication.slot_packing import CLOSE

UNREACHED = -2
START = -1


@njit(cache=True)
def minimise_max_time(held_GP, cost_G, part_GP):
    """Moves load between replicas until no split has a smaller largest time.

    Load moves from a GPU above the target along the shortest chain of shared experts to a GPU below the target. If there is no
    such chain, the load of the GPUs that chains reach can be nowhere else. The mean time of these GPUs is then a lower bound
    and becomes the target (Newton's method on the cuts of a flow).

    Args:
        held_GP: (G, P) int64, the expert in each slot, EMPTY for an empty slot.
        cost_G: (G,) float64, the cost of a unit of load on each GPU.
        part_GP: (G, P) float64, the load that each slot carries of its expert; changed in place.

    Returns:
        The largest time of a GPU, its load times its cost.
    """
    first_E, owner_X = _slots_by_expert(held_GP)
    load_G = part_GP.sum(axis=1)
    target = load_G.sum() / (1.0 / cost_G).sum()
    tiny = max(target, (load_G * cost_G).max()) * CLOSE
    while True:
        start = np.argmax(load_G * cost_G)
        over = load_G[start] - target / cost_G[start]
        if over * cost_G[start] <= tiny:
            return (load_G * cost_G).max()
        end, reached_X, from_G, into_G = _find_chain(start, target, tiny, held_GP, cost_G, part_GP, load_G, first_E, owner_X)
        if end < 0:
            target = max(target * (1.0 + CLOSE), load_G[reached_X].sum() / (1.0 / cost_G[reached_X]).sum())
        else:
            moved = _shift_along_chain(end, min(over, target / cost_G[end] - load_G[end]), from_G, into_G, part_GP)
            load_G[start] -= moved
            load_G[end] += moved


@njit(cache=True)
def _slots_by_expert(held_GP):
    """The slots sorted by expert: first_E, where each expert's begin, and owner_X, the slots as gpu * P + slot."""
    gpus, slots = held_GP.shape
    experts = held_GP.max() + 1
    first_E = np.zeros(experts + 1, dtype=np.int64)
    for expert in held_GP.flat:
        if expert >= 0:
            first_E[expert + 1] += 1
    first_E = np.cumsum(first_E)
    next_E = first_E.copy()
    owner_X = np.zeros(first_E[experts], dtype=np.int64)
    for gpu in range(gpus):
        for slot in range(slots):
            expert = held_GP[gpu, slot]
            if expert >= 0:
                owner_X[next_E[expert]] = gpu * slots + slot
                next_E[expert] += 1
    return first_E, owner_X


@njit(cache=True)
def _find_chain(start, target, tiny, held_GP, cost_G, part_GP, load_G, first_E, owner_X):
    """Breadth-first search from GPU `start` over shared experts for a GPU below the target.

    Returns the GPU found (-1: none), the GPUs that were reached, and by GPU the slot of the GPU before it that load leaves and
    its own slot that the load comes to.
    """
    gpus, slots = held_GP.shape
    seen_E = np.zeros(first_E.shape[0] - 1, dtype=np.bool_)
    queue_G = np.empty(gpus, dtype=np.int64)
    into_G = np.empty(gpus, dtype=np.int64)
    from_G = np.full(gpus, UNREACHED)
    from_G[start] = START
    queue_G[0] = start
    head, tail = 0, 1
    while head < tail:
        gpu = queue_G[head]
        head += 1
        for slot in range(slots):
            expert = held_GP[gpu, slot]
            if expert < 0 or seen_E[expert] or part_GP[gpu, slot] <= tiny / cost_G[gpu]:
                continue
            seen_E[expert] = True
            for at in range(first_E[expert], first_E[expert + 1]):
                other = owner_X[at] // slots
                if from_G[other] != UNREACHED:
                    continue
                from_G[other] = gpu * slots + slot
                into_G[other] = owner_X[at]
                queue_G[tail] = other
                tail += 1
                if load_G[other] * cost_G[other] < target - tiny:
                    return other, queue_G[:tail], from_G, into_G
    return -1, queue_G[:tail], from_G, into_G


@njit(cache=True)
def _shift_along_chain(end, most, from_G, into_G, part_GP):
    """Move load along the chain that leads to GPU `end`, at most `most` and at most what its slots carry. Returns how much."""
    slots = part_GP.shape[1]
    moved = most
    gpu = end
    while from_G[gpu] != START:
        moved = min(moved, part_GP[from_G[gpu] // slots, from_G[gpu] % slots])
        gpu = from_G[gpu] // slots
    gpu = end
    while from_G[gpu] != START:
        part_GP[from_G[gpu] // slots, from_G[gpu] % slots] -= moved
        part_GP[into_G[gpu] // slots, into_G[gpu] % slots] += moved
        gpu = from_G[gpu] // slots
    return moved
