"""Search of `rebalance`, compiled: steps that take load from a layer's slowest GPU, the largest relief per move first.

Replicas share their expert's load evenly. The time of a GPU is its load times its cost. A step takes load from the slowest GPU
of a layer: it swaps two replicas; moves one to an empty slot; or gives an expert a further replica, in an empty slot or in
place of another replica. Afterwards each changed GPU is faster than the slowest GPU was before. Every expert keeps its min
replicas.

A move is an expert whose weights a GPU fetches because it did not hold them at the start. The step with the largest relief per
move is taken. With x the excess of a GPU's time over the target, relief is the fall of the sum of x + 40 x^2 over the changed
GPUs, so that slow GPUs count more. Most swaps need no evaluation: at best both GPUs are equally slow afterwards, which bounds
the relief; and only a swap after which neither is too slow relieves more than the best one so far.

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
    from cython.cimports.libc.math import sqrt
else:
    from math import sqrt

    from aurora.algorithms.core_arrays import *
    from aurora.algorithms.search.slots_core import *

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

    `is_swap` says what the step is: slots p of GPU g and q of GPU h swap experts, and the second may be empty; or slot q of
    GPU h gets expert e. Times are parts of the target time. Made once for all layers; `_load` sets it to one.
    """

    part_s_GEXW: Floats4  # the time that each expert adds to each GPU: one sum, one case
    layer: Layer
    slots: Slots
    load_E: Floats1
    size_E: Floats1  # load of each replica of an expert
    cost_G: ConstFloats1
    was_GE: Flags2  # whether a GPU held an expert at the start
    open_G: Flags1  # whether a GPU has an empty slot, or its experts have changed; a swap of two others is two moves
    min_replicas: Index
    domain_G: ConstInts1  # the failure domain of each GPU
    least_E: Ints1  # minimum replicas of each expert, and of failure domains that hold it
    least_domains_E: Ints1
    max_moves: Int
    target: Float
    is_swap: cython.bint  # the best step
    g: Index
    p: Index
    h: Index
    q: Index
    e: Index
    moves: Int  # how many more experts the GPUs hold that they did not hold at the start
    relief: Float  # for each move; zero: there is no step
    time_G: Floats1  # what follows is working memory
    over_G: Floats1
    size_P: Floats1
    moves_P: Ints1
    at_X: Ints1
    worse_X: Floats1
    more_X: Floats1
    made_GP: Ints2

    def __init__(self, cost_G, slots_G, held_GP: Ints2, experts: Index, min_replicas: Index, domain_G):
        gpus, width = len(cost_G), held_GP.shape[1]
        part_s_GEXW = np.zeros((gpus, experts, 1, 1))
        self.layer = Layer(PhaseSums(part_s_GEXW, np.zeros((gpus, 1, 1)), np.zeros(1), slots_G, 1))
        self.part_s_GEXW, self.slots = part_s_GEXW, Slots(self.layer, held_GP)
        self.cost_G, self.domain_G, self.min_replicas = cost_G, domain_G, min_replicas
        self.was_GE, self.open_G = np.zeros((gpus, experts), np.uint8), np.zeros(gpus, np.uint8)
        self.time_G, self.over_G = np.zeros((2, gpus))
        self.load_E, self.size_E = np.zeros((2, experts))
        self.least_E, self.least_domains_E = np.zeros((2, experts), np.int64)
        self.size_P, self.moves_P, self.made_GP = np.zeros(width), np.zeros(width, np.int64), np.zeros_like(held_GP)
        self.at_X = np.zeros(gpus * width, np.int64)
        self.worse_X, self.more_X = np.zeros((2, gpus * width))


@cython.locals(most=Int, begin=Index, end=Index)
def rebalance_layers(
    load_LE: ConstFloats2, cost_G, slots_G, held_LGP: Ints3, most, before_L: ConstFloats1, mean_L: ConstFloats1,
    target_L: ConstFloats1, min_replicas, domain_G, moves_L: Ints1, after_L: Floats1, begin, end
):  # fmt: skip
    """Rebalances the slots of layers `begin` to `end` in place, and sets their moves and largest times.

    A layer's search stops at the largest time target_L, after at most `most` moves, or if no step helps. Each expert keeps
    `min_replicas`, in as many failure domains, or what it has at the start if that is less.
    """
    state = Rebalancing(cost_G, slots_G, held_LGP[begin], load_LE.shape[1], min_replicas, domain_G)
    with nogil:
        for l in range(begin, end):
            if before_L[l] > target_L[l]:
                moves, after = _rebalance(state, state.slots, load_LE[l], held_LGP[l], most, mean_L[l], target_L[l])
                if moves > 0 and after < before_L[l] * (1 - LEAST_RELIEF):
                    moves_L[l], after_L[l] = moves, after
                    held_LGP[l, :, :] = state.made_GP


