"""Rebalancing of a placement in force, for live systems: few slots change, and all layers take milliseconds.

Replicas share their expert's load evenly. Each step relieves the slowest GPU of a layer: it swaps two replicas, moves one to an
empty slot, gives an expert a further replica in an empty slot or in place of another replica, or puts another expert in the
place of a replica. No GPU that a step changes is then as slow as the slowest was. Of these steps it takes the one that relieves
most for each move, an expert whose weights a GPU fetches because it did not hold them at the start. No step takes min replicas
from an expert.

Such steps end early where few slots hold large replicas. Then it starts again: experts with large replicas first get further
ones, in place of replicas that are needed least, whatever the GPUs' times. The better end counts.

Slots are those of `placement/slot_state`, with one sum for each GPU, its time. The steps are not those of `slot_search`: they
count moves, and relieve one of several slowest GPUs at a time, although the largest time of all GPUs stays.

Without numba's JIT (NUMBA_DISABLE_JIT=1) the same code runs in plain Python.
"""

import time
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from aurora.errors import BadInput
from aurora.planner.layers_in_threads import of_layers
from aurora.planner.placement.slot_state import PhaseSums, even_out, overwrite, start_slots, swap
from aurora.types import GpuSlots, Placement, Rebalanced
from aurora.types.arrays import BoolArray, FloatArray, IntArray, as_array, counts
from aurora.types.compiled import njit
from aurora.types.placement import EMPTY_INT64 as EMPTY
from aurora.types.placement import expert_loads

LEAST_RELIEF = 1e-9  # relative: a smaller one is none
LARGE = 0.5  # of the target time: experts with larger replicas may be divided further
SMALLER = 0.9  # times a divided expert's replicas that those of the expert which gives a slot up are at most
WORTH_DIVIDING = 0.01  # relative: dividing experts must lower the largest time by as much more
STEPS_PER_SLOT = 8  # per slot: more steps than a layer ever took
NO_STEP, SWAP, REPLACE = range(3)


class Layer(NamedTuple):
    """One layer, and what its slots must keep.

    Attributes:
        load_E: (E,) the load of each expert.
        cost_G: (G,) the cost of a unit of load on each GPU.
        times: what each expert adds to the time of a GPU, its load times the GPU's cost: the only sum, in one scenario.
        was_GE: (G, E) bool, whether a GPU held an expert at the start.
        domain_G: (G,) int64, the failure domain of each GPU.
        held_ED: (E, D) int64, the replicas of each expert in each failure domain.
        domains_E: (E,) int64, how many failure domains hold each expert.
        least_E: (E,) int64, the replicas of each expert at least.
        least_domains_E: (E,) int64, how many failure domains hold each expert at least.
    """

    load_E: FloatArray
    cost_G: FloatArray
    times: PhaseSums
    was_GE: BoolArray
    domain_G: IntArray
    held_ED: IntArray
    domains_E: IntArray
    least_E: IntArray
    least_domains_E: IntArray


class Step(NamedTuple):
    """A change of slots: SWAP the experts of two slots, the second maybe empty; or REPLACE what a slot holds by an expert."""

    kind: int
    gpu: int  # SWAP: the GPU of the first slot
    slot: int
    to_gpu: int
    to_slot: int
    expert: int  # REPLACE: what comes into the second slot
    moves: int  # how many more experts the GPUs hold that they did not hold at the start


