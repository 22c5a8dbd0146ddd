"""Balances single batches from their own token counts: assigns tokens to replicas, or lets GPUs fetch experts for the batch.

The placement was planned before, from other traffic. Each function takes the batches of one layer.

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


@njit(cache=True, nogil=True)
def fewest_active(load_DE, held_GP):
    """Sends all tokens of an expert to one of its replicas, so that each GPU computes few different experts.

    Experts with the fewest replicas choose first. Each takes, of the GPUs that hold it, the one with the fewest active experts
    and, among equal ones, the fewest tokens. An expert is active on a GPU that gets tokens of it.

    Args and returns: as in `split_least_largest`.

    Source:
        METRO (arXiv:2512.09277): balances activated experts, not tokens, where reading weights takes the time.
    """
    gpus, width = held_GP.shape
    slot_GE = np.full((gpus, load_DE.shape[1]), EMPTY)
    for g in range(gpus):
        for p in range(width):
            if held_GP[g, p] != EMPTY:
                slot_GE[g, held_GP[g, p]] = p
    count_E = (slot_GE != EMPTY).sum(axis=0)
    tokens_DGP = np.zeros((len(load_DE), gpus, width))
    for d in range(len(load_DE)):
        active_G, total_G = np.zeros(gpus, dtype=np.int64), np.zeros(gpus)
        for e in np.argsort(count_E, kind="mergesort"):
            if load_DE[d, e] <= 0:
                continue
            best = -1
            for g in range(gpus):
                if slot_GE[g, e] != EMPTY and (
                    best < 0 or active_G[g] < active_G[best] or (active_G[g] == active_G[best] and total_G[g] < total_G[best])
                ):
                    best = g
            active_G[best] += 1
            total_G[best] += load_DE[d, e]
            tokens_DGP[d, best, slot_GE[best, e]] = load_DE[d, e]
    return tokens_DGP


@njit(cache=True, nogil=True)
def spill(load_DE, home_E, gpus, factor, threshold, least, fetched_most):
    """Moves tokens from overloaded GPUs to the least loaded ones, which fetch the experts' weights for this batch.

    Experts are assigned in falling order of tokens. A GPU's load is the tokens assigned to it so far, plus the tokens of the
    experts it holds that are not assigned yet.

    Args:
        load_DE: (D, E) float64, whole tokens of each expert in each batch.
        home_E: (E,) int64, the GPU that holds each expert.
        gpus: number of GPUs.
        factor: maximum load of a GPU / mean load.
        threshold: largest load / mean load up to which a batch stays as it is.
        least: minimum tokens for which a GPU fetches an expert, unless fewer are left of it.
        fetched_most: maximum experts that a GPU fetches; tokens that no GPU takes then stay on the expert's GPU. Below zero: no
            limit, and tokens that no GPU takes within `factor` go to the least loaded GPU.

    Returns:
        (tokens_DG, active_DG, fetched_D): tokens and active experts of each GPU, and the total of fetched experts, per batch.

    Source:
        LLEP (arXiv:2601.17111), algorithm LLA; with a limit as UltraEP's (arXiv:2606.04101) slots for replicas.
    """
    tokens_DG, active_DG = np.zeros((len(load_DE), gpus)), np.zeros((len(load_DE), gpus))
    fetched_D = np.zeros(len(load_DE))
    for d in range(len(load_DE)):
        given_G, fetched_G, coming_G = np.zeros(gpus), np.zeros(gpus, dtype=np.int64), np.zeros(gpus)
        for e in range(len(home_E)):
            coming_G[home_E[e]] += load_DE[d, e]
        mean = coming_G.sum() / gpus
        stays = coming_G.max() <= threshold * mean
        most = max(np.floor(factor * np.floor(mean)), 1.0) if mean >= 1 else mean * gpus
        for e in np.argsort(-load_DE[d], kind="mergesort"):
            tokens, home = load_DE[d, e], home_E[e]
            if tokens <= 0:
                break
            coming_G[home] -= tokens
            at_home = tokens if stays else min(tokens, max(most - given_G[home] - coming_G[home], 0.0))
            tokens -= at_home
            while tokens > 0:
                best, least_loaded = -1, -1
                for g in range(gpus):
                    if g == home or (fetched_most >= 0 and fetched_G[g] >= fetched_most):
                        continue
                    full = given_G[g] + coming_G[g]
                    if least_loaded < 0 or full < given_G[least_loaded] + coming_G[least_loaded]:
                        least_loaded = g
                    chunk = min(tokens, most - full)
                    worth = chunk > 0 and (chunk >= least or chunk == tokens)
                    if worth and (best < 0 or full < given_G[best] + coming_G[best]):
                        best = g
                if best < 0 and (fetched_most >= 0 or least_loaded < 0):
                    at_home += tokens
                    break
                to = best if best >= 0 else least_loaded
                chunk = min(tokens, most - given_G[to] - coming_G[to]) if best >= 0 else tokens
                given_G[to] += chunk
                active_DG[d, to] += 1
                fetched_G[to] += 1
                tokens -= chunk
            if at_home > 0:
                given_G[home] += at_home
                active_DG[d, home] += 1
        tokens_DG[d] = given_G
        fetched_D[d] = fetched_G.sum()
    return tokens_DG, active_DG, fetched_D