@cfunc
@nogil
@exceptval(check=False)
@cython.locals(moves=Int, other=Int, top=Float)
def _rebalance(
    state: Rebalancing, slots: Slots, load_E: ConstFloats1, held_GP: Ints2, most: Int, mean: Float, target: Float
) -> tuple[Int, Float]:
    """Rebalances one layer in made_GP; returns the moves and the largest time."""
    _load(state, slots, load_E, held_GP, target)
    moves = _search(state, slots, 0, most)
    top = _top(slots)
    if top > larger(1.0, mean / target / (1 - WORTH_DIVIDING)):  # otherwise there is too little to win
        state.made_GP[:, :] = slots.held_GP
        _load(state, slots, load_E, held_GP, target)
        other = _divide(state, slots)
        if other <= most:
            other = _search(state, slots, other, most)
        if other <= most and _top(slots) < top * (1 - WORTH_DIVIDING):
            moves, top = other, _top(slots)
        else:
            load_slots(state.layer, slots, state.made_GP)
    _keep_slots(held_GP, slots, state.made_GP)
    return moves, top * target


@cfunc
@nogil
@exceptval(check=False)
def _top(slots: Slots) -> Float:
    """The largest time of a GPU."""
    top: Float = 0.0
    for g in range(slots.sum_s_GXW.shape[0]):
        top = larger(top, slots.sum_s_GXW[g, 0, 0])
    return top


@cfunc
@nogil
@exceptval(check=False)
@cython.locals(e=Index)
def _load(state: Rebalancing, slots: Slots, load_E: ConstFloats1, held_GP: Ints2, target: Float) -> cython.void:
    """Sets the layer's loads and slots, and what each expert keeps."""
    for e in range(load_E.shape[0]):
        state.load_E[e] = load_E[e] / target  # so that the target is 1
    for g in range(state.layer.gpus):
        for e in range(load_E.shape[0]):
            state.part_s_GEXW[g, e, 0, 0] = state.cost_G[g] * state.load_E[e]
    load_slots(state.layer, slots, held_GP)
    state.was_GE[:, :] = slots.holds_GE
    for e in range(load_E.shape[0]):
        state.size_E[e] = state.load_E[e] / slots.count_E[e]
        state.least_E[e] = min(slots.count_E[e], state.min_replicas)
        state.least_domains_E[e] = min(_domains(state, e, EMPTY, EMPTY), state.min_replicas) if state.min_replicas > 1 else 1
    for g in range(state.layer.gpus):
        state.open_G[g] = 0
        for p in range(state.layer.slots_G[g]):
            if slots.held_GP[g, p] == EMPTY:
                state.open_G[g] = 1


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
@cython.locals(slowest=Index, fastest=Index, top=Float)
def _search(state: Rebalancing, slots: Slots, moves: Int, most: Int) -> Int:
    """Takes steps until the largest time is 1, the target, or no step helps. `moves` of at most `most` are made before.

    Returns the moves made.
    """
    state.target = 1.0
    for _ in range(STEPS_PER_SLOT * slots.held_GP.shape[0] * slots.held_GP.shape[1]):
        slowest = fastest = 0
        for g in range(state.layer.gpus):
            state.time_G[g] = slots.sum_s_GXW[g, 0, 0]
            state.over_G[g] = _over(state.time_G[g], state.target)
            if state.time_G[g] > state.time_G[slowest]:
                slowest = g
            if state.time_G[g] < state.time_G[fastest]:
                fastest = g
        top = state.time_G[slowest]
        if top <= 1.0:
            break
        state.max_moves, state.relief = most - moves, 0.0
        _try_swaps(state, slots, slowest, fastest)
        _try_further(state, slots, slowest)
        if state.relief <= 0.0 and (moves == most or top - state.target <= WORTH_DIVIDING):
            break
        if state.relief <= 0.0:  # as far as this target goes: what does not come above a higher one is no loss then
            state.target = (state.target + top) / 2
            continue
        moves += state.moves
        state.target = 1.0
        if state.is_swap:
            state.open_G[state.g] = state.open_G[state.h] = 1
            swap(state.layer, slots, state.g, state.p, state.h, state.q)
        else:
            _replace(state, slots, state.h, state.q, state.e)
    return moves


@cfunc
@nogil
@exceptval(check=False)
def _replace(state: Rebalancing, slots: Slots, h: Index, q: Index, e: Index) -> cython.void:
    """Replaces the expert in slot q of GPU h by expert e."""
    x: Index = slots.held_GP[h, q]
    overwrite(state.layer, slots, h, q, e)
    state.open_G[h] = 1
    state.size_E[e] = state.load_E[e] / slots.count_E[e]
    if x != EMPTY:
        state.size_E[x] = state.load_E[x] / slots.count_E[x]


@cfunc
@nogil
@exceptval(check=False)
@cython.locals(e=Index, x=Index, to=Index, slot=Index, size=Float, least=Float, after=Float, lighter=cython.bint)
def _divide(state: Rebalancing, slots: Slots) -> Int:
    """Gives experts with large replicas further ones, whatever the GPUs' times, in place of those that are needed least.

    Returns the moves made.
    """
    moves: Int = 0
    for _ in range(slots.held_GP.shape[0] * slots.held_GP.shape[1]):
        e, size = 0, -INF
        for other in range(state.layer.experts):
            if state.size_E[other] > size:
                e, size = other, state.size_E[other]
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
        moves += _moves(state, to, e, slots.held_GP[to, slot])
        _replace(state, slots, to, slot, e)
    return moves