def rebalance(
    loads: ArrayLike,
    held: Placement | ArrayLike,
    slots: GpuSlots | None = None,
    max_moves: int | None = None,
    worth: float = 0.0,
    enough: float = 0.01,
    min_replicas: int = 1,
    domain_G: ArrayLike | None = None,
) -> Rebalanced:
    """Changes few slots of a placement in force, so that it suits new loads: milliseconds, for live systems.

    Replicas share their expert's load evenly, as engines do. A layer's slots change until its largest load is `enough`, or no
    change lowers it; the next placement is never worse than the one in force.

    Args:
        loads: (L, E) or (E,) numbers of zero or more: the load of each expert in each layer.
        held: the placement in force: a Placement, or (L, G, P) whole numbers, the expert in each slot and -1 for none.
        slots: how many experts fit on each GPU, and what load costs there; None: as many as `held` has, on equal GPUs.
        max_moves: how many experts the GPUs may fetch in a layer; None: no limit.
        worth: from zero to below one; a layer whose largest load would fall by less than this part of it stays as it is.
        enough: from zero to below one; a layer is good enough if its largest load is above the mean by this part of it or less.
        min_replicas: GPUs, and failure domains, that each expert stays on; on as many as in `held`, if that is fewer.
        domain_G: (G,) whole numbers of zero or more: the failure domain of each GPU; None: each is its own.

    Returns:
        The next placement, with the moves and the largest loads before and after in every layer.

    Raises:
        BadInput: if an argument is out of range, or `held` does not fit the loads or the slots.

    Example:
        >>> import aurora
        >>> after = aurora.rebalance([600, 560, 120, 120, 20, 10], [[[0, 1], [2, 3], [4, 5]]])
        >>> after.held_LGP.tolist(), after.moves_L.tolist(), after.max_load_L.tolist()
        ([[[4, 1], [2, 3], [0, 5]]], [2], [610.0])
    """
    load_LE = expert_loads("loads", loads).copy()  # a copy, since locked arrays would compile a second version of the code
    held_LGP = _table(held)
    if slots is None:
        used_G = np.maximum((held_LGP >= 0).sum(axis=2).max(axis=0), 1) if isinstance(held, Placement) else held_LGP.shape[2]
        slots = GpuSlots(np.full(held_LGP.shape[1], used_G), np.ones(held_LGP.shape[1]))
    held_LGP = _checked(held_LGP, load_LE, slots)
    whole = isinstance(max_moves, int | np.integer) and not isinstance(max_moves, bool)
    if max_moves is not None and (not whole or max_moves < 0):
        raise BadInput(f"`max_moves`: expected a whole number of zero or more, found {max_moves}")
    for name, value in (("worth", worth), ("enough", enough)):
        if not 0 <= value < 1:
            raise BadInput(f"`{name}`: expected a number from zero to below one, found {value}")
    most = held_LGP[0].size if max_moves is None else max_moves
    keeps = checked_min_replicas(min_replicas, domain_G, slots.gpus)
    slots_G, cost_G = slots.slots_G.copy(), slots.cost_G.copy()
    mean_L = load_LE.sum(axis=1) / (1 / cost_G).sum()
    _warm_up()
    began = time.perf_counter()
    rows = of_layers(
        lambda layer: _rebalance_layer(
            load_LE[layer], cost_G, slots_G, held_LGP[layer], most, worth, mean_L[layer] * (1 + enough), *keeps
        ),
        len(load_LE),
        "rebalance layers",
    )
    moves_L, before_L, after_L = (np.array(column) for column in zip(*rows, strict=True))
    return Rebalanced(held_LGP, moves_L, before_L, after_L, mean_L, time.perf_counter() - began)


def checked_min_replicas(min_replicas: int, domain_G: ArrayLike | None, gpus: int) -> tuple[int, IntArray]:
    """Returns the replicas of each expert at least, and the failure domain of each GPU, (G,) int64; None: each is its own.

    Raises:
        BadInput: unless there is a whole number of one or more, and a domain for each GPU.
    """
    if isinstance(min_replicas, bool) or not isinstance(min_replicas, int | np.integer) or min_replicas < 1:
        raise BadInput(f"`min_replicas`: expected a whole number of one or more, found {min_replicas}")
    if domain_G is None:
        return int(min_replicas), np.arange(gpus)
    found_G = counts("`domain_G`", domain_G, 1)
    if len(found_G) != gpus:
        raise BadInput(f"`domain_G`: expected a failure domain for each of {gpus} GPUs, found {len(found_G)}")
    return int(min_replicas), np.unique(found_G, return_inverse=True)[1].astype(np.int64)


def _table(held: Placement | ArrayLike) -> IntArray:
    """(L, G, P) whole numbers: the expert in each slot, EMPTY for none, of a placement or a table."""
    if isinstance(held, Placement):
        return held.held_LGP()
    table = as_array("`held`", held)
    if table.dtype.kind not in "iu" or table.ndim != 3 or not table.size:
        raise BadInput(f"`held`: expected whole numbers by layer, GPU and slot, found {table.dtype} of shape {table.shape}")
    return table


