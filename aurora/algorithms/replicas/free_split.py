"""Free-split placements, compiled: McNaughton's wrap-around, and the best load split of given slots.

Wrap-around (`wrap_around`): experts are laid along a line, which is cut where a GPU is full. A group of m experts can be cut
over k GPUs of S slots so that each GPU carries the same load, if m <= k (S - 1) + 1. Conversely, in any placement the experts
and GPUs that are connected by shared experts form groups with this property. So only the choice of groups is heuristic.

Load split (`minimise_max_time`): the best split of each expert's load over its replicas when their GPUs are fixed. Exact.

Source: McNaughton's wrap-around rule (1959). With slots: Chung, Graham, Mao and Varghese, "Parallelism versus memory allocation
in pipelined router forwarding engines" (2006).
"""

import numpy as np

from aurora.algorithms.replicas.slot_packing import CLOSE
from aurora.types.compiled import njit
from aurora.types.placement import EMPTY


@njit(cache=True)
def _group_experts(load_E, gpus, slots, most, group_E, gpus_J):
    """Forms groups greedily so that their load per GPU is at most `most`; returns their number, -1 if GPUs do not suffice.

    The largest ungrouped expert opens a group, with as few GPUs as can also take the smallest companions. Its companions are
    then chosen one by one, each the largest that still fits, so that small experts are left for the groups that need them.
    Fills group_E (E,) with each expert's group and gpus_J (E,) with each group's number of GPUs.
    """
    falling_E = np.argsort(-load_E, kind="mergesort")
    group_E[:] = -1
    groups = 0
    used = 0
    for opener in falling_E:
        if group_E[opener] >= 0:
            continue
        group_E[opener] = groups
        width, companions_X, small = _opened_group(load_E, opener, falling_E, slots, most, group_E)
        spare = width * most * (1.0 + CLOSE) - load_E[opener]
        _add_companions(load_E, falling_E, small, spare, groups, group_E, companions_X)
        gpus_J[groups] = width
        groups += 1
        used += width
        if used > gpus:
            return -1
    return groups


@njit(cache=True)
def _opened_group(load_E, opener, falling_E, slots, most, group_E):
    """The fewest GPUs on which `opener` fits together with the smallest ungrouped experts.

    Returns the number of GPUs, the smallest companions that fill their slots, rising, and the load of these.
    """
    rising_X = falling_E[::-1]
    rising_X = rising_X[group_E[rising_X] < 0]
    width = max(1, int(np.ceil(load_E[opener] / most * (1.0 - CLOSE))))
    while True:
        companions_X = rising_X[: width * (slots - 1)]
        small = 0.0
        for expert in companions_X:
            small += load_E[expert]
        if load_E[opener] + small <= width * most * (1.0 + CLOSE):
            return width, companions_X, small
        width += 1


@njit(cache=True)
def _add_companions(load_E, falling_E, small, spare, group, group_E, companions_X):
    """Give `group` its companions: each the largest expert beside which the smallest ones still fit into the `spare` load."""
    for count in range(len(companions_X), 0, -1):
        small -= load_E[companions_X[count - 1]]
        for expert in falling_E:
            if group_E[expert] < 0 and load_E[expert] + small <= spare:
                break
        group_E[expert] = group
        spare -= load_E[expert]
        # The smallest companions of the remaining slots change only if the chosen expert is one of them.
        for at in range(count - 1):
            if companions_X[at] == expert:
                small += load_E[companions_X[count - 1]] - load_E[expert]
                for later in range(at, count - 1):
                    companions_X[later] = companions_X[later + 1]
                break


@njit(cache=True)
def wrap_around(load_E, members_X, caps_G, slots_G, gpus_X, held_GP, part_GP):
    """Cuts experts over GPUs so that each GPU is filled to its capacity.

    A GPU of S slots gets up to S - 1 whole experts, and the part of one more expert that fills it. This never fails if all GPUs
    have equal capacities and slots, the capacities sum to the load, and there are at most GPUs x (S - 1) + 1 experts. No expert
    is twice on a GPU, since each GPU is filled before the next.

    Args:
        load_E: (E,) float64, the loads.
        members_X: (X,) int64, the experts to place.
        caps_G: (G,) float64, the load that each GPU takes.
        slots_G: (G,) int64, the slots of each GPU.
        gpus_X: int64, the GPUs to fill, in sequence.
        held_GP: (G, P) int64, receives the expert in each slot.
        part_GP: (G, P) float64, receives the load that each slot carries of its expert.

    Returns:
        Whether every expert found a slot.
    """
    expert_X = members_X[np.argsort(load_E[members_X], kind="mergesort")].copy()
    left_X = load_E[expert_X].copy()
    for gpu in gpus_X[:-1]:
        cap = caps_G[gpu]
        cut, total, chosen_X = _choose_experts(left_X, slots_G[gpu], cap)
        slot = 0
        for at in range(expert_X.shape[0]):
            if chosen_X[at]:
                held_GP[gpu, slot] = expert_X[at]
                part_GP[gpu, slot] = left_X[at]
                slot += 1
        if cut >= 0 and not chosen_X[cut]:
            part = min(left_X[cut], cap - total)
            held_GP[gpu, slot] = expert_X[cut]
            part_GP[gpu, slot] = part
            left_X[cut] -= part
            if left_X[cut] <= cap * CLOSE:
                part_GP[gpu, slot] += left_X[cut]
                chosen_X[cut] = True
        rest_X = np.flatnonzero(~chosen_X)
        rising = rest_X[np.argsort(left_X[rest_X], kind="mergesort")]
        expert_X = expert_X[rising].copy()
        left_X = left_X[rising].copy()
    last, count = gpus_X[-1], expert_X.shape[0]
    if count > slots_G[last]:
        return False
    held_GP[last, :count] = expert_X
    part_GP[last, :count] = left_X
    return True


