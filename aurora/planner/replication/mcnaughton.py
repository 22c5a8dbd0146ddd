"""Free-split placements on equal GPUs, compiled: experts in groups that share whole GPUs, each group laid over its own.

Two facts make this exact but for the grouping. Experts and GPUs that hold a part of each other form connected groups; a group
of m experts on k GPUs of S slots has m <= k (S - 1) + 1 and a load of at most k times the largest. Conversely any such group
can be cut so that each of its GPUs carries the same (`lay`). Source: McNaughton's wrap-around (1959), with slots as in Chung,
Graham, Mao and Varghese, "Parallelism versus memory allocation in pipelined router forwarding engines" (2006).
"""

import numpy as np
from numba import njit

from aurora.planner.replication.packing import CLOSE, EMPTY


@njit(cache=True)
def group_experts(load_E, gpus, slots, most, group_E, gpus_J):
    """Groups whose load is at most `most` a GPU, by greed; gives their number, or -1 where they need more than `gpus`.

    The largest expert left opens a group with as few GPUs as can also take the smallest companions; its companions are then
    the largest that still fit, one after the other, so that the small ones are saved for who needs them.
    """
    experts = load_E.shape[0]
    falling_E = np.argsort(-load_E, kind="mergesort")
    group_E[:] = -1
    number = 0
    used = 0
    left = experts
    companions_X = np.empty(experts, dtype=np.int64)  # the smallest experts that are left, rising
    for opener in falling_E:
        if group_E[opener] >= 0:
            continue
        group_E[opener] = number
        left -= 1
        width = max(1, int(np.ceil(load_E[opener] / most * (1.0 - CLOSE))))
        while True:
            wanted = min(width * (slots - 1), left)
            count = 0
            small = 0.0
            for at in range(experts - 1, -1, -1):
                if count == wanted:
                    break
                if group_E[falling_E[at]] < 0:
                    companions_X[count] = falling_E[at]
                    small += load_E[falling_E[at]]
                    count += 1
            if load_E[opener] + small <= width * most * (1.0 + CLOSE):
                break
            width += 1
        room = width * most * (1.0 + CLOSE) - load_E[opener]
        for taken in range(wanted, 0, -1):
            small -= load_E[companions_X[taken - 1]]
            for expert in falling_E:
                if group_E[expert] < 0 and load_E[expert] + small <= room:
                    break
            group_E[expert] = number
            left -= 1
            room -= load_E[expert]
            # The smallest that are left for the rest: unchanged, unless the chosen is one of them.
            for at in range(taken - 1):
                if companions_X[at] == expert:
                    small += load_E[companions_X[taken - 1]] - load_E[expert]
                    for later in range(at, taken - 1):
                        companions_X[later] = companions_X[later + 1]
                    break
        gpus_J[number] = width
        number += 1
        used += width
        if used > gpus:
            return -1
    return number


