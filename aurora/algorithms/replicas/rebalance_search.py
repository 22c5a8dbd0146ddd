"""Search of `rebalance` on one layer: steps that take load from its slowest GPU, the largest relief per move first.

Replicas share their expert's load evenly. The time of a GPU is its load times its cost. A step takes load from the slowest GPU
of a layer: it swaps two replicas; moves one to an empty slot; gives an expert a further replica, in an empty slot or in place
of another replica; or replaces a replica by another expert. Afterwards each changed GPU is faster than the slowest GPU was
before. Every expert keeps its min replicas.

A move is an expert whose weights a GPU fetches because it did not hold them at the start. The step with the largest relief per
move is taken. With x the excess of a GPU's time over the target, relief is the fall of the sum of x + x^2 over the changed
GPUs, so that slow GPUs count more. Most swaps need no evaluation: at best both GPUs are equally slow afterwards, which bounds
the relief.

If few slots hold large replicas, no step may help early on. Then a second search starts: it first gives the experts with large
replicas further ones, in place of the replicas that are needed least, whatever the GPUs' times. The better result is returned.

Slots are those of `search/slot_state`, with one sum for each GPU, its time. The steps differ from those of `slot_search`:
they count moves, and relieve one of several slowest GPUs at a time, although the largest time of all GPUs stays the same.

Without numba's JIT (NUMBA_DISABLE_JIT=1) the same code runs in plain Python.
"""

from typing import NamedTuple

import numpy as np

from aurora.algorithms.search.slot_state import PhaseSums, overwrite, start_slots, swap
from aurora.types.arrays import BoolArray, FloatArray, IntArray
from aurora.types.compiled import njit
from aurora.types.placement import EMPTY_INT64 as EMPTY

LEAST_RELIEF = 1e-9  # relative: a smaller one is none
LARGE = 0.5  # of the target time: experts with larger replicas may be divided further
SMALLER = 0.9  # times a divided expert's replicas that those of the expert which gives a slot up are at most
WORTH_DIVIDING = 0.01  # relative: dividing experts must lower the largest time by as much more
STEPS_PER_SLOT = 8  # per slot: more steps than a layer ever took
SLOWER_COUNTS = 40.0  # at 1 / 40 above the target, a further second counts three times as much as at the target
FEWEST_MOVES = 0.5  # a step without moves counts as half a one
NO_STEP, SWAP, REPLACE = range(3)


class Layer(NamedTuple):
    """Costs and loads of one layer, and the limits that changes of its slots must keep.

    Attributes:
        load_E: (E,) the load of each expert.
        cost_G: (G,) the cost of a unit of load on each GPU.
        times: the time that each expert adds to each GPU, its load times the GPU's cost, as PhaseSums with one traffic case.
        was_GE: (G, E) bool, whether a GPU held an expert at the start.
        domain_G: (G,) int64, the failure domain of each GPU.
        least_E: (E,) int64, minimum replicas of each expert.
        least_domains_E: (E,) int64, minimum number of failure domains that hold each expert.
    """

    load_E: FloatArray
    cost_G: FloatArray
    times: PhaseSums
    was_GE: BoolArray
    domain_G: IntArray
    least_E: IntArray
    least_domains_E: IntArray


class Step(NamedTuple):
    """A change of slots. SWAP: two slots swap experts; the second may be empty. REPLACE: the second slot gets a new expert."""

    kind: int
    gpu: int  # SWAP: the GPU of the first slot
    slot: int
    to_gpu: int
    to_slot: int
    expert: int  # REPLACE: what comes into the second slot
    moves: int  # how many more experts the GPUs hold that they did not hold at the start
    relief: float  # for each move