def _checked(held_LGP: IntArray, load_LE: FloatArray, slots: GpuSlots) -> IntArray:
    """The table as wide as the slots; raises BadInput unless it fits them and the loads, and every expert is held."""
    layers, experts = load_LE.shape
    if len(held_LGP) != layers or held_LGP.shape[1] != slots.gpus:
        raise BadInput(
            f"`held`: expected {layers} layers on {slots.gpus} GPUs, found {held_LGP.shape[0]} on {held_LGP.shape[1]}"
        )
    if held_LGP.min() < EMPTY or held_LGP.max() >= experts:
        raise BadInput(
            f"`held`: expected experts from 0 to {experts - 1}, or {EMPTY}, found {held_LGP.min()} to {held_LGP.max()}"
        )
    width = int(slots.slots_G.max())
    none_LGP = np.full((layers, slots.gpus, max(0, width - held_LGP.shape[2])), EMPTY)
    wide_LGP = np.concatenate([held_LGP.astype(np.int64), none_LGP], axis=2)
    if (wide_LGP[:, np.arange(wide_LGP.shape[2]) >= slots.slots_G[:, None]] != EMPTY).any():
        raise BadInput(f"`held`: expected at most {slots.slots_G.tolist()} slots of each GPU, found experts in more")
    layer_X, expert_X = np.nonzero(wide_LGP >= 0)[0], wide_LGP[wide_LGP >= 0]
    missing_X = np.flatnonzero(np.bincount(layer_X * experts + expert_X, minlength=layers * experts) == 0)
    if len(missing_X):
        raise BadInput(
            f"`held`: expected every expert, found none of expert {missing_X[0] % experts} in layer {missing_X[0] // experts}"
        )
    return np.ascontiguousarray(wide_LGP[:, :, :width])


@cache
def _warm_up() -> None:
    """Compiles the code now rather than in the first call; numba caches it on disk."""
    _rebalance_layer(np.ones(2), np.ones(2), np.ones(2, dtype=np.int64), np.array([[0], [1]]), 1, 0.0, 0.0, 1, np.arange(2))


@njit(cache=True, nogil=True)
def _rebalance_layer(load_E, cost_G, slots_G, held_GP, most, worth, target, min_replicas, domain_G):
    """Rebalances one layer's slots in place; returns (moves, largest time before, largest time after).

    It stops at the largest time `target`, after at most `most` moves, or if no step helps. The slots stay as they are if that
    lowers the largest time by less than the part `worth`. Each expert keeps `min_replicas`, in as many failure domains, or what
    it has at the start if that is less.
    """
    before = _largest_time(load_E, cost_G, held_GP)
    layer, slots = _start(load_E, cost_G, slots_G, held_GP, min_replicas, domain_G)
    _search(layer, slots, most, target)
    if slots.sum_s_GXW.max() > target:
        layer, other = _start(load_E, cost_G, slots_G, held_GP, min_replicas, domain_G)
        _divide(layer, other, target)
        _search(layer, other, most, target)
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
    held_ED, domains_E = np.zeros((experts, domain_G.max() + 1), dtype=np.int64), np.zeros(experts, dtype=np.int64)
    least_E, least_domains_E = np.minimum(slots.count_E, min_replicas), np.full(experts, min_replicas)
    layer = Layer(load_E, cost_G, times, slots.holds_GE.copy(), domain_G, held_ED, domains_E, least_E, least_domains_E)
    for e in range(experts):
        even_out(times, slots, e)
        _count_domains(layer, slots, e)
        least_domains_E[e] = min(domains_E[e], min_replicas)
    return layer, slots


@njit(cache=True, nogil=True)
def _search(layer, slots, most, target):
    """Takes steps until the largest time is `target`, or no step helps, with at most `most` moves in all."""
    moves, time_G = _moved(layer, slots), slots.sum_s_GXW.ravel()
    for _ in range(STEPS_PER_SLOT * slots.held_GP.size):
        slowest = np.argmax(time_G)
        if time_G[slowest] <= target:
            break
        step = _best_step(layer, slots, slowest, most - moves, target)
        if step.kind == NO_STEP:
            break
        moves += step.moves
        comes, goes = step.expert, slots.held_GP[step.to_gpu, step.to_slot]
        if step.kind == SWAP:
            comes = slots.held_GP[step.gpu, step.slot]
            swap(layer.times, slots, step.gpu, step.slot, step.to_gpu, step.to_slot)
        else:
            overwrite(layer.times, slots, step.to_gpu, step.to_slot, step.expert)
        _count_domains(layer, slots, comes)
        _count_domains(layer, slots, goes)


@njit(cache=True, nogil=True)
def _moved(layer, slots):
    """Number of experts on GPUs that did not hold them at the start."""
    return (slots.holds_GE & ~layer.was_GE).sum()


