"""Balances single batches from their own token counts: divides the tokens of an expert over its replicas.

The placement was planned before, from other traffic.

Without numba's JIT (NUMBA_DISABLE_JIT=1) the same code runs in plain Python.
"""

import numpy as np

from aurora.algorithms.replicas.slot_packing import CLOSE
from aurora.types.compiled import njit
from aurora.types.placement import EMPTY_INT64 as EMPTY


@njit(cache=True, nogil=True)
def split_least_largest(load_DE, held_GP):
    """Divides each batch's tokens over replicas so that the largest number of tokens on a GPU is the least possible.

    This is LPLB's linear program, for any number of replicas, solved exactly as a flow (`minimise_max_time`).

    Args:
        load_DE: (D, E) float64, tokens of each expert in each batch.
        held_GP: (G, P) int64, the expert in each slot, -1 for none.

    Returns:
        (D, G, P) float64, the tokens of each slot.

    Source:
        github.com/deepseek-ai/LPLB; SGLang's `--ep-dispatch-algorithm lp` (pull request 24515).
    """
    gpus, width = held_GP.shape
    held_X = held_GP.ravel()
    count_E = np.bincount(held_X[held_X >= 0], minlength=load_DE.shape[1])
    cost_G, tokens_DGP = np.ones(gpus), np.zeros((len(load_DE), gpus, width))
    for d in range(len(load_DE)):
        for g in range(gpus):
            for p in range(width):
                if held_GP[g, p] != EMPTY:
                    tokens_DGP[d, g, p] = load_DE[d, held_GP[g, p]] / count_E[held_GP[g, p]]
        if load_DE[d].sum() > 0:
            minimise_max_time(held_GP, cost_G, tokens_DGP[d])
    return tokens_DGP


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