@njit(cache=True, nogil=True)
def rebalance_layer(load_E, cost_G, slots_G, held_GP, most, worth, target, min_replicas, domain_G):
    """Rebalances one layer's slots in place; returns (moves, largest time before, largest time after).

    It stops at the largest time `target`, after at most `most` moves, or if no step helps. The slots stay as they are if that
    lowers the largest time by less than the part `worth`. Each expert keeps `min_replicas`, in as many failure domains, or what
    it has at the start if that is less.
    """
    before = _largest_time(load_E, cost_G, held_GP)
    if before <= target:
        return 0, before, before
    part_E = load_E / target  # so that the target is 1
    layer, slots = _start(part_E, cost_G, slots_G, held_GP, min_replicas, domain_G)
    _search(layer, slots, most)
    mean = part_E.sum() / (1 / cost_G).sum()
    if slots.sum_s_GXW.max() > max(1.0, mean / (1 - WORTH_DIVIDING)):  # otherwise there is too little to win
        layer, other = _start(part_E, cost_G, slots_G, held_GP, min_replicas, domain_G)
        _divide(layer, other)
        if _moved(layer, other) <= most:
            _search(layer, other, most)
        if _moved(layer, other) <= most and other.sum_s_GXW.max() < slots.sum_s_GXW.max() * (1 - WORTH_DIVIDING):
            slots = other
    moves = _moved(layer, slots)
    _keep_slots(held_GP, slots)
    after = _largest_time(load_E, cost_G, slots.held_GP)
    if moves == 0 or after >= before * (1 - max(worth, LEAST_RELIEF)):
        return 0, before, before
    held_GP[:] = slots.held_GP
    return moves, before, after


@njit(cache=True, nogil=True)
def _start(load_E, cost_G, slots_G, held_GP, min_replicas, domain_G):
    """The Layer of a start and its Slots, whose experts divide their load evenly over their replicas."""
    gpus, experts = len(cost_G), len(load_E)
    part_GEXW = np.empty((gpus, experts, 1, 1))
    for g in range(gpus):
        for e in range(experts):
            part_GEXW[g, e, 0, 0] = load_E[e] * cost_G[g]
    times = PhaseSums(part_GEXW, np.zeros((gpus, 1, 1)), np.zeros(1), slots_G, 1)
    slots = start_slots(times, held_GP.copy(), np.zeros(held_GP.shape))
    least_E, least_domains_E = np.minimum(slots.count_E, min_replicas), np.full(experts, min_replicas)
    layer = Layer(load_E, cost_G, times, slots.holds_GE.copy(), domain_G, least_E, least_domains_E)
    for g in range(gpus):
        for p in range(held_GP.shape[1]):
            e = slots.held_GP[g, p]
            if e != EMPTY:
                slots.share_GP[g, p] = 1.0 / slots.count_E[e]
                slots.sum_s_GXW[g, 0, 0] += slots.share_GP[g, p] * part_GEXW[g, e, 0, 0]
    for e in range(experts if min_replicas > 1 else 0):
        least_domains_E[e] = min(_domains(layer, slots, e, EMPTY, EMPTY), min_replicas)
    return layer, slots


@njit(cache=True, nogil=True)
def _search(layer, slots, most):
    """Takes steps until the largest time is 1, the target, or no step helps, with at most `most` moves in all."""
    moves, time_G, target = _moved(layer, slots), slots.sum_s_GXW.ravel(), 1.0
    for _ in range(STEPS_PER_SLOT * slots.held_GP.size):
        slowest = np.argmax(time_G)
        if time_G[slowest] <= 1.0:
            break
        step = _best_step(layer, slots, slowest, most - moves, target)
        if step.kind == NO_STEP and (moves == most or time_G[slowest] - target <= WORTH_DIVIDING):
            break
        if step.kind == NO_STEP:  # as far as this target goes: what does not come above a higher one is no loss then
            target = (target + time_G[slowest]) / 2
            continue
        moves, target = moves + step.moves, 1.0
        if step.kind == SWAP:
            swap(layer.times, slots, step.gpu, step.slot, step.to_gpu, step.to_slot)
        else:
            overwrite(layer.times, slots, step.to_gpu, step.to_slot, step.expert)


@njit(cache=True, nogil=True)
def _moved(layer, slots):
    """Number of experts on GPUs that did not hold them at the start."""
    return (slots.holds_GE & ~layer.was_GE).sum()


