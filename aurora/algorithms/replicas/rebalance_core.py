"""Search of `rebalance` on one layer, compiled: steps that take load from its slowest GPU, the largest relief per move first.

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

The state is that of `search/slots_core`, with one sum for each GPU, its time. The steps differ from those of `slot_search`:
they count moves, and relieve one of several slowest GPUs at a time, although the largest time of all GPUs stays the same.
"""

import cython
import numpy as np
from cython import cclass, cfunc, declare, exceptval, final, inline, nogil

if cython.compiled:
    from cython.cimports.aurora.algorithms.core_arrays import *
    from cython.cimports.aurora.algorithms.search.slots_core import *
    from cython.cimports.aurora.algorithms.sorting_core import descending
else:
    from aurora.algorithms.core_arrays import *
    from aurora.algorithms.search.slots_core import *
    from aurora.algorithms.sorting_core import descending

from aurora.algorithms.search.phase_sums import PhaseSums

LEAST_RELIEF = declare(Float, 1e-9)  # relative: a smaller one is none
LARGE = declare(Float, 0.5)  # of the target time: experts with larger replicas may be divided further
SMALLER = declare(Float, 0.9)  # times a divided expert's replicas that those of the expert which gives a slot up are at most
WORTH_DIVIDING = declare(Float, 0.01)  # relative: dividing experts must lower the largest time by as much more
STEPS_PER_SLOT = declare(Index, 8)  # per slot: more steps than a layer ever took
SLOWER_COUNTS = declare(Float, 40.0)  # at 1 / 40 above the target, a further second counts three times as much as at the target
FEWEST_MOVES = declare(Float, 0.5)  # a step without moves counts as half a one
INF = declare(Float, float("inf"))


@final
@cclass
class Rebalancing:
    """One layer whose slots change: its costs, the limits that changes must keep, and the best step found.

    `kind` says what `step` is: SWAP, slots p of GPU g and q of GPU h swap experts, and the second may be empty; REPLACE, slot q
    of GPU h gets expert e. Times are parts of the target time.
    """

    layer: Layer  # the time that each expert adds to each GPU: one sum, one case
    slots: Slots
    load_E: Floats1
    cost_G: Floats1
    was_GE: Flags2  # whether a GPU held an expert at the start
    domain_G: Ints1  # the failure domain of each GPU
    least_E: Ints1  # minimum replicas of each expert, and of failure domains that hold it
    least_domains_E: Ints1
    max_moves: Int
    target: Float
    is_swap: cython.bint  # the best step: a swap, or a replacement
    g: Index
    p: Index
    h: Index
    q: Index
    e: Index
    moves: Int  # how many more experts the GPUs hold that they did not hold at the start
    relief: Float  # for each move; zero: there is no step
    time_G: Floats1  # what follows is working memory
    over_G: Floats1
    fastest_G: Ints1
    spare_G: Ints1
    key_G: Floats1
    size_P: Floats1
    moves_P: Ints1
    at_X: Ints1
    worse_X: Floats1
    more_X: Floats1

    def __init__(self, load_E, cost_G, slots_G, held_GP: Ints2, min_replicas: Index, domain_G):
        gpus, experts, width = len(cost_G), len(load_E), held_GP.shape[1]
        part_GEXW = np.multiply.outer(cost_G, load_E)[:, :, None, None]
        self.layer = Layer(PhaseSums(part_GEXW, np.zeros((gpus, 1, 1)), np.zeros(1), slots_G, 1))
        self.slots, size = Slots(self.layer, held_GP), gpus * width
        self.load_E, self.cost_G, self.domain_G = load_E, cost_G, domain_G
        self.was_GE = np.array(self.slots.holds_GE)
        self.least_E = np.minimum(self.slots.count_E, min_replicas)
        self.least_domains_E = np.full(experts, min_replicas)
        self.time_G, self.over_G, self.key_G = np.zeros(gpus), np.zeros(gpus), np.zeros(gpus)
        self.fastest_G, self.spare_G = np.zeros(gpus, np.int64), np.zeros(gpus, np.int64)
        self.size_P, self.moves_P = np.zeros(width), np.zeros(width, np.int64)
        self.at_X, self.worse_X, self.more_X = np.zeros(size, np.int64), np.zeros(size), np.zeros(size)
        if min_replicas > 1:
            for e in range(experts):
                self.least_domains_E[e] = min(_domains(self, e, EMPTY, EMPTY), min_replicas)


