"""Balancing of single batches: what tokens of a batch go to which replica, or which experts GPUs fetch for it.

The placement in force was planned before; these see the batch's own counts. Each function takes the batches of one layer.

Without numba's JIT (NUMBA_DISABLE_JIT=1) the same code runs in plain Python.
"""

import numpy as np

from aurora.planner.replication.free_split import minimise_max_time
from aurora.types.compiled import njit
from aurora.types.placement import EMPTY_INT64 as EMPTY


@njit(cache=True, nogil=True)
def split_least_largest(load_DE, held_GP):
    """Divides each batch's tokens over replicas so that the fullest GPU has as few as possible.

    It is the linear program of LPLB with any number of replicas of an expert: min t, where the parts x of expert e sum to its
    tokens and those of a GPU to t at most. Solved exactly as a flow (`minimise_max_time`).

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


@njit(cache=True, nogil=True)
def fewest_active(load_DE, held_GP):
    """Sends all of an expert's tokens to one of its replicas, so that GPUs have few active experts each.

    Experts with fewest replicas choose first; each takes the GPU with fewest active experts, and of these with fewest tokens.

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
    """Lets overloaded GPUs spill tokens to the least loaded ones, which fetch the experts' weights for this batch.

    Experts with most tokens come first. A GPU counts with what it was given and with its own experts that are still to come.

    Args:
        load_DE: (D, E) float64, whole tokens of each expert in each batch.
        home_E: (E,) int64, the GPU that holds each expert.
        gpus: how many.
        factor: times the mean load that a GPU takes at most.
        threshold: batches whose largest load is at most this times the mean stay as they are.
        least: tokens that are worth a fetch, unless no more are left.
        fetched_most: experts that a GPU fetches at most; what no GPU takes then stays at home. Below zero: no limit, and what
            is left goes to the least loaded GPU.

    Returns:
        (tokens_DG, active_DG, fetched_D): tokens and active experts of each GPU, and the experts fetched in all.

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
            left, home = load_DE[d, e], home_E[e]
            if left <= 0:
                break
            coming_G[home] -= left
            at_home = left if stays else min(left, max(most - given_G[home] - coming_G[home], 0.0))
            left -= at_home
            while left > 0:
                best, least_loaded = -1, -1
                for g in range(gpus):
                    if g == home or (fetched_most >= 0 and fetched_G[g] >= fetched_most):
                        continue
                    full = given_G[g] + coming_G[g]
                    if least_loaded < 0 or full < given_G[least_loaded] + coming_G[least_loaded]:
                        least_loaded = g
                    chunk = min(left, most - full)
                    worth = chunk > 0 and (chunk >= least or chunk == left)
                    if worth and (best < 0 or full < given_G[best] + coming_G[best]):
                        best = g
                if best < 0 and (fetched_most >= 0 or least_loaded < 0):
                    at_home += left
                    break
                to = best if best >= 0 else least_loaded
                chunk = min(left, most - given_G[to] - coming_G[to]) if best >= 0 else left
                given_G[to] += chunk
                active_DG[d, to] += 1
                fetched_G[to] += 1
                left -= chunk
            if at_home > 0:
                given_G[home] += at_home
                active_DG[d, home] += 1
        tokens_DG[d] = given_G
        fetched_D[d] = fetched_G.sum()
    return tokens_DG, active_DG, fetched_D
