"""Equal-split replica placement, compiled: replica counts, then packing replicas into GPU slots, then swaps.

`pack_with_best_counts` is the search: it packs with the counts of several rules, then walks randomly over counts. It evaluates
counts with `pack`: longest processing time first, then a descent by swaps. A packing has no state beside its slots, since the
walk makes thousands of them; `swap_descent` levels the GPUs of servers too.

All functions share these arguments:

- load_E: (E,) float64, the load of each expert
- count_E: (E,) int64, the replicas of each expert
- slots_G: (G,) int64, the slots of each GPU
- cost_G: (G,) float64, the cost of a unit of load on each GPU
- held_GP: (G, P) int64, the expert in each slot, EMPTY for an empty slot; no expert is twice on a GPU
- time_G: (G,) float64, the time of each GPU: its load times its cost

Without numba's JIT (NUMBA_DISABLE_JIT=1) the same code runs in plain Python.
"""

import numpy as np

from aurora.types.compiled import njit
from aurora.types.placement import EMPTY

CLOSE = 1e-12  # relative: values that differ by less are equal


@njit(cache=True)
def eplb_counts(load_E, slots, most):
    """Returns replica counts (E,), up to `most` each, that fill `slots` slots.

    Each expert gets one; each further slot goes to the expert with the largest load per replica.
    """
    count_E = np.ones(load_E.shape[0], dtype=np.int64)
    for _ in range(slots - load_E.shape[0]):
        chosen = -1
        for expert in range(load_E.shape[0]):
            if count_E[expert] < most and (
                chosen < 0 or load_E[expert] * count_E[chosen] > load_E[chosen] * count_E[expert] * (1.0 + CLOSE)
            ):
                chosen = expert
        if chosen < 0:
            break
        count_E[chosen] += 1
    return count_E


@njit(cache=True)
def greedy_max_time(load_E, slots_G, cost_G):
    """Returns the largest time of a GPU in an EPLB-like greedy placement, an upper limit for searches to start from.

    Replica counts are those of `eplb_counts`; replicas go, largest first, to the GPU with the least load. An expert may be
    twice on a GPU.
    """
    count_E = eplb_counts(load_E, slots_G.sum(), slots_G.sum())
    load_G, used_G = np.zeros(slots_G.shape[0]), np.zeros(slots_G.shape[0], dtype=np.int64)
    for expert in np.argsort(-load_E / count_E, kind="mergesort"):
        for _ in range(count_E[expert]):
            chosen = -1
            for gpu in range(slots_G.shape[0]):
                if used_G[gpu] < slots_G[gpu] and (chosen < 0 or load_G[gpu] < load_G[chosen]):
                    chosen = gpu
            load_G[chosen] += load_E[expert] / count_E[expert]
            used_G[chosen] += 1
    return (load_G * cost_G).max()


@njit(cache=True)
def _holds(held_P, expert):
    """Returns whether the slots held_P, (P,) int64, of a GPU hold the expert."""
    for other in held_P:  # noqa: SIM110 (numba compiles no generators)
        if other == expert:
            return True
    return False


@njit(cache=True)
def pack(load_E, count_E, slots_G, cost_G, enough, held_GP):
    """Packs count_E[e] replicas of each expert e into GPU slots, and returns the largest time of a GPU.

    Replicas are packed by longest processing time first, then swapped until the largest time is `enough` or less. Fills
    held_GP, and lowers count_E for replicas that find no slot. Arrays are as in the module.
    """
    size_X = np.append(load_E / count_E, 0.0)  # of each expert's replicas; the last is that of an empty slot
    time_G = np.zeros(slots_G.shape[0])
    _longest_processing_time(load_E, count_E, size_X, slots_G, cost_G, held_GP, time_G)
    if time_G.max() > enough:
        swap_descent(cost_G.reshape(-1, 1) * size_X, slots_G, held_GP, time_G, enough)
    if time_G.max() > enough:
        _refresh_times(size_X, cost_G, held_GP, time_G)
    return time_G.max()


@njit(cache=True)
def _longest_processing_time(load_E, count_E, size_X, slots_G, cost_G, held_GP, time_G):
    """Packs replicas, largest first, each onto the GPU with an empty slot that ends first with it; fills held_GP and time_G.

    If only GPUs that hold the expert have empty slots, another replica moves there from a full GPU without the expert, which
    frees a slot. A replica that still finds no slot is taken off count_E.
    """
    held_GP[:] = EMPTY
    used_G = np.zeros(slots_G.shape[0], dtype=np.int64)
    lost = False
    for expert in np.argsort(-size_X[:-1], kind="mergesort"):
        size = size_X[expert]
        for placed in range(count_E[expert]):
            chosen = -1
            best = np.inf
            for gpu in range(slots_G.shape[0]):
                ends = time_G[gpu] + size * cost_G[gpu]
                if used_G[gpu] < slots_G[gpu] and ends < best * (1.0 - CLOSE) and not _holds(held_GP[gpu], expert):
                    chosen = gpu
                    best = ends
            if chosen < 0:
                chosen = _free_slot(size_X, slots_G, cost_G, held_GP, time_G, used_G, expert)
            if chosen < 0:
                lost = True
                count_E[expert] = placed
                size_X[expert] = load_E[expert] / max(1, placed)
                break
            held_GP[chosen, used_G[chosen]] = expert
            used_G[chosen] += 1
            time_G[chosen] += size * cost_G[chosen]
    if lost:
        _refresh_times(size_X, cost_G, held_GP, time_G)