def rebalance_layer(load_E, cost_G, slots_G, held_GP, most: Int, worth: Float, target: Float, min_replicas: Index, domain_G):
    """Rebalances one layer's slots in place; returns (moves, largest time before, largest time after).

    It stops at the largest time `target`, after at most `most` moves, or if no step helps. The slots stay as they are if that
    lowers the largest time by less than the part `worth`. Each expert keeps `min_replicas`, in as many failure domains, or what
    it has at the start if that is less.
    """
    before: Float = largest_time(load_E, cost_G, held_GP)
    if before <= target:
        return 0, before, before
    part_E = load_E / target  # so that the target is 1
    state = Rebalancing(part_E, cost_G, slots_G, held_GP, min_replicas, domain_G)
    with nogil:
        _search(state, state.slots, most)
    mean: Float = part_E.sum() / (1 / cost_G).sum()
    reached: Float = np.asarray(state.slots.sum_s_GXW).max()
    if reached > max(1.0, mean / (1 - WORTH_DIVIDING)):  # otherwise there is too little to win
        other = Rebalancing(part_E, cost_G, slots_G, held_GP, min_replicas, domain_G)
        with nogil:
            _divide(other, other.slots)
            if _moved(other) <= most:
                _search(other, other.slots, most)
        if _moved(other) <= most and np.asarray(other.slots.sum_s_GXW).max() < reached * (1 - WORTH_DIVIDING):
            state = other
    moves = _moved(state)
    now_GP = np.empty_like(held_GP)
    _keep_slots(held_GP, state.slots, now_GP)
    after: Float = largest_time(load_E, cost_G, now_GP)
    if moves == 0 or after >= before * (1 - max(worth, LEAST_RELIEF)):
        return 0, before, before
    held_GP[:] = now_GP
    return moves, before, after


def largest_time(load_E, cost_G, held_GP):
    """Returns the largest time of a GPU if every slot takes the same part of its expert's load."""
    count_X = np.bincount(held_GP.ravel() + 1, minlength=len(load_E) + 1)  # the first is of empty slots
    size_X = np.append(0.0, load_E) / np.maximum(count_X, 1)
    return float((size_X[held_GP + 1].sum(axis=1) * cost_G).max())


@cfunc
@nogil
@exceptval(check=False)
@cython.locals(e=Index, free=Index)
def _keep_slots(start_GP: ConstInts2, slots: Slots, made_GP: Ints2) -> cython.void:
    """Fills made_GP: experts that a GPU held at the start are in the slots that they had there; the others take the rest."""
    for g in range(made_GP.shape[0]):
        for p in range(made_GP.shape[1]):
            e, made_GP[g, p] = start_GP[g, p], EMPTY
            if e != EMPTY and slots.holds_GE[g, e]:
                made_GP[g, p] = e
                slots.holds_GE[g, e] = False  # it has its slot
        free = 0
        for p in range(made_GP.shape[1]):
            e = slots.held_GP[g, p]
            if e != EMPTY and slots.holds_GE[g, e]:
                while made_GP[g, free] != EMPTY:
                    free += 1
                made_GP[g, free] = e


@cfunc
@nogil
@exceptval(check=False)
@cython.locals(slowest=Index, top=Float)
def _search(state: Rebalancing, slots: Slots, most: Int) -> cython.void:
    """Takes steps until the largest time is 1, the target, or no step helps, with at most `most` moves in all."""
    moves: Int = _moved(state)
    state.target = 1.0
    for _ in range(STEPS_PER_SLOT * slots.held_GP.shape[0] * slots.held_GP.shape[1]):
        slowest = 0
        for g in range(state.layer.gpus):
            state.time_G[g] = slots.sum_s_GXW[g, 0, 0]
            if state.time_G[g] > state.time_G[slowest]:
                slowest = g
        top = state.time_G[slowest]
        if top <= 1.0:
            break
        state.max_moves = most - moves
        _find_best_step(state, slowest)
        if state.relief <= 0.0 and (moves == most or top - state.target <= WORTH_DIVIDING):
            break
        if state.relief <= 0.0:  # as far as this target goes: what does not come above a higher one is no loss then
            state.target = (state.target + top) / 2
            continue
        moves += state.moves
        state.target = 1.0
        if state.is_swap:
            swap(state.layer, slots, state.g, state.p, state.h, state.q)
        else:
            overwrite(state.layer, slots, state.h, state.q, state.e)