@njit(cache=True, nogil=True)
def _divide(layer, slots):
    """Gives experts with large replicas further ones, whatever the GPUs' times, in place of those that are needed least."""
    for _ in range(slots.held_GP.size):
        size_E = layer.load_E / slots.count_E
        e, least, to, slot = np.argmax(size_E), np.inf, EMPTY, EMPTY
        size = size_E[e]
        for h in range(len(slots.held_GP) if size > LARGE else 0):
            for q in range(layer.times.slots_G[h] if not slots.holds_GE[h, e] else 0):
                x, after = slots.held_GP[h, q], 0.0  # the replicas of x, once it has given the slot up
                if x != EMPTY:
                    after = layer.load_E[x] / (slots.count_E[x] - 1) if _keeps(layer, slots, x, h, EMPTY) else np.inf
                lighter = after == least and slots.sum_s_GXW[h, 0, 0] < slots.sum_s_GXW[to, 0, 0]
                if after < size * SMALLER and (after < least or lighter):
                    least, to, slot = after, h, q
        if to == EMPTY:
            break
        overwrite(layer.times, slots, to, slot, e)


@njit(cache=True, nogil=True)
def _largest_time(load_E, cost_G, held_GP):
    """The largest time of a GPU if every slot takes the same part of its expert's load."""
    count_X, largest = np.zeros(len(load_E) + 1), 0.0  # the last is of empty slots
    for e in held_GP.flat:
        count_X[e] += 1
    size_X = np.append(load_E, 0.0) / np.maximum(count_X, 1)
    for g in range(len(held_GP)):
        largest = max(largest, size_X[held_GP[g]].sum() * cost_G[g])
    return largest


@njit(cache=True, nogil=True)
def _best_step(layer, slots, g, max_moves, target):
    """The step that relieves GPU g, the slowest, most for each move."""
    over_G, step = np.empty(len(layer.cost_G)), Step(NO_STEP, EMPTY, EMPTY, EMPTY, EMPTY, EMPTY, 0, 0.0)
    for h in range(len(over_G)):
        over_G[h] = _over(slots.sum_s_GXW[h, 0, 0], target)
    step = _best_swap(layer, slots, g, max_moves, target, over_G, step)
    step = _best_further(layer, slots, g, max_moves, target, over_G, step)
    return _best_instead(layer, slots, g, max_moves, target, over_G, step)


@njit(cache=True, nogil=True)
def _best_swap(layer, slots, g, max_moves, target, over_G, step):
    """`step`, or a better one: an expert of GPU g swaps with one of a faster GPU, or moves to an empty slot."""
    cost_G, was_GE, slots_G, bound_E = layer.cost_G, layer.was_GE, layer.times.slots_G, layer.least_domains_E > 1
    held_GP, holds_GE, time_G = slots.held_GP, slots.holds_GE, slots.sum_s_GXW[:, 0, 0]
    size_E, top, best = layer.load_E / slots.count_E, time_G[g], 0.0
    limit, size_P, moves_P = top * (1 - LEAST_RELIEF), np.zeros(held_GP.shape[1]), np.zeros(held_GP.shape[1], dtype=np.int64)
    for h in np.argsort(time_G):
        if time_G[h] >= limit:
            break
        equal = (top * cost_G[h] + time_G[h] * cost_G[g]) / (cost_G[g] + cost_G[h])
        most, least = over_G[g] + over_G[h] - _over(equal, target), 1
        if most <= best * FEWEST_MOVES:
            continue
        for q in range(slots_G[h]):
            b = held_GP[h, q]
            size_P[q] = size_E[b] if b != EMPTY else 0.0
            moves_P[q] = _moves(was_GE, g, b, EMPTY) - _moves(was_GE, h, b, EMPTY)
            least = min(least, moves_P[q])
        for p in range(slots_G[g]):
            a = held_GP[g, p]
            if a == EMPTY or holds_GE[h, a]:
                continue
            moves_a = _moves(was_GE, h, a, EMPTY) - _moves(was_GE, g, a, EMPTY)
            fewest = max(moves_a + least, FEWEST_MOVES)
            if most <= best * fewest or fewest > max_moves + FEWEST_MOVES:
                continue
            for q in range(slots_G[h]):
                less = size_E[a] - size_P[q]
                slower = time_G[h] + less * cost_G[h]
                relief = over_G[g] + over_G[h] - _over(top - less * cost_G[g], target) - _over(slower, target)
                if relief <= best * fewest or less <= 0 or slower >= limit:
                    continue
                b, moves = held_GP[h, q], moves_a + moves_P[q]
                if moves > max_moves or relief <= best * max(moves, FEWEST_MOVES):
                    continue
                if b != EMPTY and (holds_GE[g, b] or (bound_E[b] and not _keeps(layer, slots, b, h, g))):
                    continue
                if not bound_E[a] or _keeps(layer, slots, a, g, h):
                    best = relief / max(moves, FEWEST_MOVES)
                    step = Step(SWAP, g, p, h, q, EMPTY, moves, best)
    return step