@njit(cache=True, nogil=True)
def _divide(layer, slots, target):
    """Gives experts with large replicas further ones, whatever the GPUs' times, in place of those that are needed least."""
    for _ in range(slots.held_GP.size):
        size_E = layer.load_E / slots.count_E
        e, least, to, slot = np.argmax(size_E), np.inf, EMPTY, EMPTY
        size = size_E[e]
        for h in range(len(slots.held_GP) if size > LARGE * target else 0):
            for q in range(layer.times.slots_G[h] if not slots.holds_GE[h, e] else 0):
                x, after = slots.held_GP[h, q], 0.0  # the replicas of x, once it has given the slot up
                if x != EMPTY:
                    after = layer.load_E[x] / (slots.count_E[x] - 1) if _keeps(layer, slots, x, h, EMPTY) else np.inf
                lighter = after == least and slots.sum_s_GXW[h, 0, 0] < slots.sum_s_GXW[to, 0, 0]
                if after < size * SMALLER and (after < least or lighter):
                    least, to, slot = after, h, q
        if to == EMPTY:
            break
        goes = slots.held_GP[to, slot]
        overwrite(layer.times, slots, to, slot, e)
        _count_domains(layer, slots, e)
        _count_domains(layer, slots, goes)


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
def _best_step(layer, slots, g, left, target):
    """The step that relieves GPU g, the slowest, most for each move: how far it takes the changed GPUs down to the target."""
    load_E, cost_G, was_GE, slots_G = layer.load_E, layer.cost_G, layer.was_GE, layer.times.slots_G
    held_GP, holds_GE, count_E, gpu_EG = slots.held_GP, slots.holds_GE, slots.count_E, slots.gpu_EG
    time_G = slots.sum_s_GXW.ravel()
    size_E, top = load_E / count_E, time_G[g]
    limit, best, step = top * (1 - LEAST_RELIEF), 0.0, Step(NO_STEP, EMPTY, EMPTY, EMPTY, EMPTY, EMPTY, 0)
    for p in range(slots_G[g]):
        a = held_GP[g, p]
        if a == EMPTY or _relief(top, top - size_E[a] * cost_G[g], target, 0, left) <= best:  # no step with a relieves more
            continue
        for h in range(len(held_GP)):  # a swaps with b, or moves to an empty slot
            if time_G[h] >= limit or holds_GE[h, a] or not _keeps(layer, slots, a, g, h):
                continue
            # Both times, if b were of the best size.
            equal = (top * cost_G[h] + time_G[h] * cost_G[g]) / (cost_G[g] + cost_G[h])
            if _relief(top, equal * (1 - LEAST_RELIEF), target, 0, left) <= best:
                continue
            for q in range(slots_G[h]):
                b = held_GP[h, q]
                less = size_E[a] - (size_E[b] if b != EMPTY else 0.0)
                after = max(top - less * cost_G[g], time_G[h] + less * cost_G[h])
                if less <= 0 or after >= limit or (b != EMPTY and (holds_GE[g, b] or not _keeps(layer, slots, b, h, g))):
                    continue
                moves = _moves(was_GE, h, a, b) + _moves(was_GE, g, b, a)
                relief = _relief(top, after, target, moves, left)
                if relief > best:
                    best, step = relief, Step(SWAP, g, p, h, q, EMPTY, moves)
        size = load_E[a] / (count_E[a] + 1)
        less = size_E[a] - size
        alone = top - less * cost_G[g]
        if count_E[a] < len(held_GP) and _relief(top, alone, target, 0, left) > best:
            for h in range(len(held_GP)):  # a gets a further replica, in an empty slot or in place of x
                for q in range(slots_G[h] if not holds_GE[h, a] else 0):
                    x = held_GP[h, q]
                    if x != EMPTY and not _keeps(layer, slots, x, h, EMPTY):
                        continue
                    after = max(alone, time_G[h] + (size - (size_E[x] if x != EMPTY else 0.0)) * cost_G[h])
                    if after >= limit:
                        continue
                    if x != EMPTY:
                        more = load_E[x] / (count_E[x] - 1) - size_E[x]
                        for at in range(count_E[x]):
                            k = gpu_EG[x, at]
                            if k != h:
                                after = max(after, time_G[k] + (more - (less if holds_GE[k, a] else 0.0)) * cost_G[k])
                    relief = _relief(top, after, target, _moves(was_GE, h, a, x), left)
                    if relief > best:
                        best, step = relief, Step(REPLACE, EMPTY, EMPTY, h, q, a, _moves(was_GE, h, a, x))
        if not _keeps(layer, slots, a, g, EMPTY):
            continue
        more, others = load_E[a] / (count_E[a] - 1) - size_E[a], 0.0
        for at in range(count_E[a]):
            k = gpu_EG[a, at]
            if k != g:
                others = max(others, time_G[k] + more * cost_G[k])
        for e in range(len(load_E) if others < limit else 0):  # the replica of a gives way to e
            if holds_GE[g, e]:
                continue
            after = max(others, top + (load_E[e] / (count_E[e] + 1) - size_E[a]) * cost_G[g])
            relief = _relief(top, after, target, _moves(was_GE, g, e, a), left)
            if relief > best:
                best, step = relief, Step(REPLACE, EMPTY, EMPTY, g, p, e, _moves(was_GE, g, e, a))
    return step