@cfunc
@nogil
@exceptval(check=False)
def _moved(state: Rebalancing) -> Int:
    """Number of experts on GPUs that did not hold them at the start."""
    moved: Int = 0
    for g in range(state.layer.gpus):
        for e in range(state.layer.experts):
            if state.slots.holds_GE[g, e] and not state.was_GE[g, e]:
                moved += 1
    return moved


@cfunc
@nogil
@exceptval(check=False)
@cython.locals(e=Index, x=Index, to=Index, slot=Index, size=Float, least=Float, after=Float, lighter=cython.bint)
def _divide(state: Rebalancing, slots: Slots) -> cython.void:
    """Gives experts with large replicas further ones, whatever the GPUs' times, in place of those that are needed least."""
    for _ in range(slots.held_GP.shape[0] * slots.held_GP.shape[1]):
        e, size = 0, -INF
        for other in range(state.layer.experts):
            if state.load_E[other] / slots.count_E[other] > size:
                e, size = other, state.load_E[other] / slots.count_E[other]
        if size <= LARGE:
            break
        least, to, slot = INF, EMPTY, EMPTY
        for h in range(state.layer.gpus):
            if slots.holds_GE[h, e]:
                continue
            for q in range(state.layer.slots_G[h]):
                x, after = slots.held_GP[h, q], 0.0  # the replicas of x, once it has given the slot up
                if x != EMPTY:
                    after = INF
                    if _keeps(state, x, h, EMPTY):
                        after = state.load_E[x] / (slots.count_E[x] - 1)
                lighter = to != EMPTY and after == least and slots.sum_s_GXW[h, 0, 0] < slots.sum_s_GXW[to, 0, 0]
                if after < size * SMALLER and (after < least or lighter):
                    least, to, slot = after, h, q
        if to == EMPTY:
            break
        overwrite(state.layer, slots, to, slot, e)


@cfunc
@nogil
@exceptval(check=False)
def _find_best_step(state: Rebalancing, g: Index) -> cython.void:
    """Sets the step that relieves GPU g, the slowest, most for each move."""
    state.relief = 0.0
    for h in range(state.layer.gpus):
        state.over_G[h] = _over(state.time_G[h], state.target)
        state.key_G[h], state.fastest_G[h] = -state.time_G[h], h
    descending(state.key_G, state.fastest_G, state.spare_G, state.layer.gpus)
    _try_swaps(state, state.slots, g)
    _try_further(state, state.slots, g)
    _try_instead(state, state.slots, g)


@cfunc
@nogil
@exceptval(check=False)
@cython.locals(
    a=Index, b=Index, h=Index, least=Int, moves_a=Int, moves=Int, equal=Float, most=Float, fewest=Float, less=Float,
    slower=Float, relief=Float, size=Float, time_h=Float, cost_h=Float, over_gh=Float
)  # fmt: skip
def _try_swaps(state: Rebalancing, slots: Slots, g: Index) -> cython.void:
    """An expert of GPU g swaps with one of a faster GPU, or moves to an empty slot."""
    cost_g: Float = state.cost_G[g]
    top: Float = state.time_G[g]
    limit: Float = top * (1 - LEAST_RELIEF)
    for at in range(state.layer.gpus):
        h = state.fastest_G[at]
        if state.time_G[h] >= limit:
            break
        time_h, cost_h, over_gh = state.time_G[h], state.cost_G[h], state.over_G[g] + state.over_G[h]
        equal = (top * cost_h + time_h * cost_g) / (cost_g + cost_h)
        most, least = over_gh - _over(equal, state.target), 1
        if most <= state.relief * FEWEST_MOVES:
            continue
        for q in range(state.layer.slots_G[h]):
            b = slots.held_GP[h, q]
            state.size_P[q] = 0.0
            if b != EMPTY:
                state.size_P[q] = state.load_E[b] / slots.count_E[b]
            state.moves_P[q] = _moves(state, g, b, EMPTY) - _moves(state, h, b, EMPTY)
            least = min(least, state.moves_P[q])
        for p in range(state.layer.slots_G[g]):
            a = slots.held_GP[g, p]
            if a == EMPTY or slots.holds_GE[h, a]:
                continue
            moves_a = _moves(state, h, a, EMPTY) - _moves(state, g, a, EMPTY)
            fewest = larger(moves_a + least, FEWEST_MOVES)
            if most <= state.relief * fewest or fewest > state.max_moves + FEWEST_MOVES:
                continue
            size = state.load_E[a] / slots.count_E[a]
            for q in range(state.layer.slots_G[h]):
                less = size - state.size_P[q]
                slower = time_h + less * cost_h
                if less <= 0 or slower >= limit:
                    continue
                relief = over_gh - _over(top - less * cost_g, state.target) - _over(slower, state.target)
                if relief <= state.relief * fewest:
                    continue
                b, moves = slots.held_GP[h, q], moves_a + state.moves_P[q]
                if moves > state.max_moves or relief <= state.relief * larger(moves, FEWEST_MOVES):
                    continue
                if b != EMPTY and (slots.holds_GE[g, b] or not _stays_apart(state, b, h, g)):
                    continue
                if _stays_apart(state, a, g, h):
                    state.is_swap, state.g, state.p, state.h, state.q, state.moves = True, g, p, h, q, moves
                    state.relief = relief / larger(moves, FEWEST_MOVES)