@njit(cache=True, nogil=True)
def _best_further(layer, slots, g, max_moves, target, over_G, step):
    """`step`, or a better one: an expert of GPU g gets a further replica, in an empty slot or in place of a shared expert."""
    load_E, cost_G, was_GE, slots_G = layer.load_E, layer.cost_G, layer.was_GE, layer.times.slots_G
    held_GP, count_E, gpu_EG, time_G = slots.held_GP, slots.count_E, slots.gpu_EG, slots.sum_s_GXW[:, 0, 0]
    limit, best, width, candidates = time_G[g] * (1 - LEAST_RELIEF), step.relief, held_GP.shape[1], 0
    at_X = np.empty(held_GP.size, dtype=np.int64)  # slots that may be given up, what that costs, and the load that comes to g
    worse_X, more_X = np.empty((2, held_GP.size))
    for h in range(len(cost_G)):
        for q in range(slots_G[h] if h != g else 0):
            x, slowest, worse, more = held_GP[h, q], 0.0, 0.0, 0.0
            if x != EMPTY:
                if count_E[x] == 1:
                    continue
                more = load_E[x] / (count_E[x] - 1) - load_E[x] / count_E[x]
                slowest, worse = _without(time_G, over_G, cost_G, gpu_EG[x], count_E[x], more, h, g, target)
            if slowest < limit and (x == EMPTY or _keeps(layer, slots, x, h, EMPTY)):
                at_X[candidates], worse_X[candidates] = h * width + q, worse - over_G[h]
                more_X[candidates] = more if x != EMPTY and slots.holds_GE[g, x] else 0.0
                candidates += 1
    for p in range(slots_G[g] if candidates else 0):
        a = held_GP[g, p]
        if a == EMPTY:
            continue
        size, relief_a = load_E[a] / (count_E[a] + 1), 0.0
        alone = time_G[g] - (load_E[a] / count_E[a] - size) * cost_G[g]
        for i in range(count_E[a]):
            k = gpu_EG[a, i]
            relief_a += over_G[k] - _over(time_G[k] - (load_E[a] / count_E[a] - size) * cost_G[k], target)
        for at in range(candidates):
            h, q = at_X[at] // width, at_X[at] % width
            if relief_a - worse_X[at] <= best * FEWEST_MOVES or slots.holds_GE[h, a]:
                continue
            x = held_GP[h, q]
            slower = time_G[h] + (size - (load_E[x] / count_E[x] if x != EMPTY else 0.0)) * cost_G[h]
            slowed = alone + more_X[at] * cost_G[g]
            relief, moves = relief_a - worse_X[at] - _over(slower, target), _moves(was_GE, h, a, x)
            relief -= _over(slowed, target) - _over(alone, target)
            if max(slower, slowed) < limit and moves <= max_moves and relief > best * max(moves, FEWEST_MOVES):
                best = relief / max(moves, FEWEST_MOVES)
                step = Step(REPLACE, EMPTY, EMPTY, h, q, a, moves, best)
    return step