@njit(cache=True)
def _choose_experts(left_X, slots, cap):
    """Choose from the rising loads left_X the whole experts and the part of one more that fill a GPU of `slots` slots to `cap`.

    Returns the index of the expert that is cut (-1: none), the load of the whole experts, and their mask.
    """
    count = left_X.shape[0]
    chosen_X = np.zeros(count, dtype=np.bool_)
    whole = min(slots, count) - 1
    total = 0.0
    for at in range(whole):
        total += left_X[at]
        chosen_X[at] = True
    while whole > 0 and total > cap * (1.0 + CLOSE):
        whole -= 1
        total -= left_X[whole]
        chosen_X[whole] = False
    cut = count - 1
    if total + left_X[cut] >= cap:
        return cut, total, chosen_X
    total += left_X[cut]
    chosen_X[cut] = True
    for step in range(whole):  # raise the chosen one by one to the largest until they fill the GPU
        low = whole - 1 - step
        high = count - 2 - step
        if high <= low:
            break
        chosen_X[low] = False
        total -= left_X[low]
        cut = low + 1
        while cut < high and total + left_X[cut] < cap:
            cut += 1
        if total + left_X[cut] >= cap:
            break
        chosen_X[cut] = True
        total += left_X[cut]
        cut = -1
    return cut, total, chosen_X


@njit(cache=True)
def _wrap_groups(load_E, group_E, gpus_J, slots, held_GP, part_GP):
    """Cuts each group over its own GPUs by `wrap_around`, with equal loads; returns whether every expert found a slot."""
    gpus = held_GP.shape[0]
    held_GP[:] = EMPTY
    part_GP[:] = 0.0
    slots_G = np.full(gpus, slots)
    first = 0
    for group in range(gpus_J.shape[0]):
        members_X = np.flatnonzero(group_E == group)
        caps_G = np.full(gpus, load_E[members_X].sum() / gpus_J[group])
        if not wrap_around(load_E, members_X, caps_G, slots_G, np.arange(first, first + gpus_J[group]), held_GP, part_GP):
            return False
        first += gpus_J[group]
    return True


@njit(cache=True)
def place_by_groups(load_E, gpus, slots, bound, held_GP, part_GP):
    """Divides experts into groups with separate GPUs, and cuts each group over its GPUs (`wrap_around`).

    A greedy search chooses groups so that the largest load of a GPU is small.

    Args:
        load_E: (E,) float64, the loads.
        gpus, slots: number of GPUs, which are equal, and of slots on each.
        bound: a lower bound on the largest load of a GPU, where the search starts.
        held_GP, part_GP: as in `wrap_around`.

    Returns:
        The largest load of a GPU, or infinity if an expert finds no slot.
    """
    experts = load_E.shape[0]
    group_E = np.zeros(experts, dtype=np.int64)
    gpus_J = np.zeros(experts, dtype=np.int64)
    if experts - 1 <= gpus * (slots - 1):
        groups = 1
        gpus_J[0] = gpus
    else:
        groups = _best_groups(load_E, gpus, slots, bound, group_E, gpus_J)
    load_J = np.zeros(groups)
    for expert in range(experts):
        load_J[group_E[expert]] += load_E[expert]
    for _ in range(gpus - gpus_J[:groups].sum()):  # GPUs left over
        gpus_J[np.argmax(load_J / gpus_J[:groups])] += 1
    if not _wrap_groups(load_E, group_E, gpus_J[:groups], slots, held_GP, part_GP):
        return np.inf
    return (load_J / gpus_J[:groups]).max()


@njit(cache=True)
def _best_groups(load_E, gpus, slots, bound, group_E, gpus_J):
    """Fill group_E and gpus_J for the smallest largest load that `_group_experts` finds, by bisection. Returns their number."""
    try_E = np.zeros_like(group_E)
    try_J = np.zeros_like(gpus_J)
    low = bound
    high = bound
    groups = _group_experts(load_E, gpus, slots, bound, group_E, gpus_J)
    while groups < 0:
        low = high
        high *= 1.25
        groups = _group_experts(load_E, gpus, slots, high, group_E, gpus_J)
    for _ in range(40):
        if high - low <= low * 1e-9:
            break
        middle = (low + high) / 2
        formed = _group_experts(load_E, gpus, slots, middle, try_E, try_J)
        if formed < 0:
            low = middle
        else:
            high = middle
            groups = formed
            group_E[:] = try_E
            gpus_J[:] = try_J
    return groups


UNREACHED = -2
START = -1


@njit(cache=True)
def minimise_max_time(held_GP, cost_G, part_GP):
    """Splits experts' loads over their replicas so that the largest time of a GPU is the least possible.

    Load moves from a GPU above a target time to a GPU below it, along the shortest chain of GPUs that share experts. If no
    chain reaches a GPU below it, the load of the reached GPUs cannot go elsewhere: their mean time is a lower bound, and
    becomes the target (Newton's method on the cuts of a flow).

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
    held_X = held_GP.ravel()
    owner_X = np.argsort(held_X, kind="mergesort")[(held_X < 0).sum() :]  # empty slots come first
    return np.append(0, np.cumsum(np.bincount(held_X[owner_X]))), owner_X


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