@cfunc
@nogil
@exceptval(check=False)
@cython.locals(
    a=Index, x=Index, h=Index, q=Index, k=Index, more=Float, slowest=Float, worse=Float, size=Float, shed=Float,
    relief_a=Float, alone=Float, slower=Float, slowed=Float
)  # fmt: skip
def _try_further(state: Rebalancing, slots: Slots, g: Index) -> cython.void:
    """An expert of GPU g gets a further replica, in an empty slot or in place of a shared expert."""
    width: Index = slots.held_GP.shape[1]
    limit: Float = state.time_G[g] * (1 - LEAST_RELIEF)
    candidates: Index = 0  # slots that may be given up, what that costs, and the load that comes to g
    for gpu in range(state.layer.gpus):
        if gpu == g:
            continue
        for slot in range(state.layer.slots_G[gpu]):
            x, slowest, worse, more = slots.held_GP[gpu, slot], 0.0, 0.0, 0.0
            if x != EMPTY:
                if slots.count_E[x] == 1:
                    continue
                more = state.load_E[x] / (slots.count_E[x] - 1) - state.load_E[x] / slots.count_E[x]
                slowest, worse = _without(state, x, more, gpu, g)
            if slowest < limit and (x == EMPTY or _keeps(state, x, gpu, EMPTY)):
                state.at_X[candidates], state.worse_X[candidates] = gpu * width + slot, worse - state.over_G[gpu]
                state.more_X[candidates] = 0.0
                if x != EMPTY and slots.holds_GE[g, x]:
                    state.more_X[candidates] = more
                candidates += 1
    if candidates == 0:
        return
    for p in range(state.layer.slots_G[g]):
        a = slots.held_GP[g, p]
        if a == EMPTY:
            continue
        size, relief_a = state.load_E[a] / (slots.count_E[a] + 1), 0.0
        shed = state.load_E[a] / slots.count_E[a] - size
        alone = state.time_G[g] - shed * state.cost_G[g]
        for i in range(slots.count_E[a]):
            k = slots.gpu_EG[a, i]
            relief_a += state.over_G[k] - _over(state.time_G[k] - shed * state.cost_G[k], state.target)
        for at in range(candidates):
            h, q = state.at_X[at] // width, state.at_X[at] % width
            if relief_a - state.worse_X[at] <= state.relief * FEWEST_MOVES or slots.holds_GE[h, a]:
                continue
            x, slower = slots.held_GP[h, q], size
            if x != EMPTY:
                slower -= state.load_E[x] / slots.count_E[x]
            slower = state.time_G[h] + slower * state.cost_G[h]
            slowed = alone + state.more_X[at] * state.cost_G[g]
            worse = state.worse_X[at] + _over(slower, state.target)
            worse += _over(slowed, state.target) - _over(alone, state.target)
            if larger(slower, slowed) < limit:
                _take_replacement(state, h, q, a, _moves(state, h, a, x), relief_a - worse)