@njit(cache=True)
def _free_slot(size_X, slots_G, cost_G, held_GP, time_G, used_G, expert):
    """Moves a replica from a full GPU without `expert` to one with an empty slot. Returns the GPU of the freed slot, or -1."""
    for open_gpu in np.flatnonzero(used_G < slots_G):
        for full in range(slots_G.shape[0]):
            if _holds(held_GP[full], expert):
                continue
            for slot in range(used_G[full]):
                other = held_GP[full, slot]
                if not _holds(held_GP[open_gpu], other):
                    held_GP[open_gpu, used_G[open_gpu]] = other
                    used_G[open_gpu] += 1
                    time_G[open_gpu] += size_X[other] * cost_G[open_gpu]
                    used_G[full] -= 1
                    held_GP[full, slot] = held_GP[full, used_G[full]]
                    held_GP[full, used_G[full]] = EMPTY
                    time_G[full] -= size_X[other] * cost_G[full]
                    return full
    return -1


@njit(cache=True)
def _refresh_times(size_X, cost_G, held_GP, time_G):
    """Computes time_G anew from the slots, without the rounding errors of many changes."""
    for gpu in range(held_GP.shape[0]):
        time_G[gpu] = size_X[held_GP[gpu]].sum() * cost_G[gpu]


@njit(cache=True, nogil=True)
def swap_descent(part_GX, slots_G, held_GP, time_G, enough):
    """Swaps replicas of the slowest GPU for smaller ones, or for empty slots, of other GPUs while that lowers its time.

    Each step takes the swap after which the slower of the two GPUs is fastest. It stops once the largest time is `enough` or
    less. Changes held_GP and time_G in place.

    Args:
        part_GX: (G, E + 1) the time of a replica of each expert on each GPU; the last column, of an empty slot, is zero.
        slots_G, held_GP, time_G: as in the module.
        enough: a largest time at which to stop.
    """
    while time_G.max() > enough:
        worst = np.argmax(time_G)
        slot, gpu, place = _best_swap(part_GX, slots_G, held_GP, time_G, worst)
        if slot < 0:
            return
        mine, theirs = held_GP[worst, slot], held_GP[gpu, place]
        held_GP[worst, slot], held_GP[gpu, place] = theirs, mine
        time_G[worst] += part_GX[worst, theirs] - part_GX[worst, mine]
        time_G[gpu] += part_GX[gpu, mine] - part_GX[gpu, theirs]


@njit(cache=True, nogil=True)
def _best_swap(part_GX, slots_G, held_GP, time_G, worst):
    """The swap (slot of GPU `worst`, other GPU, slot there) after which the slower of both is fastest; slot -1: none helps."""
    best = time_G[worst] * (1.0 - CLOSE)
    at_slot = at_gpu = at_place = -1
    for slot in range(slots_G[worst]):
        mine = held_GP[worst, slot]
        for gpu in range(slots_G.shape[0]):
            if gpu == worst or time_G[gpu] >= best:
                continue
            for place in range(slots_G[gpu]):
                theirs = held_GP[gpu, place]
                ours = time_G[worst] + part_GX[worst, theirs] - part_GX[worst, mine]
                after = max(ours, time_G[gpu] + part_GX[gpu, mine] - part_GX[gpu, theirs])
                if after < best and not _holds(held_GP[gpu], mine) and (theirs == EMPTY or not _holds(held_GP[worst], theirs)):
                    best = after
                    at_slot, at_gpu, at_place = slot, gpu, place
    return at_slot, at_gpu, at_place