@cfunc
@nogil
@exceptval(check=False)
@cython.locals(
    a=Index, b=Index, h=Index, least=Int, moves_a=Int, moves=Int, equal=Float, most=Float, fewest=Float, less=Float, over=Float,
    windowed=Float, largest=Float, smallest=Float, least_less=Float, most_less=Float, slower=Float, relief=Float, size=Float,
    time_h=Float, cost_h=Float, over_gh=Float, two=cython.bint
)  # fmt: skip
def _try_swaps(state: Rebalancing, slots: Slots, g: Index, fastest: Index) -> cython.void:
    """An expert of GPU g swaps with one of a faster GPU, or moves to an empty slot. The fastest GPU is tried first."""
    cost_g: Float = state.cost_G[g]
    top: Float = state.time_G[g]
    limit: Float = top * (1 - LEAST_RELIEF)
    for at in range(-1, state.layer.gpus):
        h = fastest if at < 0 else at
        time_h, cost_h, over_gh = state.time_G[h], state.cost_G[h], state.over_G[g] + state.over_G[h]
        if time_h >= limit or at == fastest:
            continue
        equal = (top * cost_h + time_h * cost_g) / (cost_g + cost_h)
        most, two = over_gh - _over(equal, state.target), not (state.open_G[g] or state.open_G[h])
        if most <= state.relief * (2.0 if two else FEWEST_MOVES):
            continue
        least, windowed, least_less, most_less, largest, smallest = 1, 0.0, 0.0, INF, 0.0, INF
        for q in range(state.layer.slots_G[h]):
            b = slots.held_GP[h, q]
            state.size_P[q], state.moves_P[q] = 0.0, 1
            if b != EMPTY:
                state.size_P[q] = state.size_E[b]
            if not two:
                state.moves_P[q] = _moves(state, g, b, EMPTY) - _moves(state, h, b, EMPTY)
            least = min(least, state.moves_P[q])
            largest, smallest = larger(largest, state.size_P[q]), min(smallest, state.size_P[q])
        for p in range(state.layer.slots_G[g]):
            a = slots.held_GP[g, p]
            if a == EMPTY or slots.holds_GE[h, a]:
                continue
            moves_a = 1 if two else _moves(state, h, a, EMPTY) - _moves(state, g, a, EMPTY)
            fewest = larger(moves_a + least, FEWEST_MOVES)
            if most <= state.relief * fewest or fewest > state.max_moves + FEWEST_MOVES:
                continue
            size = state.size_E[a]
            if fewest != windowed:  # the load that leaves g in a better swap, by what both GPUs together are above the target
                windowed, over = fewest, over_gh - state.relief * fewest
                slower = min(limit, state.target + (sqrt(1.0 + 4.0 * SLOWER_COUNTS * over) - 1.0) / (2.0 * SLOWER_COUNTS))
                least_less, most_less = (top - slower) / cost_g, (slower - time_h) / cost_h
            if size - smallest < least_less or size - largest > most_less:
                continue
            for q in range(state.layer.slots_G[h]):
                less = size - state.size_P[q]
                if less < least_less or less > most_less:
                    continue
                relief = over_gh - _over(top - less * cost_g, state.target) - _over(time_h + less * cost_h, state.target)
                if relief <= state.relief * fewest:
                    continue
                b, moves = slots.held_GP[h, q], moves_a + state.moves_P[q]
                if moves > state.max_moves or relief <= state.relief * larger(moves, FEWEST_MOVES):
                    continue
                if (b == EMPTY or (not slots.holds_GE[g, b] and _keeps(state, b, h, g))) and _keeps(state, a, g, h):
                    state.is_swap, state.g, state.p, state.h, state.q, state.moves = True, g, p, h, q, moves
                    state.relief = relief / larger(moves, FEWEST_MOVES)


@cfunc
@nogil
@exceptval(check=False)
@cython.locals(
    a=Index, x=Index, h=Index, q=Index, k=Index, more=Float, slowest=Float, worse=Float, size=Float, shed=Float,
    relief=Float, relief_a=Float, alone=Float, slower=Float, slowed=Float, moves=Int
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
                more = state.load_E[x] / (slots.count_E[x] - 1) - state.size_E[x]
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
        shed = state.size_E[a] - size
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
                slower -= state.size_E[x]
            slower = state.time_G[h] + slower * state.cost_G[h]
            slowed = alone + state.more_X[at] * state.cost_G[g]
            worse = state.worse_X[at] + _over(slower, state.target)
            worse += _over(slowed, state.target) - _over(alone, state.target)
            moves, relief = _moves(state, h, a, x), relief_a - worse
            if larger(slower, slowed) >= limit or moves > state.max_moves:
                continue
            if relief > state.relief * larger(moves, FEWEST_MOVES):
                state.is_swap, state.h, state.q, state.e, state.moves = False, h, q, a, moves
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