@njit(cache=True, nogil=True)
def _keeps(layer, slots, e, g, to):
    """Returns whether an expert keeps enough replicas and failure domains if GPU g gives its to `to`, or to none (EMPTY)."""
    if slots.count_E[e] <= layer.least_E[e] and to == EMPTY:
        return False
    if layer.least_domains_E[e] == 1:
        return True
    out = layer.domain_G[g]
    domains = layer.domains_E[e] - (layer.held_ED[e, out] == 1)
    if to != EMPTY:
        into = layer.domain_G[to]
        domains += layer.held_ED[e, into] == (into == out)
    return domains >= layer.least_domains_E[e]


@njit(cache=True, nogil=True)
def _count_domains(layer, slots, e):
    """Counts the replicas of expert e, or of none (EMPTY), in each failure domain."""
    if e != EMPTY:
        layer.held_ED[e] = 0
        layer.domains_E[e] = 0
        for at in range(slots.count_E[e]):
            domain = layer.domain_G[slots.gpu_EG[e, at]]
            layer.domains_E[e] += layer.held_ED[e, domain] == 0
            layer.held_ED[e, domain] += 1


@njit(cache=True, nogil=True)
def _moves(was_GE, g, comes, goes):
    """Further experts on GPU g that it did not hold at the start; either expert may be EMPTY."""
    return int(comes != EMPTY and not was_GE[g, comes]) - int(goes != EMPTY and not was_GE[g, goes])


@njit(cache=True, nogil=True)
def _relief(top, after, target, moves, left):
    """Fall of the largest time towards the target, for each move (at least half a one); 0 if that is not allowed."""
    if moves > left or after >= top * (1 - LEAST_RELIEF):
        return 0.0
    return (top - max(after, target)) / max(moves, 0.5)


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


def rebalance_inside(
    load_LE: FloatArray,
    held_LGP: IntArray,
    part_LGP: FloatArray,
    slots: GpuSlots,
    server_G: IntArray,
    enough: float = 0.01,
    min_replicas: int = 1,
    domain_G: IntArray | None = None,
) -> IntArray:
    """Changes few slots of a placement in force, each server by itself, so that its GPUs suit new loads.

    Args:
        load_LE: (L, E) the load of each expert in each layer.
        held_LGP: (L, G, P) int64, the expert in each slot, EMPTY for none.
        part_LGP: (L, G, P) the part of its expert's load that each slot takes; a server keeps its parts.
        slots: how many experts fit on each GPU, and what load costs there.
        server_G: (G,) int64, the server of each GPU, numbered from zero.
        enough, min_replicas, domain_G: as of `aurora.rebalance`; each server keeps `min_replicas`, or what it has.

    Returns:
        (L, G, P) int64, the slots after it.
    """
    next_LGP = held_LGP.copy()
    for server in range(server_G.max() + 1):
        gpus = np.flatnonzero(server_G == server)
        mine = GpuSlots(slots.slots_G[gpus], slots.cost_G[gpus])
        domains = None if domain_G is None else domain_G[gpus]
        expert_LX = [np.unique(held_GP[gpus][held_GP[gpus] != EMPTY]) for held_GP in held_LGP]
        count_L = np.array(list(map(len, expert_LX)))
        for count in sorted(set(count_L.tolist()) - {0}):
            layers = np.flatnonzero(count_L == count)
            held = [(held_LGP[each][gpus], expert_LX[each]) for each in layers]
            numbered = [np.where(held_XP == EMPTY, EMPTY, np.searchsorted(expert_X, held_XP)) for held_XP, expert_X in held]
            loads = [_load_X(load_LE[each], held_LGP[each][gpus], part_LGP[each][gpus], expert_LX[each]) for each in layers]
            found = rebalance(np.array(loads), np.array(numbered), mine, None, 0.0, enough, min_replicas, domains).held_LGP
            for each, after_XP in zip(layers, found, strict=True):
                named_XP = np.where(after_XP == EMPTY, EMPTY, expert_LX[each][after_XP])
                next_LGP[each, gpus, : after_XP.shape[1]] = named_XP
    return next_LGP


def _load_X(load_E: FloatArray, held_XP: IntArray, part_XP: FloatArray, expert_X: IntArray) -> FloatArray:
    """The load of each of a server's experts there."""
    used_XP = held_XP != EMPTY
    part_E = np.bincount(held_XP[used_XP], part_XP[used_XP], minlength=len(load_E))
    return np.asarray((load_E * part_E)[expert_X])