@njit(cache=True)
def _counts_by_size(load_E, size, slots, most):
    """Chooses replica counts (E,) so that no replica is larger than `size`; spare slots go to the largest load / count^2.

    Replicas a little smaller than a GPU's mean load can share a GPU with the small experts. Spare slots then help more if they
    split experts of medium load than if they split the hottest expert once more. All counts are zero if there are too few
    slots.
    """
    count_E = np.ones(load_E.shape[0], dtype=np.int64)
    for expert in range(load_E.shape[0]):
        count_E[expert] = min(most, max(1, int(np.ceil(load_E[expert] / size * (1.0 - CLOSE)))))
    spare = slots - count_E.sum()
    if spare < 0:
        count_E[:] = 0
    for _ in range(spare):
        chosen = -1
        most_gain = -1.0
        for expert in range(load_E.shape[0]):
            gain = load_E[expert] / (count_E[expert] * count_E[expert])
            if count_E[expert] < most and gain > most_gain * (1.0 + CLOSE):
                chosen = expert
                most_gain = gain
        if chosen < 0:
            break
        count_E[chosen] += 1
    return count_E


@njit(cache=True)
def fill_slots(load_E, slots_G, cost_G, most, count_E, held_GP):
    """Fills each empty slot with the expert of the largest load per replica that keeps the GPU's time within `most`.

    A slot stays empty if all experts that fit are on its GPU already. Changes count_E and held_GP in place.
    """
    for gpu in range(held_GP.shape[0]):
        for slot in range(slots_G[gpu]):
            if held_GP[gpu, slot] >= 0:
                continue
            load = 0.0
            for other in held_GP[gpu]:
                load += load_E[other] / count_E[other] if other >= 0 else 0.0
            chosen = -1
            for expert in range(load_E.shape[0]):
                if (
                    (chosen < 0 or load_E[expert] * count_E[chosen] > load_E[chosen] * count_E[expert])
                    and (load + load_E[expert] / (count_E[expert] + 1)) * cost_G[gpu] <= most
                    and not _holds(held_GP[gpu], expert)
                ):
                    chosen = expert
            if chosen >= 0:
                held_GP[gpu, slot] = chosen
                count_E[chosen] += 1


@njit(cache=True)
def pack_with_best_counts(load_E, slots_G, cost_G, sizes_X, draws_X3, enough, count_E, held_GP):
    """Searches for the replica counts whose packing has the smallest largest time, and returns that time.

    Args:
        load_E, slots_G, cost_G: as in the module.
        sizes_X: (X,) float64, limits on the load of a replica; the counts that follow from each are tried first.
        draws_X3: (X, 3) random numbers in [0, 1), a row for each step of the walk over counts.
        enough: a largest time at which the search stops.
        count_E, held_GP: filled with the best counts and their packing.
    """
    most, slots = slots_G.shape[0], slots_G.sum()
    try_GP = np.empty_like(held_GP)
    best = np.inf
    for attempt in range(sizes_X.shape[0] + 1):
        if attempt == sizes_X.shape[0]:
            try_E = eplb_counts(load_E, slots, most)
        elif sizes_X[attempt] > 0.0:
            try_E = _counts_by_size(load_E, sizes_X[attempt], slots, most)
        else:
            continue
        if try_E[0] == 0:
            continue
        packed_s = pack(load_E, try_E, slots_G, cost_G, enough, try_GP)
        if packed_s < best * (1.0 - CLOSE) or best == np.inf:
            best = packed_s
            count_E[:] = try_E
            held_GP[:] = try_GP
        if best <= enough:
            return best
    return _walk_over_counts(load_E, slots_G, cost_G, draws_X3, enough, best, count_E, held_GP)


@njit(cache=True)
def _walk_over_counts(load_E, slots_G, cost_G, draws_X3, enough, best, count_E, held_GP):
    """Improve count_E and held_GP, whose largest time is `best`, by a random walk over counts. Returns the largest time.

    Each step moves one slot from one expert to another, empties a slot, or fills an empty one. The walk accepts a step that is
    worse by less than a random margin, which falls to zero (threshold accepting).
    """
    experts, most, slots, steps = load_E.shape[0], slots_G.shape[0], slots_G.sum(), draws_X3.shape[0]
    try_GP = np.empty_like(held_GP)
    now, here_E = best, count_E.copy()
    for step in range(steps):
        if best <= enough:
            break
        gains = int(draws_X3[step, 0] * (experts + 1))  # `experts` stands for an empty slot
        gives = int(draws_X3[step, 1] * (experts + 1))
        can_give = here_E[gives] >= 2 if gives < experts else here_E.sum() < slots
        if gains == gives or not can_give or (gains < experts and here_E[gains] >= most):
            continue
        try_E = here_E.copy()
        if gains < experts:
            try_E[gains] += 1
        if gives < experts:
            try_E[gives] -= 1
        packed_s = pack(load_E, try_E, slots_G, cost_G, enough, try_GP)
        if packed_s <= now * (1.0 + 0.5 * draws_X3[step, 2] * (1.0 - step / steps)):
            now = packed_s
            here_E[:] = try_E
        if packed_s < best * (1.0 - CLOSE):
            best = packed_s
            count_E[:] = try_E
            held_GP[:] = try_GP
    return best