@cfunc
@nogil
@exceptval(check=False)
@cython.locals(
    a=Index, k=Index, less=Float, more=Float, slowest=Float, worse=Float, size=Float, shed=Float, slower=Float, relief=Float
)
def _try_instead(state: Rebalancing, slots: Slots, g: Index) -> cython.void:
    """Another expert takes the place of a shared one of GPU g."""
    limit: Float = state.time_G[g] * (1 - LEAST_RELIEF)
    for p in range(state.layer.slots_G[g]):
        a = slots.held_GP[g, p]
        if a == EMPTY or slots.count_E[a] == 1 or not _keeps(state, a, g, EMPTY):
            continue
        less = state.load_E[a] / slots.count_E[a]
        more = state.load_E[a] / (slots.count_E[a] - 1) - less
        slowest, worse = _without(state, a, more, g, g)
        if slowest >= limit:
            continue
        for e in range(state.layer.experts):
            if slots.holds_GE[g, e]:
                continue
            size = state.load_E[e] / (slots.count_E[e] + 1)
            shed = state.load_E[e] / slots.count_E[e] - size
            slower = state.time_G[g] + (size - less) * state.cost_G[g]
            if slower >= limit:
                continue
            relief = state.over_G[g] - worse - _over(slower, state.target)
            for i in range(slots.count_E[e]):
                k = slots.gpu_EG[e, i]
                relief += state.over_G[k] - _over(state.time_G[k] - shed * state.cost_G[k], state.target)
            _take_replacement(state, g, p, e, _moves(state, g, e, a), relief)


@cfunc
@nogil
@exceptval(check=False)
def _take_replacement(state: Rebalancing, h: Index, q: Index, e: Index, moves: Int, relief: Float) -> cython.void:
    """Makes expert e in slot q of GPU h the step if its relief for each move is larger than that of the one so far."""
    if moves <= state.max_moves and relief > state.relief * larger(moves, FEWEST_MOVES):
        state.is_swap, state.h, state.q, state.e, state.moves = False, h, q, e, moves
        state.relief = relief / larger(moves, FEWEST_MOVES)


@cfunc
@nogil
@exceptval(check=False)
@cython.locals(slower=Float, k=Index)
def _without(state: Rebalancing, e: Index, more: Float, h: Index, g: Index) -> tuple[Float, Float]:
    """Largest time of expert e's GPUs but h and g, with `more` load each, and how far their `_over` rises."""
    slowest: Float = 0.0
    worse: Float = 0.0
    for i in range(state.slots.count_E[e]):
        k = state.slots.gpu_EG[e, i]
        if k != h and k != g:
            slower = state.time_G[k] + more * state.cost_G[k]
            slowest, worse = larger(slowest, slower), worse + _over(slower, state.target) - state.over_G[k]
    return slowest, worse


@cfunc
@inline
@nogil
@exceptval(check=False)
def _over(time: Float, target: Float) -> Float:
    """How much a time above the target counts: how far it is above, more for each second the farther."""
    over: Float = time - target
    return over * (1.0 + SLOWER_COUNTS * over) if over > 0 else 0.0


@cfunc
@nogil
@exceptval(check=False)
def _keeps(state: Rebalancing, e: Index, g: Index, to: Index) -> cython.bint:
    """Returns whether an expert keeps enough replicas and failure domains if GPU g gives its to `to`, or to none (EMPTY)."""
    if state.slots.count_E[e] <= state.least_E[e] and to == EMPTY:
        return False
    return _stays_apart(state, e, g, to)


@cfunc
@nogil
@exceptval(check=False)
def _stays_apart(state: Rebalancing, e: Index, g: Index, to: Index) -> cython.bint:
    """Returns whether an expert stays in enough failure domains if GPU g gives its replica to `to`, or to none (EMPTY)."""
    return state.least_domains_E[e] <= 1 or _domains(state, e, g, to) >= state.least_domains_E[e]


@cfunc
@nogil
@exceptval(check=False)
@cython.locals(at=Index, other=Index, first=cython.bint)
def _domains(state: Rebalancing, e: Index, g: Index, to: Index) -> Index:
    """Number of failure domains that hold expert e once GPU g has given its replica to `to`, or to none (EMPTY)."""
    domains: Index = 0
    for i in range(state.slots.count_E[e]):
        at = state.slots.gpu_EG[e, i]
        if at == g:
            at = to
        first = at != EMPTY
        for j in range(i):
            other = state.slots.gpu_EG[e, j]
            if other == g:
                other = to
            if first and other != EMPTY and state.domain_G[other] == state.domain_G[at]:
                first = False
        domains += first
    return domains


@cfunc
@inline
@nogil
@exceptval(check=False)
def _moves(state: Rebalancing, g: Index, comes: Index, goes: Index) -> Int:
    """Further experts on GPU g that it did not hold at the start; either expert may be EMPTY."""
    moves: Int = 0
    if comes != EMPTY and not state.was_GE[g, comes]:
        moves += 1
    if goes != EMPTY and not state.was_GE[g, goes]:
        moves -= 1
    return moves