@njit(cache=True)
def lay(load_E, members_X, caps_G, slots_G, gpus_X, held_GP, part_GP):
    """Cut the experts members_X over the GPUs gpus_X, each filled to its caps_G; gives whether all found a place.

    A GPU takes fewer experts whole than it has slots, and of one more as much as fills it. Never fails where caps and slots are
    equal, the caps add up to the load, and the experts are at most GPUs x (slots - 1) + 1. An expert comes back to a GPU
    never: each is left when it is full.
    """
    count = members_X.shape[0]
    expert_X = members_X[np.argsort(load_E[members_X], kind="mergesort")].copy()
    left_X = load_E[expert_X].copy()
    for turn in range(gpus_X.shape[0]):
        gpu = gpus_X[turn]
        if turn == gpus_X.shape[0] - 1:
            if count > slots_G[gpu]:
                return False
            for at in range(count):
                held_GP[gpu, at] = expert_X[at]
                part_GP[gpu, at] = left_X[at]
            return True
        cap = caps_G[gpu]
        chosen = np.zeros(count, dtype=np.bool_)
        whole = min(slots_G[gpu], count) - 1
        total = 0.0
        for at in range(whole):
            total += left_X[at]
            chosen[at] = True
        while whole > 0 and total > cap * (1.0 + CLOSE):
            whole -= 1
            total -= left_X[whole]
            chosen[whole] = False
        cut = count - 1
        if total + left_X[cut] < cap:  # raise the chosen one by one to the largest until they fill the GPU
            total += left_X[cut]
            chosen[cut] = True
            for step in range(whole):
                low = whole - 1 - step
                high = count - 2 - step
                if high <= low:
                    break
                chosen[low] = False
                total -= left_X[low]
                cut = low + 1
                while cut < high and total + left_X[cut] < cap:
                    cut += 1
                if total + left_X[cut] >= cap:
                    break
                chosen[cut] = True
                total += left_X[cut]
                cut = -1
        place = 0
        for at in range(count):
            if chosen[at]:
                held_GP[gpu, place] = expert_X[at]
                part_GP[gpu, place] = left_X[at]
                place += 1
        if cut >= 0 and not chosen[cut]:
            part = min(left_X[cut], cap - total)
            held_GP[gpu, place] = expert_X[cut]
            part_GP[gpu, place] = part
            left_X[cut] -= part
            if left_X[cut] <= cap * CLOSE:
                part_GP[gpu, place] += left_X[cut]
                chosen[cut] = True
        kept = np.flatnonzero(~chosen)
        rising = kept[np.argsort(left_X[kept], kind="mergesort")]
        expert_X = expert_X[rising].copy()
        left_X = left_X[rising].copy()
        count = rising.shape[0]
    return count == 0


@njit(cache=True)
def lay_groups(load_E, group_E, gpus_J, slots, held_GP, part_GP):
    """Each group over its own GPUs of `slots` slots, every GPU of a group to the same load; held_GP and part_GP are filled."""
    gpus = held_GP.shape[0]
    held_GP[:] = EMPTY
    part_GP[:] = 0.0
    slots_G = np.full(gpus, slots)
    first = 0
    for group in range(gpus_J.shape[0]):
        members_X = np.flatnonzero(group_E == group)
        caps_G = np.full(gpus, load_E[members_X].sum() / gpus_J[group])
        if not lay(load_E, members_X, caps_G, slots_G, np.arange(first, first + gpus_J[group]), held_GP, part_GP):
            return False
        first += gpus_J[group]
    return True


@njit(cache=True)
def wrap(load_E, gpus, slots, bound, held_GP, part_GP):
    """Group and lay for the smallest largest load that the greed finds from `bound` up, by bisection; gives it, or infinity."""
    experts = load_E.shape[0]
    group_E = np.zeros(experts, dtype=np.int64)
    try_E = np.zeros(experts, dtype=np.int64)
    gpus_J = np.zeros(experts, dtype=np.int64)
    try_J = np.zeros(experts, dtype=np.int64)
    if experts - 1 <= gpus * (slots - 1):
        number = 1
        gpus_J[0] = gpus
    else:
        low = bound
        high = bound
        number = group_experts(load_E, gpus, slots, bound, group_E, gpus_J)
        while number < 0:
            low = high
            high *= 1.25
            number = group_experts(load_E, gpus, slots, high, group_E, gpus_J)
        for _ in range(40):
            if high - low <= low * 1e-9:
                break
            middle = (low + high) / 2
            found = group_experts(load_E, gpus, slots, middle, try_E, try_J)
            if found < 0:
                low = middle
            else:
                high = middle
                number = found
                group_E[:] = try_E
                gpus_J[:] = try_J
    load_J = np.zeros(number)
    for expert in range(experts):
        load_J[group_E[expert]] += load_E[expert]
    for _ in range(gpus - gpus_J[:number].sum()):
        gpus_J[np.argmax(load_J / gpus_J[:number])] += 1
    if not lay_groups(load_E, group_E, gpus_J[:number], slots, held_GP, part_GP):
        return np.inf
    return (load_J / gpus_J[:number]).max()
