"""How the experts' loads best divide over replicas whose places are fixed: exact, compiled."""

import numpy as np
from numba import njit

from aurora.planner.replication.packing import CLOSE


@njit(cache=True)
def even_out(held_GP, cost_G, part_GP):
    """Move load between the replicas in part_GP, in place, until no division has a smaller largest time; gives that time.

    part_GP (G, P) float64: the load that each slot carries of its expert. A GPU above the target hands load on along the
    shortest chain of shared experts to one below it. Where no chain leads, the GPUs that the chains reach hold load that can be
    nowhere else, so that their mean is a lower bound: it becomes the target (Newton's steps on the cuts of a flow).
    """
    gpus, slots = held_GP.shape
    experts = held_GP.max() + 1
    first_E = np.zeros(experts + 1, dtype=np.int64)  # where in owner_X each expert's slots begin
    for slot in held_GP.flat:
        if slot >= 0:
            first_E[slot + 1] += 1
    first_E = np.cumsum(first_E)
    at_E = first_E.copy()
    owner_X = np.zeros(first_E[experts], dtype=np.int64)
    for gpu in range(gpus):
        for slot in range(slots):
            if held_GP[gpu, slot] >= 0:
                owner_X[at_E[held_GP[gpu, slot]]] = gpu * slots + slot
                at_E[held_GP[gpu, slot]] += 1
    load_G = part_GP.sum(axis=1)
    target = load_G.sum() / (1.0 / cost_G).sum()
    tiny = max(target, (load_G * cost_G).max()) * CLOSE
    from_G = np.empty(gpus, dtype=np.int64)  # the slot, of the GPU before it in the chain, that load leaves
    into_G = np.empty(gpus, dtype=np.int64)  # the slot of this GPU that it comes to
    queue_G = np.empty(gpus, dtype=np.int64)
    seen_E = np.empty(experts, dtype=np.bool_)
    while True:
        start = np.argmax(load_G * cost_G)
        over = load_G[start] - target / cost_G[start]
        if over * cost_G[start] <= tiny:
            return (load_G * cost_G).max()
        from_G[:] = -2
        seen_E[:] = False
        from_G[start] = -1
        queue_G[0] = start
        head, tail = 0, 1
        end = -1
        while head < tail and end < 0:
            gpu = queue_G[head]
            head += 1
            for slot in range(slots):
                expert = held_GP[gpu, slot]
                if expert < 0 or seen_E[expert] or part_GP[gpu, slot] <= tiny / cost_G[gpu]:
                    continue
                seen_E[expert] = True
                for at in range(first_E[expert], first_E[expert + 1]):
                    other = owner_X[at] // slots
                    if from_G[other] == -2:
                        from_G[other] = gpu * slots + slot
                        into_G[other] = owner_X[at]
                        queue_G[tail] = other
                        tail += 1
                        if load_G[other] * cost_G[other] < target - tiny:
                            end = other
                            break
                if end >= 0:
                    break
        if end < 0:
            reached = queue_G[:tail]
            target = max(target * (1.0 + CLOSE), load_G[reached].sum() / (1.0 / cost_G[reached]).sum())
            continue
        moved = min(over, target / cost_G[end] - load_G[end])
        gpu = end
        while gpu != start:
            moved = min(moved, part_GP[from_G[gpu] // slots, from_G[gpu] % slots])
            gpu = from_G[gpu] // slots
        load_G[start] -= moved
        load_G[end] += moved
        gpu = end
        while gpu != start:
            part_GP[from_G[gpu] // slots, from_G[gpu] % slots] -= moved
            part_GP[into_G[gpu] // slots, into_G[gpu] % slots] += moved
            gpu = from_G[gpu] // slots