@njit(cache=True, nogil=True)
def _best_instead(layer, slots, g, max_moves, target, over_G, step):
    """`step`, or a better one: another expert takes the place of a shared one of GPU g."""
    load_E, cost_G, was_GE = layer.load_E, layer.cost_G, layer.was_GE
    held_GP, holds_GE, count_E, gpu_EG, time_G = (
        slots.held_GP,
        slots.holds_GE,
        slots.count_E,
        slots.gpu_EG,
        slots.sum_s_GXW[:, 0, 0],
    )
    limit, best = time_G[g] * (1 - LEAST_RELIEF), step.relief
    for p in range(layer.times.slots_G[g]):
        a = held_GP[g, p]
        if a == EMPTY or count_E[a] == 1 or not _keeps(layer, slots, a, g, EMPTY):
            continue
        less = load_E[a] / count_E[a]
        more = load_E[a] / (count_E[a] - 1) - less
        slowest, worse = _without(time_G, over_G, cost_G, gpu_EG[a], count_E[a], more, g, g, target)
        for e in range(len(load_E) if slowest < limit else 0):
            if holds_GE[g, e]:
                continue
            size = load_E[e] / (count_E[e] + 1)
            slower = time_G[g] + (size - less) * cost_G[g]
            relief, moves = over_G[g] - worse - _over(slower, target), _moves(was_GE, g, e, a)
            for i in range(count_E[e]):
                k = gpu_EG[e, i]
                relief += over_G[k] - _over(time_G[k] - (load_E[e] / count_E[e] - size) * cost_G[k], target)
            if slower < limit and moves <= max_moves and relief > best * max(moves, FEWEST_MOVES):
                best = relief / max(moves, FEWEST_MOVES)
                step = Step(REPLACE, EMPTY, EMPTY, g, p, e, moves, best)
    return step


@njit(cache=True, nogil=True, allocates=False)
def _without(time_G, over_G, cost_G, held_by_G, count, more, h, g, target):
    """Largest time of the first `count` GPUs held_by_G but h and g, with `more` load each, and how far their `_over` rises."""
    slowest, worse = 0.0, 0.0
    for i in range(count):
        k = held_by_G[i]
        if k != h and k != g:
            slower = time_G[k] + more * cost_G[k]
            slowest, worse = max(slowest, slower), worse + _over(slower, target) - over_G[k]
    return slowest, worse


@njit(cache=True, nogil=True, allocates=False, inline="always")
def _over(time, target):
    """Returns how much a time above the target counts: how far it is above, more for each second the farther."""
    over = time - target
    return over * (1.0 + SLOWER_COUNTS * over) if over > 0 else 0.0


@njit(cache=True, nogil=True, allocates=False)
def _keeps(layer, slots, e, g, to):
    """Returns whether an expert keeps enough replicas and failure domains if GPU g gives its to `to`, or to none (EMPTY)."""
    if slots.count_E[e] <= layer.least_E[e] and to == EMPTY:
        return False
    return layer.least_domains_E[e] == 1 or _domains(layer, slots, e, g, to) >= layer.least_domains_E[e]


@njit(cache=True, nogil=True, allocates=False)
def _domains(layer, slots, e, g, to):
    """Number of failure domains that hold expert e once GPU g has given its replica to `to`, or to none (EMPTY)."""
    domains = 0
    for i in range(slots.count_E[e]):
        at, first = to if slots.gpu_EG[e, i] == g else slots.gpu_EG[e, i], True
        for j in range(i):
            other = to if slots.gpu_EG[e, j] == g else slots.gpu_EG[e, j]
            first &= other == EMPTY or at == EMPTY or layer.domain_G[other] != layer.domain_G[at]
        domains += first and at != EMPTY
    return domains


@njit(cache=True, nogil=True, allocates=False)
def _moves(was_GE, g, comes, goes):
    """Further experts on GPU g that it did not hold at the start; either expert may be EMPTY."""
    return int(comes != EMPTY and not was_GE[g, comes]) - int(goes != EMPTY and not was_GE[g, goes])


@njit(cache=True, nogil=True)
def _keep_slots(start_GP, slots):
    """Puts experts that a GPU held at the start back into the slots that they had there; the others take the rest."""
    held_GP = slots.held_GP
    for g in range(len(held_GP)):
        new_P = held_GP[g].copy()
        held_GP[g] = EMPTY
        for p in range(len(new_P)):
            e = start_GP[g, p]
            if e != EMPTY and slots.holds_GE[g, e]:
                held_GP[g, p] = e
                slots.holds_GE[g, e] = False  # it has its slot
        free = 0
        for e in new_P:
            if e != EMPTY and slots.holds_GE[g, e]:
                while held_GP[g, free] != EMPTY:
                    free += 1
                held_GP[g, free] = e
